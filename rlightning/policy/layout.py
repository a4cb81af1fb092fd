"""Which arrays a policy gets of an EnvRet, and whether they are what the spaces say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlightning.errors import InvalidRequestError
from rlightning.types import EnvRet

Space: TypeAlias = "gym.Space[Any] | Mapping[str, gym.Space[Any]]"

_FLAGS = (
    ("last_reward", np.dtype(np.float32)),
    ("last_terminated", np.dtype(np.bool_)),
    ("last_truncated", np.dtype(np.bool_)),
)


@dataclass(frozen=True)
class Leaf:
    """One array.

    Attributes:
        name: Where it is, such as `observation.camera`.
        dtype: Of its elements; None for a space without a fixed shape (Text, Sequence, Graph),
            whose rows are listed.
        shape: Of one row.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Branch:
    name: str
    keys: tuple[str, ...] | None  # None: a tuple
    children: tuple[_Branch | Leaf, ...]


class InputLayout:
    """The arrays that a policy gets of an EnvRet, as one flat list in a fixed order.

    Args:
        space: Space of one row's observation; a mapping that is no space gives one by agent.

    Attributes:
        leaves: Those of the observation, then reward, terminated and truncated, by agent if there
            are agents.

    Raises:
        InvalidRequestError: The space holds no value.
    """

    def __init__(self, space: Space) -> None:
        self._root = _plan(space, "observation")
        observation = tuple(_leaves(self._root))
        if not observation:
            raise InvalidRequestError(f"observation: the space {space} holds no value")
        self._agents = None if isinstance(space, gym.Space) else tuple(space)
        suffixes = [""] if self._agents is None else [f".{agent}" for agent in self._agents]
        flags = (Leaf(name + suffix, dtype, ()) for name, dtype in _FLAGS for suffix in suffixes)
        self._observed = len(observation)
        self.leaves = (*observation, *flags)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes, without leaves that have no fixed shape."""
        sized = ((leaf.dtype, leaf.shape) for leaf in self.leaves)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in sized if dtype is not None)

    @property
    def sized(self) -> bool:
        """Whether all leaves have a fixed shape."""
        return all(leaf.dtype is not None for leaf in self.leaves)

    def zeros(self, rows: int) -> list[Any]:
        """Returns zeros [rows, ...] for each leaf; all must have a fixed shape."""
        return [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def flatten(self, env_ret: EnvRet) -> tuple[list[Any], int | None]:
        """Returns the arrays of an EnvRet and its number of rows; copies nothing.

        Returns:
            For each leaf an array or tensor [rows, ...], or a list of `rows` values; and `rows`:
            None if the observation is one row without a leading dimension, which it then has been
            given.

        Raises:
            InvalidRequestError: The observation is not in the space, or a reward or flag does not
                fit it; the message names the key, what was expected and what came.
        """
        values: list[Any] = []
        _collect(self._root, env_ret.observation, values)
        rows = _count_rows(self.leaves[0], values[0])
        if rows == 0:
            raise InvalidRequestError(f"{self.leaves[0].name}: no rows")
        for i, value in enumerate(values):
            values[i] = _check(self.leaves[i], value, rows)
        flags = (env_ret.last_reward, env_ret.last_terminated, env_ret.last_truncated)
        if self._agents is not None:
            flags = tuple(_of_agent(flag, agent) for flag in flags for agent in self._agents)
        for leaf, flag in zip(self.leaves[self._observed :], flags, strict=True):
            values.append(_flag(leaf, flag, rows or 1))
        return values, rows

    def build(self, values: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Returns observation, reward, terminated and truncated from one value for each leaf."""
        observation = _build(self._root, iter(values))
        flags = values[self._observed :]
        if self._agents is None:
            return observation, flags[0], flags[1], flags[2]
        n = len(self._agents)
        by_agent = [dict(zip(self._agents, flags[i * n :], strict=False)) for i in range(3)]
        return observation, by_agent[0], by_agent[1], by_agent[2]


