"""An actor and a critic: multilayer perceptrons for the usual spaces, or networks of your own."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from rlightning.errors import ConfigError
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.convolutions import Convolutions
from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.forward import Array, Forward
from rlightning.policy.networks import NetworkMaker
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import PolicyConfig
from rlightning.utils.registry import POLICY

OPTIONS = ("convolutions", "features", "normalize", "log_std")
"""What `policy.model_cfg` may hold beside what every policy has; see `NetworkMaker`."""

_LOG_SQRT_2_PI = np.float32(0.5 * math.log(2 * math.pi))
# Stands for the weight of an action so unlikely that float32 holds no number for it.
_LEAST_RATE = np.float32(1e-36)


@POLICY.register("actor_critic")
class ActorCriticPolicy(BasePolicy):
    """Acts by drawing from the actor's distribution, and adds log_prob and value.

    The networks are multilayer perceptrons after CleanRL's PPO: orthogonal weights, one network for
    the actor and one for the critic. `policy.model_cfg` sets `hidden` (sizes), `activation` (tanh,
    relu, elu, gelu, silu), `normalize` (true: observations are brought to one scale by what was
    learned from) and, for Box actions, `log_std` (where the logarithm of the standard deviation
    begins, 0). With `convolutions`, a list of [channels, kernel, stride], observations are
    pictures, and both networks begin at the `features` (512) that these make of them. To use other
    networks, override `construct_network` and set `actor` and `critic`.

    The answer holds `action` (Discrete: the space's dtype [B]; Box: float32 [B, ...], not cut to
    the space's bounds), `log_prob` float32 [B] of that action, and `value` float32 [B],
    in the units the learner trains it in: PPO's are normalised returns.

    Args:
        config: Section `policy`; `seed` fixes weights and drawn actions.
        role_type: `eval` to act, `train` to be trained.

    Attributes:
        actor: Observations [B, ...] to the parameters of a distribution: for Discrete actions
            logits [B, n], for Box actions means and logarithms of standard deviations, [B, 2 A].
        critic: Observations [B, ...] to values [B, 1].
        features: What both have in common: observations [B, ...] to what they get instead, [B, F];
            None: they get observations.
    """

    actor: nn.Module
    critic: nn.Module
    features: nn.Module | None = None

    def __init__(self, config: PolicyConfig, role_type: PolicyRole | str) -> None:
        super().__init__(config, role_type)
        self._rng = np.random.default_rng(config.seed)

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes `actor` and `critic`, and `features` where there are convolutions.

        Raises:
            ConfigError: `policy.model_cfg` or the observation space is none this class knows, or
                the networks would be larger than `policy.max_weights_bytes` allows.
        """
        space = env_meta.observation_space
        if space is None:
            raise ConfigError("the env declares no observation space")
        make = NetworkMaker(self.config, OPTIONS, type(self))
        encoder = make.encoder(space)
        if isinstance(encoder, Convolutions):
            self.features = encoder
            encoder = ObservationEncoder(vectors(encoder.size))
        self._make_heads(make, encoder, env_meta.action_space)

    def _make_heads(self, make: NetworkMaker, encoder: ObservationEncoder, action: Any) -> None:
        """Makes `actor` and `critic`."""
        box = isinstance(action, gym.spaces.Box)
        outputs = math.prod(action.shape) if box else int(_discrete(action).n)
        make.check_size(encoder.size, outputs, 1)
        self.actor = make(encoder, outputs, last_gain=0.01)
        if box:
            log_std = self.config.model_cfg.get("log_std", 0.0)
            if not isinstance(log_std, (int, float)):
                raise ConfigError(f"policy.model_cfg.log_std: expected a number, got {log_std!r}")
            self.actor = nn.Sequential(self.actor, _StateIndependentStd(outputs, log_std))
        self.critic = make(encoder, 1, last_gain=1.0)

    def distribution(self, params: Tensor) -> Distribution:
        """Returns the distribution over actions, batch shape [B], that the actor's output means.

        Discrete actions are counted from 0 there, whatever the `start` of the space.
        """
        if self._shape is None:
            return Categorical(logits=params, validate_args=False)
        shape = (*params.shape[:-1], *self._shape)
        mean, log_std = params.chunk(2, dim=-1)
        normal = Normal(mean.reshape(shape), log_std.exp().reshape(shape), validate_args=False)
        return Independent(normal, len(self._shape), validate_args=False)

    def seed_actions(self, seed: int) -> None:
        """Begins the random numbers of drawn actions anew."""
        self._rng = np.random.default_rng(seed)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Returns action, log_prob and value for the rows of a `PolicyInput`."""
        explore = getattr(env_ret, "mode", Mode.EXPLORE) is not Mode.EXPLOIT
        observation = env_ret.observation
        if self.features is not None:
            observation = self.features(observation).float()  # of less precision with autocast
        params = self._act(observation)
        value = self._value(observation)[:, 0]
        draw = self._draw_discrete if self._shape is None else self._draw_box
        action, log_prob = draw(params, explore=explore)
        return PolicyResponse(env_ret.env_id, action=action, log_prob=log_prob, value=value)

    # By hand and in numpy: torch.distributions costs 20 us a call more.

    def _draw_discrete(self, logits: Array, *, explore: bool) -> tuple[npt.NDArray[Any], Array]:
        shifted = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
        weights = np.exp(shifted)
        log_probs = shifted - np.log(np.add.reduce(weights, axis=1, keepdims=True))
        if explore:
            # Of exponential variables with these rates, each is the smallest with its probability.
            rates = np.maximum(weights, _LEAST_RATE)
            index = (self._rng.standard_exponential(rates.shape, np.float32) / rates).argmin(1)
        else:
            index = logits.argmax(1)
        log_prob = log_probs[np.arange(len(index)), index]
        return (index + self._start).astype(self._dtype, copy=False), log_prob

    def _draw_box(self, params: Array, *, explore: bool) -> tuple[npt.NDArray[Any], Array]:
        assert self._shape is not None
        mean, log_std = np.split(params, 2, axis=1)
        log_density = -log_std - _LOG_SQRT_2_PI
        if explore:
            noise: Array = self._rng.standard_normal(mean.shape, np.float32)
            mean = np.add(mean, np.exp(log_std) * noise, dtype=np.float32)
            log_density = log_density - np.float32(0.5) * noise * noise
        return mean.reshape(len(mean), *self._shape), log_density.sum(1)

    def _construct(self, env_meta: EnvMeta | None, **kwargs: Any) -> None:
        super()._construct(env_meta, **kwargs)
        assert env_meta is not None
        space = env_meta.action_space
        self._shape: tuple[int, ...] | None = None
        self._start = 0
        self._dtype: np.dtype[Any] = np.dtype(np.int64)
        if isinstance(space, gym.spaces.Box):
            self._shape = space.shape
        else:
            discrete = _discrete(space)
            self._start = int(discrete.start)
            self._dtype = np.dtype(discrete.dtype)
        self._act = Forward(self.actor, self.device)
        self._value = Forward(self.critic, self.device)


class _StateIndependentStd(nn.Module):
    """Appends a learnt logarithm of the standard deviation to the means [..., A]: [..., 2 A]."""

    def __init__(self, size: int, initial: float) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((size,), float(initial)))

    def forward(self, mean: Tensor) -> Tensor:
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)


def vectors(size: int) -> gym.spaces.Box:
    """Returns the space of float vectors [size]."""
    return gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)


def _discrete(space: Any) -> gym.spaces.Discrete[Any]:
    if isinstance(space, gym.spaces.Discrete):
        return space
    raise ConfigError(
        f"policy.type 'actor_critic' acts in Discrete and Box spaces, not in {space}; write a "
        "policy of your own (policy.type: module:Class)"
    )
