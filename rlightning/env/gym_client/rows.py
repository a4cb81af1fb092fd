"""What a group of rows returns, in gymnasium's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.env.utils.spaces import row_of
from rlightning.types import EnvRet
from rlightning.utils.conversions import map_leaves

# What this library adds to an info; the first is for its own statistics.
_OWN_KEYS = frozenset({"episode_info", "final_rows", "final_observation", "final_info"})


def scalar_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the info of a group of one row without its leading dimension."""
    return {
        key: map_leaves(lambda leaf: leaf[0] if _has_rows(leaf, 1) else leaf, value)
        for key, value in info.items()
        if key not in _OWN_KEYS
    }


def vector_info(space: gym.Space[Any], env_rets: Sequence[EnvRet], rows: int) -> dict[str, Any]:
    """Returns the infos of groups as one of gymnasium's vector envs gives it.

    Args:
        space: Space of one row's observation.
        env_rets: What the groups returned.
        rows: Rows of all of them.

    Returns:
        For each key an array [rows] and under `_key` the mask of rows that have it; where rows
        ended, `final_obs` (objects: an observation, or None) and `final_info` with their masks.
    """
    into: dict[str, Any] = {}
    start = 0
    for env_ret in env_rets:
        count = len(env_ret.last_terminated)
        info = env_ret.info
        _scatter(into, info, np.arange(start, start + count), rows)
        if "final_rows" in info:
            ended = np.asarray(info["final_rows"]) + start
            final = into.setdefault("final_obs", np.full(rows, None, object))
            for position, row in enumerate(ended):
                final[row] = row_of(space, info["final_observation"], position)
            into.setdefault("_final_obs", np.zeros(rows, bool))[ended] = True
            _scatter(into.setdefault("final_info", {}), info.get("final_info", {}), ended, rows)
            into.setdefault("_final_info", np.zeros(rows, bool))[ended] = True
        start += count
    return into


def _scatter(
    into: dict[str, Any], info: Mapping[str, Any], at: npt.NDArray[Any], rows: int
) -> None:
    """Adds an info of some rows to one of all rows.

    Args:
        into: The info of all rows.
        info: Arrays [len(at)] with or without their masks.
        at: Which rows these are.
        rows: Length of the arrays in `into`.
    """
    for key, value in info.items():
        if key in _OWN_KEYS or (key.startswith("_") and key[1:] in info):
            continue
        mask = np.asarray(info.get(f"_{key}", np.ones(len(at), bool)))
        if isinstance(value, Mapping):
            _scatter(into.setdefault(key, {}), value, at, rows)
        else:
            values = value if _has_rows(value, len(at)) else np.full(len(at), None, object)
            if values is not value:
                values[:] = [value] * len(at)  # the same for all rows, such as a text
            there = into.get(key)
            if there is None:
                empty = None if values.dtype == object else 0
                there = into[key] = np.full((rows, *values.shape[1:]), empty, values.dtype)
            there[at[mask]] = values[mask]
        into.setdefault(f"_{key}", np.zeros(rows, bool))[at[mask]] = True


def info_of_row(info: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Returns what an info of a vector env holds for one row."""
    mine = {}
    for key, value in info.items():
        mask = info.get(f"_{key}")
        if mask is not None and mask[row]:
            mine[key] = info_of_row(value, row) if isinstance(value, Mapping) else value[row]
    return mine


def slice_rows(space: gym.Space[Any], batch: Any, start: int, stop: int) -> Any:
    """Returns some rows of a batch of values of a space."""
    if isinstance(space, gym.spaces.Dict):
        return {key: slice_rows(child, batch[key], start, stop) for key, child in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(space.spaces, batch, strict=True)
        return tuple(slice_rows(child, part, start, stop) for child, part in pairs)
    return batch[start:stop]


def join_rows(space: gym.Space[Any], batches: Sequence[Any]) -> Any:
    """Returns batches of values of a space as one, copied."""
    if isinstance(space, gym.spaces.Dict):
        return {
            key: join_rows(child, [one[key] for one in batches]) for key, child in space.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            join_rows(child, [one[index] for one in batches])
            for index, child in enumerate(space.spaces)
        )
    if isinstance(batches[0], (list, tuple)):
        return tuple(item for one in batches for item in one)
    return np.concatenate(batches) if len(batches) > 1 else np.array(batches[0])


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == rows
