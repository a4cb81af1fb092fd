"""How new columns fit those that are stored, and where episodes end in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Layout, as_array, check_keys, iter_arrays
from rlightning.errors import InvalidRowError

Slots = npt.NDArray[np.intp]


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
    columns: Mapping[str, list[Array]], count: int, lengths: Slots | None
) -> npt.NDArray[np.bool_] | None:
    """Tells after which of `count` transitions an episode or segment ends, [count].

    Without lengths they are one. None if one ends after the last transition alone.
    """
    if lengths is None and "truncated" not in columns and "cut" not in columns:
        return None
    ends = np.zeros(count, np.bool_)
    if "terminated" in columns and "truncated" in columns:
        pairs = zip(columns["terminated"], columns["truncated"], strict=True)
        done = [np.logical_or(a, b).reshape(len(ends), -1).any(axis=1) for a, b in pairs]
        ends |= np.logical_and.reduce(done)  # it ends when it has ended for each agent
    if "cut" in columns:
        ends |= columns["cut"][0]
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
        shape = np.shape(as_array(value, "columns"))
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


def mismatch(stored: Mapping[str, Layout], new: Mapping[str, Layout]) -> str | None:
    """Says what keeps new columns from being stored beside others; None if nothing."""
    try:
        check_keys(stored, new, "columns")
    except InvalidRowError as error:
        return str(error)
    return next(filter(None, (layout.difference(new[n]) for n, layout in stored.items())), None)
