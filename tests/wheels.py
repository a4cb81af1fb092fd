"""Resolves what a client needs, from wheels alone, for machines that are not this one: `python -m tests.wheels [VERSIONS]`.

For each platform and each CPython 3.10-3.13, or those that are named, pip chooses among the wheels of the package index as
it would there, and installs nothing; of most wheels it fetches the metadata only. The base install and the extra `robot`.
Markers in requirements (`sys_platform == ...`) are those of this machine. Prints a section for benchmarks/RESULTS.md; exits
with 1 when one does not resolve.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from tests.wheel import build_wheel

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# glibc 2.28 is that of Debian 10, RHEL 8 and all that is newer.
LINUX = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
PLATFORMS = {
    "linux x86_64": [f"{name}_x86_64" for name in LINUX],
    "linux aarch64": [f"{name}_aarch64" for name in LINUX],
    "macOS arm64": ["macosx_12_0_arm64"],
    "macOS x86_64": ["macosx_12_0_x86_64"],
    "Windows": ["win_amd64"],
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]


def resolve(wheel: Path, platforms: list[str], version: str) -> str:
    """Returns the names of the wheels that are for such a machine alone, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += [part for platform in platforms for part in ("--platform", platform)]
        command += ["--implementation", "cp", "--python-version", version]
        command += ["--target", str(Path(folder) / "none"), "--report", str(report)]
        done = subprocess.run(
            [*command, f"rlightning[robot] @ {wheel.as_uri()}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        files = [one["download_info"]["url"] for one in json.loads(report.read_text())["install"]]
    native = sorted(Path(file).name for file in files if not file.endswith("-none-any.whl"))
    return ", ".join("-".join(name.split("-")[:2]) for name in native)


def main() -> int:
    """Tries every platform with every version, several at a time: most of it is waiting for the index."""
    versions = sys.argv[1:] or VERSIONS
    print(f"\n## {datetime.now(timezone.utc).date()}, client wheels: `make wheels-check`\n")
    print("| machine | CPython | wheels for it alone; the others are for all |\n|---|---|---|")
    failed = 0
    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(5) as threads:
        wheel = build_wheel(Path(out))
        tries = {
            (platform, version): threads.submit(resolve, wheel, tags, version)
            for platform, tags in PLATFORMS.items()
            for version in versions
        }
        for (platform, version), one in tries.items():
            try:
                found = one.result()
            except RuntimeError as error:
                failed += 1
                found = "**none**"
                print(f"{platform}, CPython {version}: {error}", file=sys.stderr)
            print(f"| {platform} | {version} | {found} |", flush=True)
    print(f"\n{len(tries) - failed} of {len(tries)} resolve.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
