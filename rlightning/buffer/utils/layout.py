"""How nested values become arrays: which leaves a value has, and what each must look like."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rlightning.errors import ConfigError, InvalidRowError
from rlightning.utils.conversions import BFloat16Array, array_of

Array: TypeAlias = npt.NDArray[Any]

# Element kinds that no column of numbers holds: objects, text, bytes, dates and records.
_NOT_STORED = frozenset("OUSMmV")
# Characters that a text may have which no space declares.
_TEXT_LENGTH = 1024
_STRING_BYTES = 8 + 64  # of a string beside its characters, and of the reference to it
_SIMPLE_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass(frozen=True)
class Leaf:
    """One array of a nested value, without the axes of rows and time."""

    path: str
    """Where it is, such as `observation.camera`."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bfloat16: bool = False
    """Whether its uint16 elements are the bits of bfloat16."""
    text: bool = False
    """Whether its elements, objects, are strings."""
    max_length: int = field(default=_TEXT_LENGTH, compare=False)
    """Characters that a string may have."""

    def take(self, value: Any, lead: tuple[int, ...]) -> Array:
        """Returns the array of a value that fits this leaf; not copied.

        Args:
            value: Array, tensor or number.
            lead: Leading axes that the value has; () for one row without an axis of rows.

        Returns:
            Array of shape [*lead, *shape]; [1, *shape] without `lead`.

        Raises:
            InvalidRowError: Another dtype or shape.
        """
        if self.text:
            return self._strings(value, lead)
        plain = type(value) is np.ndarray
        array = value if plain else self._array(value)
        bfloat16 = not plain and isinstance(array, BFloat16Array)
        if array.dtype != self.dtype or bfloat16 != self.bfloat16:
            raise InvalidRowError(f"{self.path}: expected {self.name}, got {_dtype_name(array)}")
        if array.shape != lead + self.shape:
            raise InvalidRowError(
                f"{self.path}: expected shape {list(lead + self.shape)}, got {list(array.shape)}"
            )
        return array if lead else array[np.newaxis]

    def _array(self, value: Any) -> Array:
        plain = isinstance(value, int) or (isinstance(value, float) and self.dtype.kind in "fc")
        if not plain:
            return as_array(value, self.path)
        try:
            return np.asarray(value, self.dtype)  # a plain number has no dtype of its own
        except OverflowError:
            raise InvalidRowError(f"{self.path}: {value} does not fit in {self.name}") from None

    def _strings(self, value: Any, lead: tuple[int, ...]) -> Array:
        array = np.asarray(value, np.object_)
        if array.shape != lead + self.shape:
            raise InvalidRowError(
                f"{self.path}: expected text of shape {list(lead + self.shape)}, got {_kind(value)}"
                f" of shape {list(array.shape)}"
            )
        for string in array.flat:
            if not isinstance(string, str):
                raise InvalidRowError(f"{self.path}: expected text, got {type(string).__name__}")
            if len(string) > self.max_length:
                raise InvalidRowError(
                    f"{self.path}: expected at most {self.max_length} characters, as the space "
                    f"declares or the buffer assumes, got {len(string)}"
                )
        if any(isinstance(string, np.str_) for string in array.flat):
            array = np.array([*map(str, array.flat)], np.object_).reshape(array.shape)
        return array if lead else array[np.newaxis]

    @property
    def nbytes(self) -> int:
        """Size of one value in bytes; an empty axis counts as one, as in numpy's own check."""
        if self.text:
            return _STRING_BYTES + 4 * self.max_length
        return self.dtype.itemsize * math.prod(axis or 1 for axis in self.shape)

    @property
    def name(self) -> str:
        """Name of the dtype, for messages."""
        if self.text:
            return "text"
        return "bfloat16" if self.bfloat16 else str(self.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


Tree: TypeAlias = "Leaf | dict[str, Tree] | tuple[Tree, ...]"


class Layout:
    """The leaves of one nested value, and the containers around them.

    Dicts stay dicts; tuples and lists become tuples.

    Attributes:
        leaves: The leaves in their order.
        nbytes: Size in bytes of one value.
    """

    __slots__ = ("_path", "_plain", "_single", "_tree", "leaves", "nbytes")

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree = tree
        self._path = path
        self.leaves: tuple[Leaf, ...] = tuple(_walk(tree))
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        single = self._single = tree if isinstance(tree, Leaf) else None
        # Dtype and shape of an array that is stored as it comes, as nearly all are.
        plain = single is not None and not single.bfloat16 and not single.text
        self._plain = (single.dtype, single.shape) if single is not None and plain else None

    @staticmethod
    def of_space(space: gym.Space[Any] | Mapping[str, gym.Space[Any]], path: str) -> Layout:
        """Returns the layout of the values of a space, or of spaces by agent.

        Raises:
            ConfigError: It holds a space whose values have no fixed shape.
        """
        return Layout(_tree_of_space(space, path), path)

    @staticmethod
    def of_value(value: Any, path: str, *, lead: int) -> Layout:
        """Returns the layout of a value.

        Args:
            value: The value.
            path: Name of the value, for messages.
            lead: How many leading axes each of its arrays has before those of the leaf.

        Raises:
            InvalidRowError: Something in it is no array of numbers, or lacks the axes.
        """
        return Layout(_tree_of_value(value, path, lead), path)

    @staticmethod
    def of_scalar(path: str, dtype: npt.DTypeLike, agents: Sequence[str] | None = None) -> Layout:
        """Returns the layout of one number per row, or of a dict of them by agent."""
        kind = np.dtype(dtype)
        if agents is None:
            return Layout(Leaf(path, kind, ()), path)
        return Layout({agent: Leaf(f"{path}.{agent}", kind, ()) for agent in agents}, path)

    def flatten(self, value: Any, lead: tuple[int, ...]) -> list[Array]:
        """Returns the arrays of a value in the order of `leaves`; see `Leaf.take`.

        Raises:
            InvalidRowError: A key is missing or not expected, or a leaf does not fit.
        """
        plain = self._plain
        if plain is not None and lead and type(value) is np.ndarray:
            dtype, shape = plain
            if value.dtype == dtype and value.shape == lead + shape:
                return [value]
        if self._single is not None:
            return [self._single.take(value, lead)]
        arrays: list[Array] = []
        _flatten(self._tree, value, self._path, lead, arrays)
        return arrays

    def unflatten(self, arrays: Sequence[Array]) -> Any:
        """Returns the nested value of arrays in the order of `leaves`."""
        if self._single is not None and not self._single.bfloat16:
            return arrays[0]
        return _unflatten(self._tree, iter(arrays))

    @property
    def path(self) -> str:
        """Name of the value, such as `observation`."""
        return self._path

    def allocate(self, lead: tuple[int, ...]) -> list[Array]:
        """Returns zeroed arrays of shape [*lead, *leaf.shape], one per leaf."""
        return [
            np.full(lead + leaf.shape, "", np.object_)
            if leaf.text
            else np.zeros(lead + leaf.shape, leaf.dtype)
            for leaf in self.leaves
        ]

    @property
    def has_text(self) -> bool:
        """Whether some of its leaves are text."""
        return any(leaf.text for leaf in self.leaves)

    def map(self, function: Callable[[Leaf], Leaf]) -> Layout:
        """Returns the same nesting of other leaves."""
        return Layout(_map_leaves(function, self._tree), self._path)

    def is_batched(self, value: Any) -> bool:
        """Tells whether the first array of a value has an axis before those of its leaf."""
        tree = self._tree
        while not isinstance(tree, Leaf):
            if isinstance(tree, dict):
                key = next(iter(tree), "")
                if not isinstance(value, Mapping) or key not in value or key not in tree:
                    return False  # which the check says
                tree, value = tree[key], value[key]
            else:
                if not isinstance(value, (tuple, list)) or not value or not tree:
                    return False
                tree, value = tree[0], value[0]
        if tree.text:
            return not isinstance(value, str) and np.ndim(np.asarray(value, np.object_)) > 0
        return np.ndim(value) > len(tree.shape)

    def difference(self, other: Layout) -> str | None:
        """Says in which leaf `other` differs, apart from the name; None if in none."""
        if self.leaves == other.leaves:
            return None
        for mine, theirs in zip(self._kinds(), other._kinds(), strict=False):
            if mine != theirs:
                return f"{other._path}{theirs[0]}: expected {mine[1]}, got {theirs[1]}"
        if len(self.leaves) != len(other.leaves):
            return f"{other._path}: expected {len(self.leaves)} leaves, got {len(other.leaves)}"
        return None

    def _kinds(self) -> list[tuple[str, str]]:
        return [(leaf.path[len(self._path) :], str(leaf)) for leaf in self.leaves]


def as_array(value: Any, path: str, *, text: bool = False) -> Array:
    """Returns the array of an array-like or torch tensor of numbers; shares its memory if it can.

    Args:
        value: The value.
        path: Name of the value, for messages.
        text: Let text become an array of objects, which are strings.

    Raises:
        InvalidRowError: It is nothing that a column can hold.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return array_of(value)
    if isinstance(value, (np.ndarray, np.generic, int, float, complex)):
        array = np.asanyarray(value)
        if array.dtype.kind not in _NOT_STORED:
            return array
    if text and isinstance(value, (str, np.ndarray)):
        array = np.asarray(value, np.object_)
        if all(isinstance(item, str) for item in array.flat):
            return array
    raise InvalidRowError(f"{path}: expected an array of numbers, got {_kind(value)}")


def _kind(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"


def _dtype_name(array: Array) -> str:
    return "bfloat16" if isinstance(array, BFloat16Array) else str(array.dtype)


def _walk(tree: Tree) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
        return
    for branch in tree.values() if isinstance(tree, dict) else tree:
        yield from _walk(branch)


def _tree_of_space(space: Any, path: str) -> Tree:
    if isinstance(space, (spaces.Dict, Mapping)):
        return {key: _tree_of_space(part, f"{path}.{key}") for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree_of_space(part, f"{path}[{i}]") for i, part in enumerate(space.spaces))
    if isinstance(space, _SIMPLE_SPACES):
        return Leaf(path, np.dtype(space.dtype), tuple(space.shape or ()))
    if isinstance(space, spaces.Text):
        return Leaf(path, np.dtype(np.object_), (), text=True, max_length=space.max_length)
    raise ConfigError(
        f"{path}: {type(space).__name__} values have no fixed shape, and cannot be stored"
    )


def _tree_of_value(value: Any, path: str, lead: int) -> Tree:
    if isinstance(value, Mapping):
        return {key: _tree_of_value(part, f"{path}.{key}", lead) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        if lead and value and all(isinstance(part, str) for part in value):
            return Leaf(path, np.dtype(np.object_), (), text=True)
        return tuple(_tree_of_value(part, f"{path}[{i}]", lead) for i, part in enumerate(value))
    array = as_array(value, path, text=True)
    if array.ndim < lead:
        raise InvalidRowError(f"{path}: expected a leading axis of rows, got one value")
    if array.dtype.kind == "O":
        return Leaf(path, array.dtype, array.shape[lead:], text=True)
    return Leaf(path, array.dtype, array.shape[lead:], isinstance(array, BFloat16Array))


def _map_leaves(function: Callable[[Leaf], Leaf], tree: Tree) -> Tree:
    if isinstance(tree, Leaf):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map_leaves(function, branch) for key, branch in tree.items()}
    return tuple(_map_leaves(function, branch) for branch in tree)


def _flatten(tree: Tree, value: Any, path: str, lead: tuple[int, ...], arrays: list[Array]) -> None:
    if isinstance(tree, Leaf):
        arrays.append(tree.take(value, lead))
    elif isinstance(tree, dict):
        if not isinstance(value, Mapping):
            raise InvalidRowError(f"{path}: expected a dict of {sorted(tree)}, got {_kind(value)}")
        check_keys(tree, value, path)
        for key, branch in tree.items():
            _flatten(branch, value[key], f"{path}.{key}", lead, arrays)
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(tree):
            raise InvalidRowError(f"{path}: expected {len(tree)} parts, got {_kind(value)}")
        for index, (branch, part) in enumerate(zip(tree, value, strict=True)):
            _flatten(branch, part, f"{path}[{index}]", lead, arrays)


def map_arrays(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to every array of a nesting of dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {key: map_arrays(function, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map_arrays(function, part) for part in value)
    return function(value)


def iter_arrays(value: Any) -> Iterator[Any]:
    """Yields every array of a nesting of dicts, tuples and lists."""
    if isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iter_arrays(part)
    else:
        yield value


def check_keys(expected: Mapping[str, Any], got: Mapping[str, Any], path: str) -> None:
    """Checks that two mappings have the same keys, in any order.

    Raises:
        InvalidRowError: They do not; the message names the keys.
    """
    if got.keys() == expected.keys():
        return
    missing, more = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    said = [f"{', '.join(missing)} missing"] if missing else []
    said += [f"{', '.join(more)} not expected"] if more else []
    raise InvalidRowError(f"{path}: {' and '.join(said)}")


def _unflatten(tree: Tree, arrays: Iterator[Array]) -> Any:
    if isinstance(tree, Leaf):
        array = next(arrays)
        return array.view(BFloat16Array) if tree.bfloat16 else array
    if isinstance(tree, dict):
        return {key: _unflatten(branch, arrays) for key, branch in tree.items()}
    return tuple(_unflatten(branch, arrays) for branch in tree)
