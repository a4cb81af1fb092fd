"""What lies in the current folder shadows nothing: neither this library nor another."""

import subprocess
import sys

import pytest

from tests.e2e.command import CARTPOLE, SMALL, run, settings

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """As the parent of a clone looks to Python, with a bad neighbour."""
    (tmp_path / "rlightning" / "services").mkdir(parents=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('not that torch')\n")
    return tmp_path


@pytest.mark.parametrize("name", ["policy", "buffer", "env"])
def test_services_start_by_hand(folder, name):
    command = [sys.executable, "-m", f"rlightning.services.{name}_server", "--help"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--listen" in done.stdout


def test_a_run_trains(folder):
    code, _, err = run("train", CARTPOLE, *settings(*SMALL), cwd=folder)
    assert (code, err) == (0, "")
