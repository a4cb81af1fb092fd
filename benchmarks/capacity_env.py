"""The envs of `benchmarks.prove_scaling`; needs no torch, as no env server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.env.base_env import BaseEnv
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig

EPISODE = 50


class Simulated(BaseEnv):
    """Rows that cost next to nothing: observations of `nbytes` bytes, and `seconds` for a step of all of them."""

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        kwargs = config.env_kwargs.to_dict()
        self._seconds: float = kwargs["seconds"]
        shape = (self.num_envs, kwargs["nbytes"])
        self._seen = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        self._zeros, self._false = (
            np.zeros(self.num_envs, np.float32),
            np.zeros(self.num_envs, bool),
        )
        self._t = 0

    def get_observation_space(self) -> gym.Space[Any]:
        """Returns bytes."""
        return gym.spaces.Box(0, 255, self._seen.shape[1:], np.uint8)

    def get_action_space(self) -> gym.Space[Any]:
        """Returns two actions."""
        return gym.spaces.Discrete(2)

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins anew."""
        return self._env_ret(self._false)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Changes one byte of each row, and ends the episodes of some."""
        if self._seconds:
            time.sleep(self._seconds)
        self._t += 1
        self._seen[:, 0] = self._t & 255
        return self._env_ret((np.arange(self.num_envs) + self._t) % EPISODE == 0)

    def _env_ret(self, ended: Any) -> EnvRet:
        seen = self._seen.copy()
        env_ret = EnvRet(self.env_id, seen, self._zeros, ended, self._false)
        if self.num_envs == 1:
            return EnvRet(self.env_id, seen[0], 0.0, bool(ended[0]), False)
        if ended.any():
            rows = np.flatnonzero(ended).astype(np.int32)
            env_ret.info = {"final_rows": rows, "final_observation": seen[rows]}
        return env_ret
