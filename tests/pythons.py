"""Imports the base install on every CPython 3.10-3.13 of this machine: `python -m tests.pythons`.

Each version gets a virtual environment of its own under `.venvs/` with the wheel and its base dependencies,
so that what the light client needs is shown rather than believed. Exits 1 when one fails, or when none is found.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

# What a robot needs, used once: a round trip through the codec, an env, a channel.
PROBE = """
import sys
import rlightning, rlightning.types, rlightning.wire, rlightning.rpc, rlightning.env, rlightning.actor
import rlightning.buffer, rlightning.policy, rlightning.cluster, rlightning.cli
import numpy as np
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.wire import decode_env_ret, encode_env_ret

assert EnvMeta._fields == ("env_id", "action_space", "observation_space", "num_envs"), EnvMeta._fields
image = np.arange(3 * 84 * 84, dtype=np.uint8).reshape(3, 84, 84)
back = decode_env_ret(encode_env_ret(EnvRet("env", {"image": image, "text": "go"}))).cpu()
assert (np.asarray(back.observation["image"]) == image).all()
heavy = {"torch", "tensordict", "torchrl", "uvloop"} & set(sys.modules)
assert not heavy, heavy
print(sys.version.split()[0], "numpy", np.__version__, "ok")
"""


def interpreter(version: str) -> str | None:
    """Finds CPython of `version` on the path or in a pyenv root."""
    roots = [Path.home() / ".pyenv", Path("/opt/pyenv")]
    for root in roots:
        found = sorted(glob.glob(str(root / "versions" / f"{version}.*" / "bin" / "python")))
        if found:
            return found[-1]
    candidate = shutil.which(f"python{version}")
    if (
        candidate
        and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0
    ):
        return candidate
    return None


def check(version: str, python: str, wheel: Path) -> bool:
    """Installs the wheel's base dependencies for one interpreter and runs the probe outside the checkout."""
    env = ROOT / ".venvs" / version
    bin_python = env / "bin" / "python"
    if not bin_python.exists():
        subprocess.run([python, "-m", "venv", str(env)], check=True)
    pip = [str(bin_python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, str(wheel)], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as outside:
        return (
            subprocess.run(
                [str(bin_python), "-W", "error", "-c", PROBE], cwd=outside, check=False
            ).returncode
            == 0
        )


def main() -> int:
    """Checks every version that is there."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", out, str(ROOT)],
            check=True,
            capture_output=True,
        )
        (wheel,) = Path(out).glob("*.whl")
        found = {version: python for version in VERSIONS if (python := interpreter(version))}
        failed = [version for version, python in found.items() if not check(version, python, wheel)]
    print(
        f"base install: {len(found) - len(failed)} of {len(found)} versions ok",
        *(f"failed: {v}" for v in failed),
    )
    return 1 if failed or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
