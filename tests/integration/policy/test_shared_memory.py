"""Observations that a policy server on the same host reads from shared memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlightning.policy import BasePolicy
from rlightning.testing import assert_eventually
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import RpcConfig
from tests.integration.policy.harness import Policies, acting, policy_server, spec

PICTURE = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
ROWS = 4
SLOW = 255
SEEN: list[Any] = []
GO = threading.Event()


class Watching(BasePolicy):
    """Answers with the mean of each picture; keeps what it saw of each; waits at a `SLOW` one."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Linear(1, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        rows = env_ret.observation.flatten(1)
        SEEN.extend(zip(rows.amin(1).tolist(), rows.amax(1).tolist(), strict=True))
        if SEEN[-1] == (SLOW, SLOW):
            assert GO.wait(20)
        return PolicyResponse(env_ret.env_id, action=rows.to(torch.float32).mean(1))


class Keeping(Watching):
    """Keeps the values of an open space as they came."""

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        SEEN.extend(env_ret.observation)
        return PolicyResponse(env_ret.env_id, action=torch.zeros(len(env_ret.observation)))


class Remembering(Watching):
    """Adds the pictures of an episode up in a state that its clients carry."""

    def initial_state(self, num_rows: int) -> Any:
        return torch.zeros(num_rows, 2560)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        total = env_ret.state + env_ret.observation.flatten(1)[:, :1]
        return PolicyResponse(env_ret.env_id, action=total.flatten(1).mean(1), next_state=total)


def pictures(value: int) -> EnvRet:
    flags = np.zeros(ROWS, bool)
    observation = np.full((ROWS, *PICTURE.shape), value, np.uint8)
    return EnvRet("env", observation, np.zeros(ROWS, np.float32), flags, flags)


def server_with(kind: type[BasePolicy], **options: Any) -> Any:
    SEEN.clear()
    GO.clear()
    # `GO` is for the loop to set, which must not run what waits for it.
    return policy_server(type=f"{__name__}:{kind.__name__}", inline_below_us=0, **options)


def shared_by(server: Policies) -> int:
    return server.service._registry.shared_bytes


async def test_pictures_of_many_groups_reach_the_policy_through_memory() -> None:
    size = pictures(0).observation.nbytes
    async with server_with(Watching) as server:

        async def ask(number: int) -> None:
            async with acting(server.address, spec=spec(ROWS, PICTURE)) as client:
                for step in range(10):
                    value = 10 * number + step
                    response = await client.act(pictures(value))
                    assert response.action.tolist() == [value] * ROWS
                assert (await client.describe()).stats["shared_bytes"] > 0

        await asyncio.gather(*map(ask, range(8)))
        assert shared_by(server) == 80 * size


async def test_either_side_can_turn_it_off_and_small_observations_need_none() -> None:
    off = RpcConfig(shared_memory_bytes=0)
    async with server_with(Watching) as server:
        async with acting(server.address, spec=spec(ROWS, PICTURE), rpc=off) as client:
            assert (await client.act(pictures(3))).action.tolist() == [3] * ROWS
        async with acting(server.address, spec=spec(1, PICTURE), client_id="small") as client:
            assert client._session is not None
            assert client._session.memory is None
        assert shared_by(server) == 0
    async with server_with(Watching, rpc=off) as server:
        async with acting(server.address, spec=spec(ROWS, PICTURE)) as client:
            assert (await client.act(pictures(3))).action.tolist() == [3] * ROWS
        assert shared_by(server) == 0


async def test_what_waits_for_inference_stays_as_it_is_when_nobody_waits_for_its_answer() -> None:
    async with server_with(Watching) as server:
        options = {"spec": spec(ROWS, PICTURE)}
        async with (
            acting(server.address, **options) as slow,
            acting(server.address, **options) as client,
        ):
            busy = asyncio.create_task(slow.act(pictures(SLOW)))
            await assert_eventually(lambda: (SLOW, SLOW) in SEEN)
            assert server.service._hosts is not None
            batcher = server.service._hosts.default.batcher
            for value in range(1, 6):  # more than there is room for: the last ones go by bytes
                given_up = asyncio.create_task(client.act(pictures(value)))
                await assert_eventually(lambda value=value: batcher.queued_rows == value * ROWS)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            last = asyncio.create_task(client.act(pictures(9)))
            await assert_eventually(lambda: batcher.queued_rows == 6 * ROWS)
            GO.set()
            await busy
            assert (await last).action.tolist() == [9] * ROWS
            assert client._session is not None
            memory = client._session.memory
            assert memory is not None
            await assert_eventually(lambda: not memory._held)  # their places are free again
    for value in (1, 2, 3, 4, 5, 9):
        assert SEEN.count((value, value)) == ROWS


async def test_values_of_a_space_without_a_shape_are_the_policys_own() -> None:
    space = gym.spaces.Sequence(PICTURE, stack=True)
    space.max_bytes = 2**20  # type: ignore[attr-defined]
    async with server_with(Keeping) as server:
        async with acting(server.address, spec=spec(2, space)) as client:
            for value in range(5):
                rows = [np.full((3, *PICTURE.shape), value, np.uint8) for _ in range(2)]
                await client.act(EnvRet("env", rows))
        assert shared_by(server) == 10 * 3 * 64 * 64 * 3
    assert [int(value.min()) for value in SEEN] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(value.min() == value.max() for value in SEEN)


async def test_state_that_the_client_carries_goes_through_memory_too() -> None:
    async with server_with(Remembering, state="carried") as server:
        async with acting(server.address, spec=spec(ROWS, PICTURE)) as client:
            for step in range(1, 5):
                response = await client.act(pictures(1))
                assert response.action.tolist() == [step] * ROWS
        assert shared_by(server) > 4 * pictures(1).observation.nbytes
