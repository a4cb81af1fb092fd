"""A `BaseEnv` like that of `rlightning init`: points on a line move towards their targets."""

import gymnasium as gym
import numpy as np

from rlightning.env import BaseEnv
from rlightning.types import EnvRet

LAST = 40


class Arm(BaseEnv):
    """Observation: float32 [2], point and target. Action: 0 moves left, 1 stays, 2 moves right."""

    def get_observation_space(self):
        return gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def get_action_space(self):
        return gym.spaces.Discrete(3)

    def reset(self, *, seed=None, **kwargs):
        self._rng = np.random.default_rng(seed)
        self._begin()
        return self._env_ret(np.zeros(self.num_envs, np.float32), ended=False)

    def step(self, policy_resp):
        self._t += 1
        moved = self._seen[:, 0] + 0.1 * (policy_resp.action - 1)
        self._seen[:, 0] = np.clip(moved, -1.0, 1.0)
        return self._env_ret(-abs(self._seen[:, 0] - self._seen[:, 1]), ended=self._t == LAST)

    def _begin(self):
        self._t = 0
        self._seen = self._rng.uniform(-1.0, 1.0, (self.num_envs, 2)).astype(np.float32)

    def _env_ret(self, rewards, *, ended):
        info = {}
        if ended:
            info["final_rows"] = np.arange(self.num_envs, dtype=np.int32)
            info["final_observation"] = self._seen.copy()
            self._begin()
        flags = np.full(self.num_envs, ended)
        return EnvRet(self.env_id, self._seen.copy(), rewards, ~flags & flags, flags, info=info)
