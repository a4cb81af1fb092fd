"""Recurrent state over the network: cuts, crashes, lost sessions, state that clients carry."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
)
from rlightning.policy import PolicyClient
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import RpcConfig
from tests.integration.policy.harness import Policies, acting, policy_server, spec
from tests.integration.policy.test_weights import Process
from tests.unit.policy.policies import Remembering

REMEMBERING = "tests.unit.policy.policies:Remembering"


class Slow(Remembering):
    """Takes half a second for an observation of 50."""

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        if (env_ret.observation == 50).any():
            time.sleep(0.5)
        return super().rollout_step(env_ret)


class Numbered(Remembering):
    """Has a state that no message can carry."""

    def initial_state(self, num_rows: int) -> Any:
        return {0: torch.zeros(num_rows)}


def seen(*first: float, **fields: Any) -> EnvRet:
    return EnvRet("env", np.outer(first, np.ones(4)).astype(np.float32), **fields)


async def totals(client: PolicyClient, *first: float, **options: Any) -> list[float]:
    total: list[float] = (await client.act(seen(*first), **options)).total.tolist()
    return total


def held(server: Policies) -> int:
    assert server.service._hosts is not None
    return server.service._hosts.default.state_bytes


async def test_a_session_that_is_resumed_goes_on_with_its_state() -> None:
    async with policy_server(type=REMEMBERING) as server, FaultProxy(server.address) as proxy:
        async with acting(proxy.address, 2) as client, acting(server.address, 2) as other:
            for n in range(1, 6):
                assert await totals(client, 1, 2) == [n, 2 * n]
                assert await totals(other, 10, 10) == [10 * n, 10 * n]
                proxy.reset()
            assert client._session is not None
            assert client._session.epoch > 2


async def test_a_repeated_request_is_no_step_of_the_state() -> None:
    async with policy_server(type=REMEMBERING) as server, FaultProxy(server.address) as proxy:
        async with acting(proxy.address) as client:
            assert await totals(client, 1) == [1]
            proxy.delay_back_s = 0.2
            asked = asyncio.ensure_future(totals(client, 1))
            await assert_eventually(lambda: server.stats.requests == 2)
            proxy.reset()  # the answer is on its way
            proxy.delay_back_s = None
            assert await asked == [2]
            assert await totals(client, 1) == [3]
            assert server.stats.requests == 3


async def test_an_answer_that_came_too_late_is_asked_for_again_and_is_one_step() -> None:
    kind = "tests.integration.policy.test_state:Slow"
    async with policy_server(type=kind, inline_below_us=0) as server:
        async with acting(server.address, act_timeout_s=0.2) as client:
            late = seen(50)
            with pytest.raises(DeadlineExceededError):
                await client.act(late)
            await assert_eventually(lambda: server.stats.requests == 1)
            response = await client.act(late)
            assert (response.seq, response.total.tolist()) == (1, [50])
            # Nobody asks about this one again, but it was a step.
            with pytest.raises(DeadlineExceededError):
                await totals(client, 50)
            client._act_timeout_s = 30
            assert await totals(client, 1) == [101]


async def test_state_goes_with_its_session() -> None:
    rpc = RpcConfig(heartbeat_s=0.1, lease_s=0.4, resume_window_s=0.4)
    async with policy_server(type=REMEMBERING, rpc=rpc) as server:
        async with acting(server.address, 3, rpc=rpc) as leaving:
            await totals(leaving, 1, 2, 3)
            assert held(server) > 0
        await assert_eventually(lambda: held(server) == 0)
        async with FaultProxy(server.address) as proxy, acting(proxy.address, 3, rpc=rpc) as client:
            assert await totals(client, 1, 2, 3) == [1, 2, 3]
            await proxy.refuse()
            await assert_eventually(lambda: held(server) == 0)
            await proxy.start()
            with pytest.raises(PreconditionError, match="state before request 2") as raised:
                await totals(client, 1, 2, 3)
            assert raised.value.reason == "STATE_LOST"
            assert await totals(client, 1, 2, 3, reset_state=True) == [1, 2, 3]


async def test_more_state_than_a_server_keeps_is_refused() -> None:
    async with policy_server(type=REMEMBERING, max_session_state_bytes=1000) as server:
        async with acting(server.address, 8) as client:
            assert len(await totals(client, *range(8))) == 8
        with pytest.raises(ResourceExhaustedError, match="policy.max_session_state_bytes"):
            async with acting(server.address, 2**20):
                pass
        async with acting(server.address, 8) as client:
            assert len(await totals(client, *range(8))) == 8


async def test_state_that_clients_carry_outlives_the_server() -> None:
    config = {"type": REMEMBERING, "state": "carried"}
    async with (
        policy_server(**config) as first,
        policy_server(**config) as server,
        FaultProxy(first.address) as proxy,
    ):
        async with acting(proxy.address, 3) as client:
            assert await totals(client, 1, 2, 3) == [1, 2, 3]
            ids = np.array([0, 1, 2])
            assert (await client.act(seen(1, 2, 3, episode_id=ids))).total.tolist() == [2, 4, 6]
            proxy._target = server.address
            proxy.reset()
            part = seen(3, rows=np.array([2], np.int32), episode_id=np.array([2]))
            assert (await client.act(part)).total.tolist() == [9]
            ret = seen(
                1, 2, 3, last_terminated=[True, False, False], episode_id=np.array([3, 1, 4])
            )
            assert (await client.act(ret)).total.tolist() == [1, 6, 3]
            assert await totals(client, 1, 2, 3, reset_state=True) == [1, 2, 3]
            assert await totals(client, 1, 2, 3) == [2, 4, 6]
            assert held(server) == 0
            assert client._carried is not None
            carried, client._carried = client._carried, None
            with pytest.raises(PreconditionError, match="state before request 7 is not here"):
                await totals(client, 1, 2, 3)
            client._carried = carried
            client._carried._state = {"hidden": np.zeros((3, 8), np.float32)}
            with pytest.raises(InvalidRequestError, match="state: expected 'state.hidden', "):
                await totals(client, 1, 2, 3)


async def test_no_batch_waits_for_a_session_whose_welcome_could_not_be_written() -> None:
    kind = "tests.integration.policy.test_state:Numbered"
    async with policy_server(type=kind, state="carried") as server:
        with pytest.raises(RemoteError, match="a key that is no text: 0"):
            async with acting(server.address):
                pass
        assert server.service._hosts is not None
        assert server.service._hosts.default.batcher.groups == 0


async def test_state_that_nobody_asked_for_is_refused_and_the_session_lives_on() -> None:
    async with policy_server(type=REMEMBERING, state="carried") as carried:
        async with acting(carried.address) as client:
            await totals(client, 1)
            state = client._carried
    async with policy_server(type=REMEMBERING) as server, acting(server.address) as client:
        assert await totals(client, 1) == [1]
        client._carried = state
        with pytest.raises(InvalidRequestError, match="state: .* this server keeps it"):
            await totals(client, 1)
        client._carried = None
        assert await totals(client, 1) == [2]


class CountingEnv:
    """One row whose observations are all 1; an `EnvPort`."""

    def __init__(self) -> None:
        self.meta = EnvMeta("env", spec().action_space, spec().observation_space, 1)
        self.steps = 0

    async def reset(self) -> EnvRet:
        return seen(1)

    async def step(self, response: PolicyResponse) -> EnvRet:
        self.steps += 1
        await asyncio.sleep(0.002)
        return seen(1)


class Ledger:
    """Keeps what the policy remembered at each step, and where segments begin; a `BufferPort`."""

    def __init__(self) -> None:
        self.totals: list[float] = []
        self.begins: list[int] = [0]

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        if new_segment:
            self.begins.append(len(self.totals))
        if response is not None:
            self.totals.append(float(response.total[0]))


@pytest.mark.crash
async def test_after_kill_9_of_the_server_state_is_lost_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    config = f"policy: {{device: cpu, initial_weights: random, type: '{REMEMBERING}'}}\n"
    with Process(tmp_path, config) as process:
        address = await asyncio.to_thread(process.address)
        env, ledger, control, stats = CountingEnv(), Ledger(), ActorControl(), ActorStats()
        async with acting(address) as client:
            acted = asyncio.ensure_future(
                run_actor(env, client, ledger, control=control, stats=stats)
            )
            await assert_eventually(lambda: len(ledger.totals) > 20)
            await asyncio.to_thread(process.restart)
            before = len(ledger.totals)
            await assert_eventually(lambda: len(ledger.totals) > before + 20, timeout_s=40)
            control.stop()
            await acted
    begins, ends = ledger.begins, [*ledger.begins[1:], len(ledger.totals)]
    assert len(begins) == stats.segments + 1 == 2
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert ledger.totals == [n + 1.0 for length in lengths for n in range(length)]
    assert env.steps == len(ledger.totals)
