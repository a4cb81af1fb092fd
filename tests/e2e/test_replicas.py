"""Training over two policy servers, or two env servers, of which one is killed."""

import os
import re
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, SMALL, Command, settings

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]


def replica(command, role, index):
    """Process id of a replica."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            words = (folder / "cmdline").read_bytes().decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == command.process.pid and f"{role}-{index}.yaml" in words:
            return int(folder.name)
    raise AssertionError(f"no replica {index}")


@pytest.mark.parametrize("role", ["policy", "env"])
def test_a_replica_is_killed_and_the_run_goes_on(role, tmp_path):
    options = settings(
        *(one for one in SMALL if "max_env_steps" not in one),
        f"services.{role}.replicas=2",
        "train.max_env_steps=1_000_000",
        # A rollout waits for the rows of an env server that may come back.
        "services.buffer.rpc={heartbeat_s: 0.5, lease_s: 2, resume_window_s: 1}",
    )
    with ExitStack() as stack:
        command = stack.enter_context(Command("train", CARTPOLE, *options, cwd=tmp_path))

        def newest():
            return max(map(int, re.findall(r"version (\d+)", command.stdout)), default=0)

        wait_until(lambda: newest() > 2, 60)
        os.kill(replica(command, role, 0), signal.SIGKILL)
        command.wait_for(f"the {role} server 0 was killed by SIGKILL", 30)
        again = command.wait_for(rf"^  (\S.*{role}_server .*{role}-0\.yaml.*)$", 30)[1]
        before = newest()
        wait_until(lambda: newest() > before + 1, 30, "the run stands still")
        stack.enter_context(Command(*shlex.split(again), cwd=tmp_path, command=()))
        command.wait_for(f"the {role} server 0 is SERVING again", 30)
        os.kill(replica(command, role, 1), signal.SIGKILL)
        before = newest()
        wait_until(lambda: newest() > before + 1, 30, "the run stands still")
        command.interrupt()
        command.wait(30)
