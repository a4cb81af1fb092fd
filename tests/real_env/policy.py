"""A policy that draws actions from the action space."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from torch import nn

from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, EnvRet, MultiAgentPolicyResponse, PolicyResponse


class Random(BasePolicy):
    """Draws each action anew, whatever is observed.

    `model_cfg.scale` shrinks the actions of Box spaces towards the middle.
    """

    def construct_network(self, env_meta: EnvMeta, **kwargs: object) -> None:
        self.net = nn.Linear(1, 1)  # something to publish
        self._spaces = env_meta.action_space
        self._seed = 0

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        rows = len(next(_leaves(env_ret.observation)))
        self._seed += 1
        if isinstance(self._spaces, dict):
            action = {
                agent: self._draw(space, rows, i)
                for i, (agent, space) in enumerate(self._spaces.items())
            }
            return MultiAgentPolicyResponse(env_ret.env_id, action=action)
        return PolicyResponse(env_ret.env_id, action=self._draw(self._spaces, rows, 0))

    def _draw(self, space: gym.Space, rows: int, stream: int) -> object:
        batched = batch_space(space, rows)
        batched.seed(1000 * self._seed + stream)
        action = batched.sample()
        scale = self.config.model_cfg.get("scale")
        if scale is not None and isinstance(space, gym.spaces.Box):
            middle = (batched.low + batched.high) / 2
            action = (middle + scale * (action - middle)).astype(np.float32)
        return dict(action) if isinstance(action, dict) else action


def _leaves(value):
    if isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, tuple):
        for child in value:
            yield from _leaves(child)
    else:
        yield value
