"""A run with a durable buffer: each container is killed, a link is cut, and all of it is stopped and goes on."""

import re
import subprocess
import time
from contextlib import contextmanager

import pytest

from rlightning.env.remote_client import EnvClient
from rlightning.rpc.loop import shared_loop
from rlightning.testing import free_address
from tests.docker.ledger import Ledger, check_dynamics, read_all
from tests.docker.stack import HERE, ROOT, SERVICES, Stack, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

CUT_S = 10.0


@pytest.fixture
def stack(built, monkeypatch):
    """A stack with the settings of `.env.example` for a durable buffer, and RESUME=latest."""
    example = (ROOT / ".env.example").read_text()
    setting = re.search(r"^#RLIGHTNING__BUFFER=(.*)$", example, re.MULTILINE)[1]
    monkeypatch.setenv("BUFFER_SETTING", setting)
    monkeypatch.setenv("CONFIG", "configs/cartpole_dqn.yaml")
    monkeypatch.setenv("RESUME", "latest")
    # One that comes back is published where it was.
    monkeypatch.setenv("BUFFER_PORT", free_address().rpartition(":")[2])
    stack = Stack(HERE / "durable.yml")
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def addresses(container):
    return [network["IPAddress"] for network in container["NetworkSettings"]["Networks"].values()]


@contextmanager
def cut(server, client):
    """Lets packets of one container to another one vanish."""
    rules = [("-s", ip, "-p", "tcp", "-j", "DROP") for ip in addresses(client)]
    inside = ["nsenter", "-t", str(server["State"]["Pid"]), "-n", "iptables"]
    for rule in rules:
        subprocess.run([*inside, "-I", "INPUT", *rule], check=True, timeout=10)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*inside, "-D", "INPUT", *rule], check=True, timeout=10)


def segments(stack):
    """Returns how often rows of an env server began anew, which they do where something was lost."""

    async def ask():
        async with EnvClient(stack("port", "env_server", 50051).strip()) as client:
            return (await client.describe()).stats

    stats = shared_loop().run(ask())
    return stats["segments"], stats["env_errors"]


def test_nothing_acked_is_lost_and_no_step_is_taken_twice(stack, monkeypatch):
    buffer = stack("port", "buffer_server", 50053).strip()
    anew = "starts anew: no run in /runs/cartpole_dqn has a checkpoint"
    stack.wait_for_log(lambda log: anew in log, 60, "the run begins")
    ledger = Ledger(buffer)
    stack.wait_for_progress(1_500, 5, "the run begins")

    for name in ("buffer_server", "policy_server", "env_server", "learner"):
        folder, _, _ = stack.progress()
        acked = ledger.acked
        stack.kill(name)
        if name == "learner":
            wait_until(lambda folder=folder: stack.progress()[0] != folder, 60, "a new run")
            assert f"resumes {folder}/checkpoints/" in stack.learner_log()
        wait_until(lambda acked=acked: ledger.acked > acked + 20, 60, "what is inserted is acked")
        stack.wait_for_progress(400, 5, f"the run goes on after the {name} was killed")
    wait_until(
        lambda: all(stack.containers()[name]["Health"] == "healthy" for name in SERVICES),
        60,
        "healthy",
    )

    before = segments(stack)
    with cut(stack.inspect("policy_server"), stack.inspect("env_server")):
        time.sleep(CUT_S / 2)
        held = stack.progress()[1]
        time.sleep(CUT_S / 2)
        assert stack.progress()[1] == held
    stack.wait_for_progress(400, 5, "the run goes on after the cut")
    assert segments(stack) == before

    ledger.finish()
    columns = read_all(buffer)
    ledger.check(columns)
    check_dynamics(columns)

    stack("stop", "--timeout", 20)
    codes = {name: container["ExitCode"] for name, container in stack.containers().items()}
    assert codes == dict.fromkeys(codes, 0)  # the learner's too, which was training
    folder, steps, version = stack.progress()
    stack.down(volumes=False)
    stack.up()
    stack.wait_for_log(lambda log: f"resumes {folder}/checkpoints/" in log, 60, "resumed")
    wait_until(lambda: stack.progress()[1] > steps, 60, "its env steps count on")
    wait_until(lambda: stack.progress()[2] > version, 60, "and so do its versions")
    ledger.check(read_all(stack("port", "buffer_server", 50053).strip()))

    steps = stack.progress()[1]
    stack.down(volumes=False)
    monkeypatch.setenv("RESUME", "")
    stack.up()
    stack.wait_for_log(lambda log: re.search("^starts anew$", log, re.MULTILINE), 60, "anew")
    wait_until(lambda: stack.progress()[1], 60, "its env steps are counted")
    assert stack.progress()[1] < steps
    assert "resumes" not in stack.learner_log()
