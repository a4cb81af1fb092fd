"""An env server whose upstreams die, fill up, or never come."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import pytest

from rlightning.env.remote_client import EnvClient
from rlightning.testing import ServerProcess, assert_eventually, free_address

CONFIG = """
env: {name: cart, backend: gymnasium, task: "%s", num_envs: 4}
policy: {model_cfg: {hidden: [8]}, device: cpu, initial_weights: random}
buffer: {type: RolloutBuffer, rollout_length: 16, max_rollouts: %d}
services:
  grace_s: 8
  policy: {listen: "%s"}
  buffer: {listen: "%s"}
"""


class Cluster:
    """The three servers as processes on fixed ports, so that one can come back."""

    def __init__(
        self,
        tmp_path,
        stack,
        *,
        task="CartPole-v1",
        max_rollouts=100_000,
        start=("policy", "buffer"),
    ):
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG % (task, max_rollouts, free_address(), free_address()))
        self.servers = {}
        for name in ("policy", "buffer", "env"):
            (tmp_path / name).mkdir()
            command = ["-m", f"rlightning.services.{name}_server", "--config", str(config)]
            self.servers[name] = ServerProcess(command, tmp_path / name)
        self._stack = stack
        for name in (*start, "env"):
            self.start(name)
        self.client = EnvClient(self.servers["env"].address())

    def start(self, name):
        self.servers[name].start()
        self._stack.callback(self.kill, name)

    def kill(self, name):
        self.servers[name].child.kill()
        self.servers[name].child.wait(30)

    async def steps(self):
        assert self.servers["env"].child.poll() is None, self.servers["env"].log
        return (await self.client.describe()).env_steps

    async def assert_stepping(self, more=200):
        before = await self.steps()

        async def stepped():
            return await self.steps() > before + more

        await assert_eventually(stepped, 30, "the envs are not stepped")


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.mark.crash
@pytest.mark.parametrize("victim", ["policy", "buffer"])
async def test_a_server_that_is_killed_and_comes_back(tmp_path, stack, victim):
    cluster = Cluster(tmp_path, stack)
    async with cluster.client as client:
        await cluster.assert_stepping()
        cluster.kill(victim)

        async def stands_still():
            before = await cluster.steps()
            await client.describe()
            return before == await cluster.steps()

        await assert_eventually(stands_still, 60)
        cluster.start(victim)
        await cluster.assert_stepping()
        assert cluster.servers["env"].child.poll() is None
        status = await client.describe()
        assert {e.reason for e in status.episodes} <= {"terminated", "truncated"}
    cluster.servers["env"].child.terminate()
    assert cluster.servers["env"].child.wait(30) == 0


async def test_an_env_that_fails_for_good_ends_the_process_with_one_line(tmp_path, stack):
    cluster = Cluster(tmp_path, stack, task="tests.unit.env.envs:AlwaysBreaking")
    process = cluster.servers["env"]
    assert await asyncio.to_thread(process.child.wait, 60) == 1
    errors = [line for line in process.log.splitlines() if " ERROR " in line]
    assert len(errors) == 1
    assert "cannot go on: the actor of cart-0-" in errors[0]
    assert "step raised RuntimeError: the arm fell off" in errors[0]
    assert "Traceback" not in process.log


async def test_servers_that_come_late(tmp_path, stack):
    cluster = Cluster(tmp_path, stack, start=())
    async with cluster.client as client:
        assert (await client.describe()).env_steps == 0
        for name in ("policy", "buffer"):
            cluster.start(name)
        await cluster.assert_stepping()


@pytest.mark.parametrize("start", [(), ("policy", "buffer")])
async def test_the_end_does_not_wait_for_servers_that_let_nothing_happen(tmp_path, stack, start):
    cluster = Cluster(tmp_path, stack, max_rollouts=1, start=start)
    async with cluster.client:
        if start:
            await cluster.assert_stepping(16)

            async def full():
                before = await cluster.steps()
                # So many only both groups together reach: one waits for the other's rows.
                await asyncio.sleep(1)
                return before >= 64 and before == await cluster.steps()

            await assert_eventually(full, 60)
        else:
            await cluster.steps()
    begin = time.monotonic()
    cluster.servers["env"].child.terminate()
    assert cluster.servers["env"].child.wait(30) == 0
    assert time.monotonic() - begin < 9
    log = cluster.servers["env"].log
    assert "Traceback" not in log
    if start:  # a full buffer is how every run ends, and nothing to warn of
        assert log.count("the buffer has no room for the last") == 2
        assert "was acked" not in log
