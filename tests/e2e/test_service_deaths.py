"""Services that are killed in mid-run."""

import os
import re
import shlex
import signal
from contextlib import ExitStack

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, SMALL, Command, is_running, settings

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]


def test_a_dead_service_ends_the_run(tmp_path):
    options = settings("train.target_return=null")
    with Command("train", CARTPOLE, *options, cwd=tmp_path) as command:
        command.wait_for(r"version ([3-9]|\d\d)")
        os.kill(command.services()["policy_server"], signal.SIGKILL)
        command.wait_for(r"the policy server was killed by SIGKILL", 30)
        assert command.wait(30) == 1
        assert re.search(
            r"last lines of runs/cartpole/1/logs/policy_server\.log:\n  \| ", command.stdout
        )
        # The publisher may have met the dead server first, and said that weights have to wait.
        assert re.fullmatch(
            r"(version \d+ of the weights has to wait: .*\n)?"
            r"error: the policy server was killed by SIGKILL after .* s\n",
            command.stderr,
        )


def wait_for_version(command, *, above):
    """Waits for a newer version of the weights; returns it."""

    def newest():
        return max(map(int, re.findall(r"version (\d+)", command.stdout)), default=0)

    wait_until(lambda: newest() > above, 30, f"no version above {above}")
    return newest()


def test_each_service_killed_and_started_again_by_hand(tmp_path):
    with ExitStack() as stack:
        options = ("--restart-window", "60")
        command = stack.enter_context(Command("train", CARTPOLE, *options, cwd=tmp_path))
        version = wait_for_version(command, above=0)
        ours = command.services()
        for name in ("policy_server", "buffer_server", "env_server"):
            os.kill(ours[name], signal.SIGKILL)
            again = command.wait_for(rf"^  (\S.* -m rlightning\.services\.{name} .*)$", 30)[1]
            stack.enter_context(Command(*shlex.split(again), cwd=tmp_path, command=()))
            command.wait_for(rf"the {name.replace('_', ' ')} is SERVING again", 30)
            version = wait_for_version(command, above=version)
        assert command.wait(120) == 0, command.stderr
        assert "\nsolved: " in command.stdout
        assert command.stdout.count("was started by hand and is left to itself") == 3


def test_a_service_that_stays_away(tmp_path):
    options = (*settings(*SMALL), "--restart-window", "1")
    with Command("serve", CARTPOLE, *options, cwd=tmp_path) as command:
        command.wait_serving()
        pids = command.services()
        os.kill(pids.pop("buffer_server"), signal.SIGKILL)
        command.wait_for("waiting up to 1 s; start it again with:", 30)
        assert command.wait(20) == 1
        assert command.stderr.startswith("error: the buffer server was killed by SIGKILL")
        wait_until(lambda: not any(map(is_running, pids.values())), 30)
