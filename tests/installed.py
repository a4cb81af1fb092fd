"""Installs the wheel with all that it needs, and solves CartPole with it: `python -m tests.installed [PIP OPTIONS]`.

The virtual environment is new and empty, and outside the checkout, as are the config and the run. Exits with 1
unless the target return is reached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.wheel import ROOT, build_wheel

# Neither the checkout nor what it has installed may leak in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
LIMIT_S = 300.0


def install(wheel: Path, env: Path, options: Sequence[str]) -> Path:
    """Installs the wheel with the extra `all` into a new environment; returns its folder of commands."""
    venv.create(env, with_pip=True)
    # Modules are compiled when they are imported: of these gigabytes few are.
    pip = [env / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "install", "--no-compile", *options, f"rlightning[all] @ {wheel.as_uri()}"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)  # for `-c constraints.txt`
    return env / "bin"


def train(commands: Path, outside: Path) -> dict[str, object]:
    """Trains to the target return in a folder with nothing but a config; returns what `--json` says."""
    where = [commands / "python", "-c", "import rlightning; print(rlightning.__file__)"]
    found = subprocess.check_output(where, cwd=outside, env=ENVIRONMENT, text=True)
    assert Path(found).is_relative_to(commands.parent), f"not that of the wheel: {found}"
    shutil.copy(ROOT / "configs" / "cartpole.yaml", outside)
    trained = subprocess.run(
        [commands / "rlightning", "train", "cartpole.yaml", "--json"],
        cwd=outside,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert trained.returncode == 0, f"rlightning train exited with {trained.returncode}"
    end: dict[str, object] = json.loads(trained.stdout.splitlines()[-1])
    return end


def main() -> int:
    """Installs and trains."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        commands = install(build_wheel(Path(folder)), Path(folder) / "env", sys.argv[1:])
        installed_s = time.monotonic() - begun
        outside = Path(folder) / "outside"
        outside.mkdir()
        try:
            end = train(commands, outside)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"the installed wheel: {error}", file=sys.stderr)
            return 1
    print(
        f"the wheel, installed in {installed_s:.0f} s, {end['outcome']} CartPole in "
        f"{end['elapsed_s']:.0f} s: mean return {end['reached_return']:.1f}"
    )
    return 0 if end["outcome"] == "solved" else 1


if __name__ == "__main__":
    raise SystemExit(main())
