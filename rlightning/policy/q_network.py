"""A Q-network: one value for each discrete action, and epsilon-greedy exploration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.forward import Forward
from rlightning.policy.networks import NetworkMaker
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import PolicyConfig
from rlightning.utils.registry import POLICY

_EXPLORATION = "exploration"


@POLICY.register("dqn")
@POLICY.register("q_network")
class QNetworkPolicy(BasePolicy):
    """Takes the action of the highest value; exploring, a random one with probability epsilon.

    Epsilon is published with the weights, so that a learner lets it fall and every policy server
    follows; before the first publish it is 1. `policy.model_cfg` is that of `NetworkMaker`. To use
    another network, override `construct_network` and set `q_network`.

    The answer holds `action`, the one that is executed, in the dtype of the Discrete space, [B].

    Args:
        config: Section `policy`; `seed` fixes weights and drawn actions.
        role_type: `eval` to act, `train` to be trained.

    Attributes:
        q_network: Observations [B, ...] to values [B, n], action `start` of the space first.
        epsilon: Probability of a random action, float32 [].
    """

    q_network: nn.Module

    def __init__(self, config: PolicyConfig, role_type: PolicyRole | str) -> None:
        super().__init__(config, role_type)
        self.epsilon = torch.ones(())
        self._rng = np.random.default_rng(config.seed)

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes `q_network`.

        Raises:
            ConfigError: `policy.model_cfg` or the observation space is none this class knows, or
                the network would be larger than `policy.max_weights_bytes` allows.
        """
        if env_meta.observation_space is None:
            raise ConfigError("the env declares no observation space")
        make = NetworkMaker(self.config, ("convolutions", "features"), type(self))
        encoder = make.encoder(env_meta.observation_space)
        outputs = int(_discrete(env_meta.action_space).n)
        make.check_size(encoder.size, outputs)
        self.q_network = make(encoder, outputs, last_gain=1.0)

    def seed_actions(self, seed: int) -> None:
        """Begins the random numbers of drawn actions anew."""
        self._rng = np.random.default_rng(seed)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Returns the action for each row of a `PolicyInput`."""
        values = self._values(env_ret.observation)
        action = values.argmax(1)
        if getattr(env_ret, "mode", Mode.EXPLORE) is not Mode.EXPLOIT:
            rows, choices = values.shape
            explores = self._rng.random(rows) < float(self.epsilon)
            action = np.where(explores, self._rng.integers(0, choices, rows), action)
        return PolicyResponse(env_ret.env_id, action=(action + self._start).astype(self._dtype))

    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        """Returns the network's state dict, and epsilon under `exploration`."""
        return {**super().get_trainable_parameters(), _EXPLORATION: {"epsilon": self.epsilon}}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes the network's weights and epsilon over."""
        networks = {name: state for name, state in state_dict.items() if name != _EXPLORATION}
        super().load_state_dict(networks)
        self.epsilon.copy_(state_dict[_EXPLORATION]["epsilon"])

    def _construct(self, env_meta: EnvMeta | None, **kwargs: Any) -> None:
        super()._construct(env_meta, **kwargs)
        assert env_meta is not None
        space = _discrete(env_meta.action_space)
        self._start, self._dtype = int(space.start), np.dtype(space.dtype)
        self._values = Forward(self.q_network, self.device)


def _discrete(space: Any) -> gym.spaces.Discrete[Any]:
    if isinstance(space, gym.spaces.Discrete):
        return space
    raise ConfigError(f"policy.type 'q_network' chooses in Discrete spaces, not in {space}")
