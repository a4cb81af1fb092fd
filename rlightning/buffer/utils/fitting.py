"""How new columns fit those that are stored, and where episodes end in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Layout, Leaf, as_array, check_keys, iter_arrays
from rlightning.errors import InvalidRowError

Slots = npt.NDArray[np.intp]
Outs: TypeAlias = "list[Array | None]"


def as_columns(data: Any) -> Mapping[str, Any]:
    """Returns columns by name, also of a TensorDict.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(data, Mapping):
        return data
    if hasattr(data, "items") and hasattr(data, "batch_size"):
        return dict(data.items())
    raise TypeError(f"expected columns by name, got {type(data).__name__}")


def as_lengths(lengths: Sequence[int] | None) -> Slots | None:
    """Returns lengths of episodes as an array; None as it is."""
    return None if lengths is None else np.asarray(lengths, np.intp)


def window(flags: npt.NDArray[np.bool_], length: int) -> npt.NDArray[np.bool_]:
    """Tells where `length` flags in a row are set, around the end of the ring too."""
    if length < 1:
        return np.ones_like(flags)
    window, span = flags, 1
    while span < length:
        step = min(span, length - span)
        window, span = window & np.roll(window, -step), span + step
    return window


def ends_of(
    columns: Mapping[str, list[Array]], count: int, lengths: Slots | None, *, ahead: bool = False
) -> npt.NDArray[np.bool_] | None:
    """Tells after which of `count` transitions an episode or segment ends, [count].

    Without lengths they are one. None if one ends after the last transition alone. With `ahead`,
    flags may be those of later steps: of several in a row, the last one counts.
    """
    if lengths is None and "truncated" not in columns and "cut" not in columns:
        return None
    ends = np.zeros(count, np.bool_)
    if "terminated" in columns and "truncated" in columns:
        pairs = zip(columns["terminated"], columns["truncated"], strict=True)
        done: list[Any] = [np.logical_or(a, b) for a, b in pairs]
        if done[0].ndim > 1:
            done = [one.reshape(count, -1).any(axis=1) for one in done]
        # It ends when it has ended for each agent.
        ends |= done[0] if len(done) == 1 else np.logical_and.reduce(done)
    if "cut" in columns:
        ends |= columns["cut"][0]
    if ahead:
        ends[:-1] &= ~ends[1:]
    ends[-1 if lengths is None else np.cumsum(lengths) - 1] = True
    return ends


def count_of(columns: Mapping[str, Any]) -> int:
    """Returns how many transitions columns have, by the first of them.

    Raises:
        InvalidRowError: There are no columns, or the first has no axis of transitions.
    """
    value = next(iter(columns.values()), None)
    if type(value) is np.ndarray and value.ndim:
        return len(value)
    for value in iter_arrays(columns):
        if isinstance(value, str):
            continue  # one of a list of them
        shape = np.shape(as_array(value, "columns", text=True))
        if not shape:
            raise InvalidRowError("expected a leading axis of transitions, got one value")
        return int(shape[0])
    raise InvalidRowError("expected columns, got none")


def with_policy_layout(
    layouts: Mapping[str, Layout], stored: Mapping[str, Layout]
) -> Mapping[str, Layout]:
    """Adds the policy's own action, where it is stored and was executed, to new layouts."""
    if "policy_action" in stored and "policy_action" not in layouts and "action" in layouts:
        return {**layouts, "policy_action": layouts["action"]}
    return layouts


def with_policy_action(
    columns: Mapping[str, list[Array]], stored: Mapping[str, Layout]
) -> Mapping[str, list[Array]]:
    """Adds the policy's own action, where it is stored and was executed, to new columns."""
    if "policy_action" in stored and "policy_action" not in columns:
        return {**columns, "policy_action": columns["action"]}
    return columns


def with_next_observations(
    columns: Mapping[str, list[Array]], apart: npt.NDArray[np.bool_]
) -> Mapping[str, list[Array]]:
    """Completes a column that has some of the next observations only.

    Args:
        columns: The columns.
        apart: Which transitions it has them of; those of others are the observation of the next.
    """
    pairs = zip(columns["observation"], columns["next_observation"], strict=True)
    whole = []
    for now, some in pairs:
        after = np.concatenate([now[1:], now[-1:]])
        after[apart] = some
        whole.append(after)
    return {**columns, "next_observation": whole}


def mismatch(stored: Mapping[str, Layout], new: Mapping[str, Layout]) -> str | None:
    """Says what keeps new columns from being stored beside others; None if nothing."""
    try:
        check_keys(stored, new, "columns")
    except InvalidRowError as error:
        return str(error)
    return next(filter(None, (layout.difference(new[n]) for n, layout in stored.items())), None)


def stored_leaf(leaf: Leaf) -> Leaf:
    """Returns how a ring keeps a leaf: of text the numbers of the strings."""
    return Leaf(leaf.path, np.dtype(np.int32), leaf.shape) if leaf.text else leaf


def outputs(
    out: Mapping[str, Any] | None, layouts: Mapping[str, Layout], lead: tuple[int, ...]
) -> dict[str, Outs]:
    """Returns the arrays of an earlier batch that the next one may be written into.

    None stands for a new array: everywhere without `out`, and for text, of which a ring keeps
    numbers.

    Raises:
        InvalidRowError: They are not those of such a batch.
    """
    if out is None:
        return {name: [None] * len(layout.leaves) for name, layout in layouts.items()}
    found: dict[str, Outs] = {}
    for name, layout in layouts.items():
        if name not in out:
            raise InvalidRowError(f"out: {name} missing")
        try:
            arrays = layout.flatten(out[name], lead)
        except InvalidRowError as error:
            raise InvalidRowError(f"out: {error}") from None
        if not all(array.flags.writeable and array.flags.c_contiguous for array in arrays):
            raise InvalidRowError(f"out: {name}: expected writable arrays in C order")
        found[name] = [
            None if leaf.text else array for leaf, array in zip(layout.leaves, arrays, strict=True)
        ]
    return found
