"""Turns observations of any fixed-shape space into flat float vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.policy.layout import Space
from rlightning.policy.observation_norm import ObservationNorm


class ObservationEncoder(nn.Module):
    """Flattens an observation; has no parameters.

    Box is flattened, uint8 scaled to [0, 1]; Discrete and MultiDiscrete become one-hot; Dict and
    Tuple are concatenated in the order of the space.

    Args:
        space: Space of one row.
        name: Where it is, for errors.

    Attributes:
        size: Length of the vector.
        norm: Brings the vector to one scale; None leaves it as it is.

    Raises:
        ConfigError: A part of the space has no fixed shape.
    """

    size: int

    def __init__(self, space: Space, name: str = "observation") -> None:
        super().__init__()
        self.norm: ObservationNorm | None = None
        self._space = space
        self._parts: dict[Any, ObservationEncoder] = {}
        self._shape: tuple[int, ...] = ()
        if isinstance(space, Mapping):  # gymnasium's Dict is one, too
            self._parts = {k: ObservationEncoder(v, f"{name}.{k}") for k, v in space.items()}
        elif isinstance(space, gym.spaces.Tuple):
            parts = enumerate(space.spaces)
            self._parts = {i: ObservationEncoder(one, f"{name}[{i}]") for i, one in parts}
        elif isinstance(space, gym.spaces.Discrete):
            self.size = int(space.n)
        elif isinstance(space, gym.spaces.MultiDiscrete):
            self.size = int(space.nvec.sum())
        elif isinstance(space, (gym.spaces.Box, gym.spaces.MultiBinary)):
            self._shape = space.shape
            self.size = math.prod(space.shape)
        else:
            raise ConfigError(
                f"{name}: policy.type 'actor_critic' cannot flatten {space}; write a policy of "
                "your own (policy.type: module:Class)"
            )
        if self._parts:
            self.size = sum(part.size for part in self._parts.values())

    @property
    def changes_nothing(self) -> bool:
        """Whether observations are float vectors already, which only `norm` may change."""
        is_box = isinstance(self._space, gym.spaces.Box)
        return is_box and len(self._shape) == 1 and self._space.dtype == np.float32  # type: ignore[union-attr]

    def forward(self, observation: Any) -> Tensor:
        """Returns float32 [..., size] for leaves [..., *shape]."""
        x = self.flatten(observation)
        if self.norm is None:
            return x
        normalised: Tensor = self.norm(x)
        return normalised

    def flatten(self, observation: Any) -> Tensor:
        """Returns float32 [..., size] for leaves [..., *shape], before `norm`."""
        space = self._space
        if self._parts:
            parts = [part.flatten(observation[key]) for key, part in self._parts.items()]
            return torch.cat(parts, dim=-1)
        x: Tensor = observation
        if isinstance(space, gym.spaces.Discrete):
            return _one_hot(x - int(space.start), self.size)
        if isinstance(space, gym.spaces.MultiDiscrete):
            start = torch.as_tensor(space.start, device=x.device)
            columns = (x - start).flatten(x.ndim - space.nvec.ndim)
            counts = space.nvec.ravel().tolist()
            return torch.cat([_one_hot(columns[..., i], n) for i, n in enumerate(counts)], dim=-1)
        if len(self._shape) != 1:
            x = x.reshape(*x.shape[: x.ndim - len(self._shape)], self.size)
        return x.float() / 255.0 if x.dtype == torch.uint8 else x.float()


def _one_hot(x: Tensor, size: int) -> Tensor:
    return nn.functional.one_hot(x.long(), size).float()
