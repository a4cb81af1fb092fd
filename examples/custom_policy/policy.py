"""A policy of your own: its networks, how it acts, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from rlightning.policy import BasePolicy, PolicyInput
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import Config

GAMMA = 0.99


class MyPolicy(BasePolicy):
    """Chooses among discrete actions for vectors; learns by advantage actor-critic.

    With `learner.algorithm: policy` the learner calls `update_dataset` and `train` below. With
    `learner.algorithm: ppo` it asks for `actor`, `critic` and `distribution` instead, and brings
    its own loss and optimizer.
    """

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        observations = env_meta.observation_space.shape[0]
        actions = int(env_meta.action_space.n)
        hidden = self.config.model_cfg.hidden
        self.actor = Residual(observations, hidden, actions)  # logits [B, actions]
        self.critic = Residual(observations, hidden, 1)  # values [B, 1]

    def distribution(self, logits: Tensor) -> Categorical:
        return Categorical(logits=logits, validate_args=False)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        assert isinstance(env_ret, PolicyInput)
        distribution = self.distribution(self.actor(env_ret.observation))
        exploits = env_ret.mode is Mode.EXPLOIT
        action = distribution.probs.argmax(-1) if exploits else distribution.sample()
        return PolicyResponse(env_ret.env_id, action=action, log_prob=distribution.log_prob(action))

    # Called with `learner.algorithm: policy`.

    def setup_optimizer(self, optim_cfg: Config) -> None:
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=optim_cfg.lr, eps=1e-5)

    def update_dataset(self, data: Mapping[str, Any]) -> None:
        # Columns [T, N, ...] of one rollout: T steps of N envs. Copied, since they are read-only.
        self.data = {
            name: torch.tensor(data[name], device=self.device)
            for name in ("observation", "next_observation", "action", "reward", "terminated")
        }
        ended = data["terminated"] | data["truncated"] | data["cut"]
        self.data["stop"] = torch.tensor(ended, device=self.device)

    def train(self) -> dict[str, float]:
        data = self.data
        with torch.no_grad():
            after = self.critic(data["next_observation"])[..., 0] * ~data["terminated"]
            target = data["reward"] + GAMMA * after
            for t in reversed(range(len(target) - 1)):  # returns, up to where an episode stops
                ahead = data["reward"][t] + GAMMA * target[t + 1]
                target[t] = torch.where(data["stop"][t], target[t], ahead)
        value = self.critic(data["observation"])[..., 0]
        distribution = self.distribution(self.actor(data["observation"]))
        advantage = (target - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -(distribution.log_prob(data["action"]) * advantage).mean()
        value_loss = nn.functional.smooth_l1_loss(value, target)
        entropy = distribution.entropy().mean()
        self.optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - 0.01 * entropy).backward()
        for module in (self.actor, self.critic):
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        self.optimizer.step()
        return {"policy": float(policy_loss.detach()), "value": float(value_loss.detach())}


class Residual(nn.Module):
    """A small network that is none of the library's."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.block = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + torch.tanh(self.block(h))
        y: Tensor = self.last(h)
        return y
