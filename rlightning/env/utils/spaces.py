"""Observations of several rows as one value, and whether they are what a space says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


def stack(space: gym.Space[Any], items: Sequence[Any]) -> Any:
    """Returns values of a space as one value with a leading dimension.

    Args:
        space: Space of one item.
        items: At least one value of it.

    Returns:
        Leaves `[len(items), ...]` of the space's dtypes, copied; a tuple of the items where a space
        has no fixed shape (Text, Sequence, Graph, OneOf).
    """
    if isinstance(space, gym.spaces.Box) and len(items) == 1:
        return np.array(items[0], dtype=space.dtype)[None]
    out: Any = create_empty_array(space, n=len(items))
    return concatenate(space, items, out)


def as_declared(space: gym.Space[Any], value: Any) -> Any:
    """Returns one value of a space with arrays of the space's dtypes, copied."""
    if isinstance(space, gym.spaces.Dict):
        return {key: as_declared(child, value[key]) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return tuple(as_declared(child, part) for child, part in pairs)
    if isinstance(space, gym.spaces.Discrete) or _has_no_shape(space):
        return value
    return np.array(value, dtype=space.dtype)


def zeros(space: gym.Space[Any]) -> Any:
    """Returns a value of a space whose numbers are all 0."""
    first: Any = next(iter(iterate(batch_space(space, 1), create_empty_array(space, n=1))))
    return as_declared(space, first)


def take(space: gym.Space[Any], value: Any, positions: npt.NDArray[np.int32]) -> Any:
    """Returns some rows of a value with a leading dimension of rows; copied.

    Args:
        space: Space of one row.
        value: Of all rows.
        positions: Which, at least one.
    """
    if isinstance(space, gym.spaces.Box):
        return np.asarray(value)[positions]
    if isinstance(space, gym.spaces.Dict):
        return {key: take(child, value[key], positions) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return tuple(take(child, part, positions) for child, part in pairs)
    return stack(space, [value[position] for position in positions.tolist()])


def one_row(value: Any, position: int) -> Any:
    """Returns one row of nested arrays with a leading dimension of rows, without it; copied."""
    if isinstance(value, Mapping):
        return {key: one_row(child, position) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(one_row(child, position) for child in value)
    return np.array(value[position])


def row_of(space: gym.Space[Any], value: Any, row: int) -> Any:
    """Returns one row of a value with a leading dimension, as the space has it; copied.

    Args:
        space: Space of one row.
        value: What `stack` returns, or a batch of gymnasium's.
        row: Which one.
    """
    if isinstance(space, gym.spaces.Dict):
        return {key: row_of(child, value[key], row) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return tuple(row_of(child, part, row) for child, part in pairs)
    if _has_no_shape(space):
        return value[row]
    if isinstance(space, gym.spaces.Discrete):
        return np.asarray(value, space.dtype)[row]
    return np.array(value[row], dtype=space.dtype)


def mismatch(
    space: gym.Space[Any],
    value: Any,
    *,
    rows: int | None = None,
    name: str = "observation",
    exact: bool = False,
) -> str | None:
    """Returns how a value differs from its space in keys, shape or dtype, if it does.

    Bounds are not looked at.

    Args:
        space: Space of one row.
        value: A value of it, or of all rows.
        rows: Length of the leading dimension; None: there is none.
        name: What to call the value.
        exact: Whether arrays need the dtype of the space; else one of its kind is accepted, such as
            float64 for float32.
    """
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name}: expected a dict, got {_show(value)}"
        if value.keys() != space.spaces.keys():
            return f"{name}: expected keys {sorted(space.spaces)}, got {sorted(value)}"
        children = [(child, value[key], f"{name}.{key}") for key, child in space.items()]
        return _first_mismatch(children, rows, exact)
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
            return f"{name}: expected {len(space.spaces)} parts, got {_show(value)}"
        pairs = zip(space.spaces, value, strict=True)
        parts = [(s, v, f"{name}[{i}]") for i, (s, v) in enumerate(pairs)]
        return _first_mismatch(parts, rows, exact)
    if _has_no_shape(space):
        items = (value,) if rows is None else value
        if not isinstance(items, (tuple, list)) or len(items) != (rows or 1):
            return f"{name}: expected a list of {rows} values, got {_show(value)}"
        wrong = [item for item in items if not _contains(space, item)]
        return f"{name}: expected {space}, got {_show(wrong[0])}" if wrong else None
    array, shape = np.asarray(value), space.shape or ()
    shape = shape if rows is None else (rows, *shape)
    casting: Literal["equiv", "same_kind"] = "equiv" if exact else "same_kind"
    if array.shape == shape and np.can_cast(array.dtype, space.dtype, casting):  # type: ignore[arg-type]
        return None
    return f"{name}: expected {space.dtype}{list(shape)}, got {_show(value)}"


def _first_mismatch(
    parts: list[tuple[gym.Space[Any], Any, str]], rows: int | None, exact: bool
) -> str | None:
    texts = (
        mismatch(space, value, rows=rows, name=name, exact=exact) for space, value, name in parts
    )
    return next((text for text in texts if text), None)


def all_finite(value: Any) -> bool:
    """Tells whether no array of floats in a nested value holds NaN or an infinity."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    parts = value.values() if isinstance(value, Mapping) else value
    return not isinstance(value, (Mapping, list, tuple)) or all(map(all_finite, parts))


def structure(space: Any) -> Any:
    """Returns the nesting and shapes of a space, or of a dict of spaces by agent, to compare."""
    if isinstance(space, (gym.spaces.Dict, dict)):
        return {key: structure(child) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return [structure(child) for child in space.spaces]
    return type(space).__name__ if _has_no_shape(space) else tuple(space.shape or ())


def same_structure(first: Any, other: Any, *, rows: tuple[int, int]) -> bool:
    """Whether two of `structure` are alike, leading dimensions of rows left out.

    Args:
        first: One.
        other: The other.
        rows: How many rows each may have a leading dimension of.
    """
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(
            same_structure(first[key], other[key], rows=rows) for key in first
        )
    if isinstance(first, list) and isinstance(other, list):
        return len(first) == len(other) and all(
            same_structure(*pair, rows=rows) for pair in zip(first, other, strict=True)
        )
    if isinstance(first, (dict, list)) or isinstance(other, (dict, list)):
        return False
    # A space does not tell a leading dimension from one of its own, so both readings count.
    mine, theirs = (
        [shape, shape[1:]] if count > 1 and shape[:1] == (count,) else [shape]
        for shape, count in zip((first, other), rows, strict=True)
    )
    return any(shape in theirs for shape in mine)


def _contains(space: gym.Space[Any], item: Any) -> bool:
    # Few envs care for the alphabet and length that they declare of a text.
    return isinstance(item, str) if isinstance(space, gym.spaces.Text) else space.contains(item)


def _has_no_shape(space: gym.Space[Any]) -> bool:
    """Whether values of a space differ in shape: Text, Sequence, Graph, OneOf."""
    return getattr(space, "shape", None) is None or isinstance(space, gym.spaces.Text)


def _show(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype}{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
