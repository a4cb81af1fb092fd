"""A policy that remembers, and plans several actions at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

H = 3


class Planning(BasePolicy):
    """Its plan depends on how often it was asked in the episode, which it answers, too."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.net = nn.Linear(4, 1)

    def initial_state(self, num_rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros(num_rows, dtype=torch.int64), {"last": torch.zeros(num_rows, 4)}

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        asked = env_ret.state[0] + 1  # type: ignore[attr-defined]
        action = (asked[:, None] + torch.arange(H)) % 2
        next_state = (asked, {"last": env_ret.observation})
        return PolicyResponse(env_ret.env_id, action=action, asked=asked, next_state=next_state)
