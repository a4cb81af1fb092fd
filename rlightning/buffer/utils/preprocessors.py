"""Preprocessors of observations and rewards, by space."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlightning.buffer.utils.utils import default_obs_preprocessor, default_reward_preprocessor

__all__ = [
    "BoxFlattenPreprocessor",
    "DiscretePreprocessor",
    "NonPreprocessor",
    "Preprocessor",
    "default_obs_preprocessor",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
]


class Preprocessor(ABC):
    """Transforms the values of one space.

    Args:
        space: Where the values come from.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one transformed value; None where it has none."""

    @abstractmethod
    def transform(self, value: Any) -> Any:
        """Returns the transformed value, of the kind (array or tensor) that it was."""

    @abstractmethod
    def batch_transform(self, values: Any) -> Any:
        """Returns the transformed values, with their leading axis.

        Args:
            values: An array or tensor [B, ...], or a tuple of B values.
        """

    def __call__(self, value: Any) -> Any:
        """Returns the transformed value.

        Raises:
            AssertionError: It is neither an array nor a tensor nor a dict.
        """
        if not hasattr(value, "shape") and not isinstance(value, Mapping):
            raise AssertionError(
                f"expected an array, a tensor or a dict, got {type(value).__name__}"
            )
        return self.transform(value)


class NonPreprocessor(Preprocessor):
    """Leaves values as they are."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the space."""
        return self.space.shape

    def transform(self, value: Any) -> Any:
        """Returns the value itself."""
        return value

    def batch_transform(self, values: Any) -> Any:
        """Returns the values themselves."""
        return values


class BoxFlattenPreprocessor(Preprocessor):
    """Flattens the values of a `Box`.

    Raises:
        AssertionError: The space is another.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        if not isinstance(space, spaces.Box):
            raise AssertionError(f"expected a Box, got {type(space).__name__}")
        super().__init__(space)

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis with all elements."""
        return (math.prod(self.space.shape or ()),)

    def transform(self, value: Any) -> Any:
        """Returns the value with one axis."""
        return value.reshape(self.shape)

    def batch_transform(self, values: Any) -> Any:
        """Returns the values with two axes: batch and elements."""
        if isinstance(values, tuple):
            values = np.stack(values)
        return values.reshape((len(values), *self.shape))


class DiscretePreprocessor(Preprocessor):
    """Makes one-hot vectors (float32) of the values of a `Discrete`.

    Raises:
        AssertionError: The space is another.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        if not isinstance(space, spaces.Discrete):
            raise AssertionError(f"expected a Discrete, got {type(space).__name__}")
        super().__init__(space)
        self._start = int(space.start)
        self._table = np.eye(int(space.n), dtype=np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis of the number of values."""
        return (len(self._table),)

    def transform(self, value: Any) -> Any:
        """Returns the one-hot vector of a value without axes."""
        return self.batch_transform(value.reshape(1))[0]

    def batch_transform(self, values: Any) -> Any:
        """Returns one-hot vectors [B, n]."""
        if isinstance(values, tuple):
            values = np.stack(values)
        index = values.reshape(-1) - self._start
        if isinstance(values, np.ndarray):
            return self._table[index]
        torch = sys.modules["torch"]  # a value that is no array is a tensor of it
        return torch.from_numpy(self._table).to(values.device)[index]


def get_preprocessor_cls(space: gym.Space[Any]) -> type[Preprocessor]:
    """Returns the class that fits a space."""
    if isinstance(space, spaces.Box):
        return BoxFlattenPreprocessor
    if isinstance(space, spaces.Discrete):
        return DiscretePreprocessor
    return NonPreprocessor