def _plan(space: Space, name: str) -> _Branch | Leaf:
    if isinstance(space, Mapping):  # gymnasium's Dict is one, too
        keys = tuple(space)
        children = tuple(_plan(space[key], f"{name}.{key}") for key in keys)
        return _Branch(name, keys, children)
    if isinstance(space, gym.spaces.Tuple):
        children = tuple(_plan(one, f"{name}[{i}]") for i, one in enumerate(space.spaces))
        return _Branch(name, None, children)
    if isinstance(space, (gym.spaces.Text, gym.spaces.Sequence, gym.spaces.Graph)) or (
        space.shape is None or space.dtype is None
    ):
        return Leaf(name, None, ())
    return Leaf(name, np.dtype(space.dtype), space.shape)


def _leaves(node: _Branch | Leaf) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            yield from _leaves(child)


def _collect(node: _Branch | Leaf, value: Any, into: list[Any]) -> None:
    if isinstance(node, Leaf):
        into.append(value)
    elif node.keys is None:
        if not isinstance(value, (tuple, list)) or len(value) != len(node.children):
            raise InvalidRequestError(
                f"{node.name}: expected {len(node.children)} parts, got {_show(value)}"
            )
        for child, part in zip(node.children, value, strict=True):
            _collect(child, part, into)
    else:
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{node.name}: expected a dict, got {_show(value)}")
        if value.keys() != set(node.keys):
            missing = [f"'{key}' is missing" for key in node.keys if key not in value]
            extra = [f"'{key}' is not in the space" for key in value if key not in node.keys]
            raise InvalidRequestError(f"{node.name}: {', '.join(missing + extra)}")
        for key, child in zip(node.keys, node.children, strict=True):
            _collect(child, value[key], into)


def _build(node: _Branch | Leaf, values: Iterator[Any]) -> Any:
    if isinstance(node, Leaf):
        return next(values)
    parts = [_build(child, values) for child in node.children]
    return tuple(parts) if node.keys is None else dict(zip(node.keys, parts, strict=True))


def _count_rows(leaf: Leaf, value: Any) -> int | None:
    """Returns the length of the leading dimension; None if there is none."""
    if leaf.dtype is None:
        return len(value) if isinstance(value, (tuple, list)) else None
    try:
        shape = value.shape if type(value) is np.ndarray else np.shape(value)
    except ValueError:  # `_check` says what it is
        return None
    return int(shape[0]) if len(shape) > len(leaf.shape) else None


def _check(leaf: Leaf, value: Any, rows: int | None) -> Any:
    """Returns the value with a leading dimension of rows, if it is what the space says."""
    if leaf.dtype is None:
        if rows is None:
            return [value]
        if isinstance(value, (tuple, list)) and len(value) == rows:
            return value
        raise InvalidRequestError(
            f"{leaf.name}: expected a list of {rows} values, got {_show(value)}"
        )
    if isinstance(value, Tensor):
        fits = value.dtype == torch_dtype(leaf.dtype)
    else:
        try:
            value = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            raise InvalidRequestError(
                f"{leaf.name}: expected an array, got {_show(value)}"
            ) from None
        fits = value.dtype == leaf.dtype
    shape = leaf.shape if rows is None else (rows, *leaf.shape)
    if not fits or value.shape != shape:
        expected = f"{leaf.dtype}{list(leaf.shape)} with or without a leading dimension of rows"
        if rows is not None:
            expected = f"{leaf.dtype}{list(shape)}"
        raise InvalidRequestError(f"{leaf.name}: expected {expected}, got {_show(value)}")
    return value[None] if rows is None else value


def _flag(leaf: Leaf, value: Any, rows: int) -> Any:
    """Returns a reward or flag as an array [rows]."""
    if type(value) is np.ndarray and value.dtype == leaf.dtype and value.shape == (rows,):
        return value
    if not isinstance(value, Tensor):
        try:
            value = np.asarray(value, leaf.dtype)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError(
                f"{leaf.name}: expected {leaf.dtype}[{rows}], got {_show(value)}"
            ) from None
    if value.shape == ():
        return np.full(rows, value, leaf.dtype)
    if value.shape != (rows,):
        raise InvalidRequestError(f"{leaf.name}: expected {leaf.dtype}[{rows}], got {_show(value)}")
    return value


def _of_agent(flag: Any, agent: str) -> Any:
    if not isinstance(flag, Mapping):
        return flag
    # An agent that has left the episode gets neither reward nor flags.
    return flag.get(agent, 0)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Returns the torch dtype of the same name."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _show(value: Any) -> str:
    if isinstance(value, (np.ndarray, Tensor)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
    return f"{type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sequence) else "")
