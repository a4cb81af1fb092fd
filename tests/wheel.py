"""Builds the wheel, from a copy, so that neither what was built before nor who builds now is in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rlightning", "services")


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout into `folder` with the setuptools that is installed."""
    with tempfile.TemporaryDirectory() as copy:
        for name in SOURCES:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, Path(copy) / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        done = subprocess.run(
            [*command, "--outdir", str(folder), copy], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("rlightning-*.whl")
    return wheel
