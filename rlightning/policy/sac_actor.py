"""A squashed Gaussian actor and its two critics, as soft actor-critic trains them."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.forward import Array, Forward
from rlightning.policy.networks import NetworkMaker
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import PolicyConfig
from rlightning.utils.registry import POLICY

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of the logarithm of the standard deviation."""


@POLICY.register("sac")
@POLICY.register("sac_actor")
class SACActorPolicy(BasePolicy):
    """Draws from a Gaussian, and squashes what it drew into the bounds of a Box by tanh.

    Exploiting, it takes the squashed mean. `policy.model_cfg` is that of `NetworkMaker`. To use
    other networks, override `construct_network` and set `actor`, and with role `train` also
    `critics`. Only the actor is published.

    The answer holds `action`, float32 [B, ...], within the bounds of the space.

    Args:
        config: Section `policy`; `seed` fixes weights and drawn actions.
        role_type: `eval` to act, `train` to be trained.

    Attributes:
        actor: Observations [B, ...] to means and logarithms of standard deviations before
            squashing, [B, 2 A] for actions of A numbers.
        critics: Two modules, each of an observation [B, ...] and an action scaled to [-1, 1],
            [B, A], to values [B, 1]; there with role `train`.
    """

    actor: nn.Module
    critics: nn.ModuleList

    def __init__(self, config: PolicyConfig, role_type: PolicyRole | str) -> None:
        super().__init__(config, role_type)
        self._rng = np.random.default_rng(config.seed)

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes `actor`, and with role `train` also `critics`.

        Raises:
            ConfigError: `policy.model_cfg` or the observation space is none this class knows, or
                the networks would be larger than `policy.max_weights_bytes` allows.
        """
        space = env_meta.observation_space
        if space is None:
            raise ConfigError("the env declares no observation space")
        make = NetworkMaker(self.config, policy=type(self))
        encoder = ObservationEncoder(space)
        actions = math.prod(bounded_box(env_meta.action_space).shape)
        make.check_size(encoder.size + actions, 2 * actions, 1, 1)
        self.actor = make(encoder, 2 * actions, last_gain=0.01)
        if self.role is PolicyRole.TRAIN:
            inputs = encoder.size + actions
            critics = [_Critic(encoder, make.perceptron(inputs, 1, 1.0)) for _ in range(2)]
            self.critics = nn.ModuleList(critics)

    def gaussian(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Returns means and standard deviations before squashing, each [B, A].

        Args:
            params: What the actor returned.
        """
        mean, log_std = params.chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_RANGE).exp()

    def seed_actions(self, seed: int) -> None:
        """Begins the random numbers of drawn actions anew."""
        self._rng = np.random.default_rng(seed)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Returns the action for each row of a `PolicyInput`."""
        x, log_std = np.split(self._act(env_ret.observation), 2, axis=1)
        if getattr(env_ret, "mode", Mode.EXPLORE) is not Mode.EXPLOIT:
            noise: Array = self._rng.standard_normal(x.shape, np.float32)
            x = x + np.exp(log_std.clip(*LOG_STD_RANGE)) * noise
        action = self._low + (np.tanh(x) + 1) * self._half_width
        action = action.clip(self._low, self._high).reshape(len(x), *self._shape)
        return PolicyResponse(env_ret.env_id, action=action.astype(np.float32, copy=False))

    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        """Returns the actor's state dict; critics stay with the learner."""
        return {"actor": dict(self.actor.state_dict())}

    def _construct(self, env_meta: EnvMeta | None, **kwargs: Any) -> None:
        super()._construct(env_meta, **kwargs)
        assert env_meta is not None
        space = bounded_box(env_meta.action_space)
        self._shape = space.shape
        self._low = space.low.reshape(-1).astype(np.float32)
        self._high = space.high.reshape(-1).astype(np.float32)
        self._half_width = (self._high - self._low) / np.float32(2)
        self._act = Forward(self.actor, self.device)


class _Critic(nn.Module):
    def __init__(self, encoder: ObservationEncoder, network: nn.Module) -> None:
        super().__init__()
        self._encoder = encoder
        self.network = network

    def forward(self, observation: Any, action: Tensor) -> Tensor:
        values: Tensor = self.network(torch.cat([self._encoder(observation), action], dim=-1))
        return values


def bounded_box(space: Any) -> gym.spaces.Box:
    """Returns an action space that squashed actions fill.

    Raises:
        ConfigError: It is no Box, or has no finite bounds.
    """
    if isinstance(space, gym.spaces.Box) and np.isfinite([space.low, space.high]).all():
        return space
    raise ConfigError(
        f"policy.type 'sac_actor' acts in Box spaces with finite bounds, not in {space}"
    )
