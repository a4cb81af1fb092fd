"""An actor and a critic that remember: a GRU between observations and both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.policy.actor_critic import OPTIONS, ActorCriticPolicy, vectors
from rlightning.policy.convolutions import Convolutions
from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.networks import NetworkMaker
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.registry import POLICY


@POLICY.register("recurrent_actor_critic")
class RecurrentActorCriticPolicy(ActorCriticPolicy):
    """Acts like `ActorCriticPolicy`, on what a GRU remembers of the episode.

    `policy.model_cfg.memory` sets the units of the GRU (default 64), `convolutions`, `features` and
    `normalize` what is before it, and the rest the networks after it. PPO trains it with
    `policy.store_state: true`. Arguments are those of `ActorCriticPolicy`.

    Attributes:
        memory: Observations [T, B, ...], state [T, B, H] and where rows begin, bool [T, B], to what
            is remembered after each step, [T, B, H].
        actor: What is remembered, [B, H], to the parameters of a distribution.
        critic: What is remembered, [B, H], to values [B, 1].
    """

    memory: GRUMemory

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes `memory`, `actor` and `critic`.

        Raises:
            ConfigError: As `ActorCriticPolicy`.
        """
        space = env_meta.observation_space
        if space is None:
            raise ConfigError("the env declares no observation space")
        units = self.config.model_cfg.get("memory", 64)
        if not isinstance(units, int) or units < 1:
            raise ConfigError(f"policy.model_cfg.memory: expected a number of units, got {units!r}")
        make = NetworkMaker(self.config, (*OPTIONS, "memory"), type(self))
        encoder = make.encoder(space)
        self.memory = GRUMemory(encoder, make.gru(encoder.size, units))
        self._make_heads(make, ObservationEncoder(vectors(units)), env_meta.action_space)

    def initial_state(self, num_rows: int) -> Tensor:
        """Returns zeros, float32 [num_rows, H]."""
        return torch.zeros(num_rows, self.memory.cell.hidden_size, device=self.device)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Returns action, log_prob, value and `next_state` for the rows of a `PolicyInput`."""
        state = env_ret.state  # type: ignore[attr-defined]
        remembered = self.memory.step(env_ret.observation, state)
        response = super().rollout_step(replace(env_ret, observation=remembered))
        response.next_state = remembered
        return response


class GRUMemory(nn.Module):
    """A GRU over the steps of many rows.

    Args:
        encoder: Of observations.
        cell: From encoded observations to what is remembered.
    """

    def __init__(self, encoder: ObservationEncoder | Convolutions, cell: nn.GRUCell) -> None:
        super().__init__()
        self.encoder = encoder
        self.cell = cell

    def step(self, observation: Any, state: Tensor) -> Tensor:
        """Returns what is remembered after one step, [B, H].

        Args:
            observation: Leaves [B, ...].
            state: What was remembered before it, [B, H].
        """
        remembered: Tensor = self.cell(self.encoder(observation), state)
        return remembered.to(state.dtype)  # of less precision with autocast

    def forward(self, observation: Any, state: Tensor, begins: Tensor) -> Tensor:
        """Returns what is remembered after each of several steps, [T, B, H].

        Args:
            observation: Leaves [T, B, ...].
            state: Where `begins`, what is remembered before the step, [T, B, H].
            begins: Where a row does not go on from its step before, bool [T, B].
        """
        encoded = self.encoder(observation)
        remembered = state[0]
        steps = []
        for x, fresh, begin in zip(encoded, state, begins, strict=True):
            remembered = self.cell(x, torch.where(begin[:, None], fresh, remembered))
            steps.append(remembered)
        return torch.stack(steps)
