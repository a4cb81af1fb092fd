"""What the servers of the robot's cluster run: a policy that says what it answers, and what the buffer keeps of pictures."""

from __future__ import annotations

import numpy as np
import torch

from rlightning.policy import BasePolicy
from rlightning.types import PolicyResponse
from tests.netns.robot_env import CAMERAS, SAMPLED


class Answers(BasePolicy):
    """Actions (episode, step, 0), (episode, step, 1), ...: `model_cfg.chunk` of them; by default one that is no chunk."""

    def construct_network(self, env_meta, **kwargs):
        self.net = torch.nn.Linear(1, 1)

    def rollout_step(self, env_ret):
        seen = env_ret.observation
        state = seen["state"]
        for name in CAMERAS:
            assert seen[name].shape[1:] == (480, 640, 3)
            assert seen[name].dtype == torch.uint8
        action = torch.cat([state, torch.zeros_like(state[:, :1])], -1)
        chunk = self.config.model_cfg.get("chunk", 0)
        if chunk:
            action = action[:, None].repeat(1, chunk, 1)
            action[:, :, 2] = torch.arange(chunk)
        return PolicyResponse(env_ret.env_id, action=action)


def sampled(observation):
    """Keeps some pixels of each picture."""
    some = {
        name: np.ascontiguousarray(np.asarray(observation[name])[(slice(None), *SAMPLED)])
        for name in CAMERAS
    }
    return {**observation, **some}
