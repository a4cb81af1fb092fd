"""Observations of many megabytes from an env through all services, with the default limits."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.policy import BasePolicy
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from tests.integration.env.test_env_server import main_config, running

pytestmark = pytest.mark.timeout(120)

LENGTH = 2  # of an episode


class Large(gym.Env[np.ndarray, int]):
    """Numbers its observations, in their first and last byte, and rewards with the number.

    Args:
        megabytes: Size of an observation, in 2**20 bytes.
    """

    action_space = gym.spaces.Discrete(256)

    def __init__(self, megabytes: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (megabytes, 2**20), np.uint8)
        self._number = -1
        self._step = 0

    def reset(self, *, seed=None, options=None):
        self._step = 0
        return self._observe(), {}

    def step(self, action):
        self._step += 1
        reward = float(self._number)
        return self._observe(), reward, self._step == LENGTH, False, {}

    def _observe(self):
        self._number += 1
        observation = np.zeros(self.observation_space.shape, np.uint8)
        observation[0, 0] = observation[-1, -1] = self._number
        return observation


class FirstByte(BasePolicy):
    """Answers with the first byte of what it sees."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: object) -> None:
        self.net = nn.Linear(1, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        return PolicyResponse(env_ret.env_id, action=env_ret.observation[:, 0, 0].to(torch.int64))


def corners(observation):
    """Keeps the first and the last byte of each row: whole ones take a gigabyte to the learner."""
    return observation.reshape(len(observation), -1)[:, [0, -1]]


@pytest.mark.parametrize(
    ("megabytes", "functions"), [(6, {}), (64, {"obs_preprocessor": f"{__name__}:corners"})]
)
async def test_episodes_of_large_observations_reach_the_buffer(megabytes, functions):
    env = {"task": f"{__name__}:Large", "num_envs": 1, "env_kwargs": {"megabytes": megabytes}}
    sections = {
        "env": env,
        "policy_config": {
            "type": f"{__name__}:FirstByte",
            "device": "cpu",
            "initial_weights": "random",
        },
        "buffer_config": {
            "type": "RolloutBuffer",
            "rollout_length": 2,
            "max_rollouts": 1,
            "functions": functions,
        },
    }
    async with AsyncExitStack() as stack:
        config = main_config(**sections)
        addresses = {}
        for name, service in (("policy", PolicyService), ("buffer", BufferService)):
            addresses[name] = (await running(stack, service(config))).address
        envs = EnvService(main_config(**sections, **addresses))
        await running(stack, envs)
        samples = await stack.enter_async_context(SampleClient(addresses["buffer"], prefetch=0))
        batch = asyncio.create_task(samples.next_batch(90))
        await asyncio.wait({batch, envs.failure}, return_when=asyncio.FIRST_COMPLETED)
        assert not envs.failure.done(), envs.failure
        columns = (await batch).columns
    seen, after = (
        columns[name].reshape(2, -1)[:, [0, -1]].tolist()
        for name in ("observation", "next_observation")
    )
    assert seen == [[0, 0], [1, 1]]
    # The last one is of the episode that ended, and not number 3, with which the next one begins.
    assert after == [[1, 1], [2, 2]]
    assert columns["action"].ravel().tolist() == columns["reward"].ravel().tolist() == [0, 1]
    assert columns["terminated"].ravel().tolist() == [False, True]
