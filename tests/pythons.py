"""Tries the base install on every CPython 3.10-3.13 of this machine: `python -m tests.pythons`.

Each gets a virtual environment of its own under `.venvs/` with the wheel and its base dependencies, the
newest ones there are; the oldest Python also gets the oldest dependencies that the wheel allows. Then
`tests/base_install.py` runs there. Exits with 1 when one fails, or when no Python is found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.wheel import ROOT, build_wheel

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PROBE = (ROOT / "tests" / "base_install.py").read_text()


def interpreter(version: str) -> str | None:
    """Finds CPython of `version` in a pyenv root or on the path."""
    for root in (Path.home() / ".pyenv", Path("/opt/pyenv")):
        found = sorted(root.glob(f"versions/{version}.*/bin/python"))
        if found:
            return str(found[-1])
    candidate = shutil.which(f"python{version}")
    # A pyenv shim exists also for versions that are not chosen, and fails.
    if candidate and subprocess.run([candidate, "-c", ""], check=False).returncode == 0:
        return candidate
    return None


def oldest_dependencies(wheel: Path) -> Iterator[str]:
    """Yields a requirement of the least version for each base dependency."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE):
        if "extra ==" not in line:
            name, least = re.fullmatch(r"([\w.-]+)[^>]*>=([\d.]+).*", line).groups()
            yield f"{name}=={least}"


def check(name: str, python: str, wheel: Path, requirements: Sequence[str] = ()) -> bool:
    """Installs the wheel for one interpreter and uses it outside of the checkout."""
    env = ROOT / ".venvs" / name
    bin_python = env / "bin" / "python"
    if not bin_python.exists():
        subprocess.run([python, "-m", "venv", str(env)], check=True)
    pip = [str(bin_python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, str(wheel), *requirements], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as outside:
        used = subprocess.run(
            [str(bin_python), "-W", "error", "-c", PROBE], cwd=outside, check=False
        )
        shown = subprocess.run(
            [str(env / "bin" / "rlightning"), "train", "--help"],
            cwd=outside,
            stdout=subprocess.DEVNULL,
            check=False,
        )
    return used.returncode == shown.returncode == 0


def main() -> int:
    """Checks every version that is there."""
    found = {version: python for version in VERSIONS if (python := interpreter(version))}
    results = {}
    with tempfile.TemporaryDirectory() as out:
        wheel = build_wheel(Path(out))
        for version, python in found.items():
            results[version] = check(version, python, wheel)
        for version, python in tuple(found.items())[:1]:
            name = f"{version}-oldest"
            results[name] = check(name, python, wheel, tuple(oldest_dependencies(wheel)))
    failed = [name for name, good in results.items() if not good]
    print(
        f"base install: {len(results) - len(failed)} of {len(results)} ok",
        *(f"failed: {name}" for name in failed),
    )
    return 1 if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
