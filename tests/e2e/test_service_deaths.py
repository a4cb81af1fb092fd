"""Services that are killed in mid-run."""

import os
import re
import shlex
import signal
import subprocess

import pytest

from tests.e2e.command import CARTPOLE, Command, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
FOREVER = settings("train.target_return=null", "train.max_env_steps=1_000_000_000")


def kill(command, name):
    command.wait_for(r"version [3-9]")
    os.kill(command.services()[name], signal.SIGKILL)


def test_a_dead_service_ends_the_run(tmp_path):
    name, label = "policy_server", "policy server"
    with Command("train", CARTPOLE, *FOREVER, cwd=tmp_path) as command:
        kill(command, name)
        command.wait_for(rf"the {label} was killed by SIGKILL", 2)
        assert command.wait(30) == 1
        assert re.search(rf"last lines of runs/cartpole/1/logs/{name}.log:\n  \| ", command.stdout)
        assert re.fullmatch(
            rf"error: the {label} was killed by SIGKILL after .* s\n", command.stderr
        )


@pytest.mark.parametrize("name", ["policy_server", "buffer_server", "env_server"])
def test_a_service_that_is_started_again_by_hand(tmp_path, name):
    label = name.replace("_", " ")
    with Command("train", CARTPOLE, "--restart-window", "60", cwd=tmp_path) as command:
        kill(command, name)
        again = command.wait_for(rf"^  (\S.* -m rlightning\.services\.{name} .*)$", 5)[1]
        with subprocess.Popen(
            shlex.split(again), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as by_hand:
            try:
                command.wait_for(rf"the {label} is SERVING again", 20)
                assert command.wait(120) == 0, command.stderr
                assert "was started by hand and is left to itself" in command.stdout
                assert by_hand.poll() is None
            finally:
                by_hand.kill()
        assert "\nsolved: " in command.stdout


def test_a_service_that_stays_away(tmp_path):
    with Command("train", CARTPOLE, *FOREVER, "--restart-window", "2", cwd=tmp_path) as command:
        kill(command, "policy_server")
        command.wait_for("waiting up to 2 s; start it again with:", 3)
        assert command.wait(30) == 1
        assert "error: the policy server was killed by SIGKILL" in command.stderr
