"""Policies and spaces that the tests share."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlightning.policy import BasePolicy
from rlightning.policy.base_policy import PolicyInput
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

VECTOR = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


def meta(
    rows: int = 1, *, action: gym.Space[Any] | None = None, observation: Any = VECTOR
) -> EnvMeta:
    return EnvMeta("env", action or gym.spaces.Discrete(2), observation, rows)


def env_ret(rows: int = 1, *, env_id: str = "env", seed: int = 0) -> EnvRet:
    rng = np.random.default_rng(seed)
    zeros = np.zeros(rows, bool)
    observation = rng.standard_normal((rows, 4), np.float32)
    return EnvRet(env_id, observation, np.zeros(rows, np.float32), zeros, zeros)


class Echo(BasePolicy):
    """Returns what it sees; `fails` makes it raise, `answer` makes it return something else."""

    fails: Exception | None = None
    answer: Any = None

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.made_with = kwargs
        self.net = nn.Linear(4, 2)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        assert isinstance(env_ret, PolicyInput)
        assert torch.is_inference_mode_enabled()
        self.seen = env_ret
        if self.fails is not None:
            raise self.fails
        if self.answer is not None:
            return self.answer
        return PolicyResponse(
            env_ret.env_id, action=env_ret.observation, reward_seen=env_ret.last_reward
        )


class Remembering(BasePolicy):
    """A GRU, and the sum of the first numbers that each row has seen in its episode."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.gru = nn.GRUCell(4, 8)

    def initial_state(self, num_rows: int) -> Any:
        zeros = torch.zeros(num_rows, 8, device=self.device)
        total = torch.zeros(num_rows, dtype=torch.float64, device=self.device)
        return {"hidden": zeros, "more": (total, torch.zeros(num_rows, 3, 4, device=self.device))}

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        assert isinstance(env_ret, PolicyInput)
        total, frames = env_ret.state["more"]
        first = env_ret.observation[:, 0]
        if (first > 100).any():
            raise ValueError("the arm is on fire")
        hidden = self.gru(env_ret.observation, env_ret.state["hidden"])
        frames = torch.cat([frames[:, 1:], env_ret.observation[:, None]], dim=1)
        return PolicyResponse(
            env_ret.env_id,
            action=hidden.argmax(-1),
            hidden_out=hidden,
            total=total + first,
            oldest=frames[:, 0],
            next_state={"hidden": hidden, "more": (total + first, frames)},
        )


class Versioned(BasePolicy):
    """Two tensors that only ever change together: a mix of weights shows."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.first = nn.Linear(1, 1)
        self.second = nn.Linear(1, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        rows = len(env_ret.observation)
        action = self.first.weight.detach().expand(rows, 1)[:, 0]
        return PolicyResponse(
            env_ret.env_id, action=action, other=self.second.weight.expand(rows, 1)[:, 0]
        )
