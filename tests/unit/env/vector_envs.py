"""Vector envs that the tests share, and the gymnasium ids that name them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from tests.unit.env.envs import Counting


class Vector(gym.vector.VectorEnv[Any, Any, Any]):
    """Ends all its rows in every third step; gives the final observations of all rows at once."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    width = 2

    def __init__(self, num_envs=1, offset=0, autoreset_mode=AutoresetMode.SAME_STEP):
        self.num_envs = num_envs
        self.offset = offset
        self.autoreset_mode = autoreset_mode
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (self.width,), np.float32)
        self.single_action_space = Counting.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.steps, self.seed = 0, seed
        # One buffer for all steps, as native envs like to have.
        self.buffer = np.full((self.num_envs, self.width), self.offset, np.float32)
        return self.buffer, {}

    def step(self, actions):
        self.steps += 1
        self.buffer[:] = self.steps
        ended = np.full(self.num_envs, self.steps % 3 == 0)
        info = {}
        if ended.any():
            info = {"final_obs": self.buffer.copy(), "_final_obs": ended}
            self.buffer[:] = 0
        return self.buffer, np.ones(self.num_envs), ended, np.zeros(self.num_envs, bool), info


class OtherSpaces(Vector):
    """Has another observation than its single env."""

    width = 7


class NextStep(Vector):
    """Resets in the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class Silent(Vector):
    """Ends episodes without telling how."""

    def step(self, actions):
        return *super().step(actions)[:4], {}


def entry(name):
    return f"tests.unit.env.vector_envs:{name}"


for name, vector_entry_point in (
    ("Native", entry("Vector")),
    ("Scaled", entry("OtherSpaces")),
    ("Absent", "tests.no_such_module:Vector"),
):
    gym.register(
        f"Test{name}-v0",
        entry_point="tests.unit.env.envs:Counting",
        vector_entry_point=vector_entry_point,
    )
gym.register(
    "TestStrict-v0",
    entry_point="tests.unit.env.envs:Counting",
    vector_entry_point=lambda num_envs, max_episode_steps=None: NextStep(num_envs),
)
