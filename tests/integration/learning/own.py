"""Policies with networks that are none of the library's, and an algorithm of the user's."""

from typing import Any

import torch
from torch import Tensor, nn

from rlightning.learner import DQN
from rlightning.policy import ActorCriticPolicy, PolicyRole, QNetworkPolicy, SACActorPolicy
from rlightning.types import EnvMeta


class Residual(nn.Module):
    """A small network with a way around its middle."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 24)
        self.block = nn.Linear(24, 24)
        self.last = nn.Linear(24, outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(torch.cat(inputs, -1)))
        values: Tensor = self.last(hidden + torch.relu(self.block(hidden)))
        return values


class OwnActorCritic(ActorCriticPolicy):
    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.actor, self.critic = Residual(1, 3), Residual(1, 1)


class OwnQ(QNetworkPolicy):
    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.q_network = Residual(1, 3)


class OwnSAC(SACActorPolicy):
    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        self.actor = Residual(1, 2)
        if self.role is PolicyRole.TRAIN:
            self.critics = nn.ModuleList([Residual(2, 1), Residual(2, 1)])


def cautious_dqn(policy: Any, learner: Any, train: Any, *, seed: int) -> DQN:
    """DQN with a discount that the config does not say."""
    return DQN(policy, learner.model_copy(update={"gamma": 0.5}), train, seed=seed)
