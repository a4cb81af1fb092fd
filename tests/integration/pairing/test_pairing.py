"""Answers, observations and outcomes stay together through kills, cuts and freezes of real servers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.env.remote_client import EnvClient
from rlightning.policy import PolicyClient, WeightPublisher
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.utils.config import RpcConfig
from tests.integration.pairing.ledger import Ledger
from tests.integration.pairing.policy import weights
from tests.service_processes import Services

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]

FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0, reconnect_initial_ms=10)
RPC = json.dumps({"rpc": FAST.model_dump(exclude_defaults=True)})
CONFIG = f"""
env: {{name: count, backend: gymnasium, task: "tests.integration.pairing.env:Counting", num_envs: 6}}
policy: {{type: "tests.integration.pairing.policy:Echo", device: cpu, initial_weights: random}}
buffer: {{type: RolloutBuffer, rollout_length: 8}}
services: {{env: {RPC}, policy: {RPC}, buffer: {RPC}}}
"""
PATIENCE_S = 40.0


class Learner:
    """Takes rollouts, checks them, and publishes the next version for each."""

    def __init__(self, samples: SampleClient, publisher: WeightPublisher) -> None:
        self.ledger = Ledger()
        self.batches = 0
        self._samples = samples
        self._publisher = publisher

    async def run(self) -> None:
        version = 0
        while True:
            version += 1
            await self._publisher.publish(version, weights(version), timeout_s=PATIENCE_S)
            batch = await self._samples.next_batch(PATIENCE_S)
            self.ledger.add(batch.columns)
            self.batches += 1


@asynccontextmanager
async def learning(services: Services) -> AsyncIterator[tuple[Learner, Callable[..., Any]]]:
    """Learns meanwhile; yields the learner, and a function that waits for its progress."""
    policy = PolicyClient(services.addresses["policy"], rpc=FAST)
    publisher = WeightPublisher(policy, watch_s=0.1)
    async with policy, SampleClient(services.addresses["buffer"], rpc=FAST) as samples:
        publisher.start()
        learner = Learner(samples, publisher)
        task = asyncio.create_task(learner.run())

        async def progress(batches: int = 5) -> None:
            """Waits until answers of weights that were published from now on are learned from."""
            goal = learner.batches + batches

            def reached() -> bool:
                for name, process in services.processes.items():
                    assert process.child.poll() is None, (name, process.log)
                if task.done():
                    task.result()
                return learner.ledger.newest_version >= goal

            await assert_eventually(reached, PATIENCE_S, "no progress")

        try:
            yield learner, progress
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await publisher.close()
        learner.ledger.check_versions()


async def stats(services: Services) -> dict[str, Any]:
    async with EnvClient(services.addresses["env"]) as client:
        return dict((await client.describe()).stats)


async def env_steps(services: Services) -> int:
    async with EnvClient(services.addresses["env"]) as client:
        return (await client.describe()).env_steps


async def test_servers_that_are_killed_and_started_again(tmp_path: Path) -> None:
    rng = random.Random(3)
    with Services(tmp_path, CONFIG) as services:
        services.wait_serving()
        async with learning(services) as (learner, progress):

            async def kill(*victims: str) -> None:
                await progress()
                await asyncio.sleep(rng.uniform(0, 0.02))  # anywhere in a step
                for name in victims:
                    services.kill(name)
                await asyncio.sleep(rng.uniform(0, 0.3))
                for name in victims:
                    services.restart(name)

            await kill("policy")
            await kill("policy")
            await progress()
            # Only the buffer has anything to lose.
            assert learner.ledger.repeated == 0
            assert learner.ledger.missing() == 0
            await kill("buffer")
            await kill("buffer")
            await kill("policy", "buffer")
            await progress(20)
            status = await stats(services)
        assert (status["env_errors"], status["policy_errors"]) == (0, 0)
        assert len(learner.ledger.instances) == 6
        services.processes["env"].terminate()
        assert services.processes["env"].wait(30) == 0


async def test_a_server_that_stands_still_for_longer_than_its_lease(tmp_path: Path) -> None:
    with Services(tmp_path, CONFIG) as services:
        services.wait_serving()
        async with learning(services) as (learner, progress):
            for name in ("policy", "buffer", "env"):
                await progress()
                services.processes[name].freeze()
                await asyncio.sleep(2 * FAST.lease_s)
                services.processes[name].thaw()
            await progress()
        assert learner.ledger.repeated == 0
        assert learner.ledger.missing() == 0


async def test_an_env_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    with Services(tmp_path, CONFIG) as services:
        services.wait_serving()
        async with learning(services) as (learner, progress):
            for _ in range(2):
                await progress()
                services.kill("env")
                services.restart("env")
            await progress()
        assert len(learner.ledger.instances) == 3 * 6
        assert learner.ledger.repeated == 0


async def test_connections_that_break_at_any_time(tmp_path: Path) -> None:
    """Also during an inference: then a request is sent twice before it is answered."""
    rng = random.Random(5)
    slow = CONFIG.replace("device: cpu", "device: cpu, model_cfg: {seconds: 0.03}")
    services = Services(tmp_path, slow)
    async with (
        FaultProxy(services.addresses["policy"]) as to_policy,
        FaultProxy(services.addresses["buffer"]) as to_buffer,
    ):
        services.dialled = {"policy": to_policy.address, "buffer": to_buffer.address}
        with services:
            await asyncio.to_thread(services.wait_serving)
            async with learning(services) as (learner, progress):
                await progress()
                for _ in range(20):
                    proxy = rng.choice([to_policy, to_policy, to_buffer])
                    proxy.delay_s = rng.choice([0.0, 0.01])
                    rng.choice([proxy.cut, proxy.reset])()
                    await asyncio.sleep(rng.uniform(0.05, 0.2))
                to_policy.black_hole()
                await asyncio.sleep(2 * FAST.lease_s)
                to_policy.restore()
                await progress()
                status = await stats(services)
            assert (status["env_errors"], status["policy_errors"]) == (0, 0)
            assert learner.ledger.repeated == 0
            assert learner.ledger.missing() == 0


async def test_envs_wait_for_the_weights_that_a_new_policy_server_lacks(tmp_path: Path) -> None:
    """Its learner is away for longer than the server lets a session wait."""
    with Services(tmp_path, CONFIG) as services:
        services.wait_serving()
        async with learning(services) as (learner, progress):
            await progress()
        services.kill("policy")
        services.restart("policy")
        services.wait_serving()
        before = await env_steps(services)
        await asyncio.sleep(2 * FAST.lease_s)
        assert await env_steps(services) == before
        async with PolicyClient(services.addresses["policy"], rpc=FAST) as policy:
            version = learner.ledger.newest_version + 1000
            await policy.publish_weights(version, weights(version))
        async with SampleClient(services.addresses["buffer"], rpc=FAST) as samples:
            while learner.ledger.newest_version < version:
                learner.ledger.add((await samples.next_batch(PATIENCE_S)).columns)
        learner.ledger.check_versions()
