"""What does not fit is refused by the name of its field, and the session lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import InvalidRequestError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from tests.integration.buffer.harness import act, buffer_server, inserting, sampling
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions

SPACE = gym.spaces.Dict(
    {
        "camera": gym.spaces.Box(0, 255, (4, 4), np.uint8),
        "joints": gym.spaces.Box(-1, 1, (3,), np.float32),
    }
)
META = EnvMeta("env", gym.spaces.Discrete(3), SPACE, 1)


def env_ret(step: int) -> EnvRet:
    observation = {
        "camera": np.zeros((1, 4, 4), np.uint8),
        "joints": np.zeros((1, 3), np.float32),
    }
    return EnvRet("env", observation, step=np.array([step]), episode_id=np.array([0]))


def without_joints(ret: EnvRet) -> None:
    del ret.observation["joints"]


def wrong_dtype(ret: EnvRet) -> None:
    ret.observation["joints"] = ret.observation["joints"].astype(np.float64)


def wrong_shape(ret: EnvRet) -> None:
    ret.observation["camera"] = np.zeros((1, 4, 5), np.uint8)


def another_key(ret: EnvRet) -> None:
    ret.observation["lidar"] = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_joints, "observation.*joints"),
        (wrong_dtype, r"observation\.joints: expected float32.*got float64"),
        (wrong_shape, r"observation\.camera: expected .*4, 4.*got .*4, 5"),
        (another_key, "observation.*lidar"),
    ],
)
async def test_an_observation_that_does_not_fit_its_spec(
    spoil: Callable[[EnvRet], Any], message: str
) -> None:
    async with (
        buffer_server(type="ReplayBuffer", tables={"one": {}, "two": {}}) as buffers,
        inserting(buffers.address, META, tables=["one", "two"]) as client,
    ):
        good, bad = PolicyResponse("env", action=np.zeros(1, np.int64)), env_ret(1)
        spoil(bad)
        await client.insert(env_ret(0), good)
        await client.insert(bad, good)
        with pytest.raises(InvalidRequestError, match=message):
            await client.flush(5)
        for step in (2, 3):
            await client.insert(env_ret(step), good)
        await client.flush(5)
        assert client.resent == 0
        for table in buffers.service._tables.values():
            assert table.buffer.counters.completed == 1  # of steps 2 and 3, in both alike


async def test_a_batch_larger_than_what_is_there_waits_until_it_is() -> None:
    env = ScriptedEnv(1, lambda row, episode: (5, True))
    async with (
        buffer_server(type="ReplayBuffer", auto_truncate_episode=True, capacity=20) as buffers,
        inserting(buffers.address, env.meta) as client,
        sampling(buffers.address, batch_size=10) as learner,
    ):
        await act(client, env, 5)
        await client.flush(5)
        waiting = asyncio.create_task(learner.next_batch(10))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await act(client, env, 5)
        assert check_transitions((await waiting).columns) == 10
