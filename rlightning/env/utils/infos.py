"""What of an env's info goes on to policy and buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

INFO_KEYS = ("episode_info", "episode")
"""What goes on by default: statistics of finished episodes."""

_FINAL_KEYS = frozenset({"final_rows", "final_observation", "final_info"})


class InfoFilter:
    """Leaves out of an info what nobody asked for, which may be large, or nothing to be sent.

    Args:
        keys: What goes on of `info` and `final_info`; what tells of ended rows does in any case.
    """

    def __init__(self, keys: Collection[str] = INFO_KEYS) -> None:
        self._kept = frozenset(keys) | {f"_{key}" for key in keys}  # gymnasium's masks beside them

    def __call__(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns what goes on of an info."""
        if not info:
            return info
        kept = {key: value for key, value in info.items() if key in self._kept}
        kept.update((key, info[key]) for key in _FINAL_KEYS if key in info)
        if "final_info" in kept:
            final_info = kept.pop("final_info")
            final_info = {key: value for key, value in final_info.items() if key in self._kept}
            if final_info:
                kept["final_info"] = final_info
        return kept


def rows_of_info(
    info: Mapping[str, Any], rows: npt.NDArray[np.int32], total: int
) -> dict[str, Any]:
    """Returns some rows of a vector env's info; what has no rows stays as it is.

    Args:
        info: Arrays [total, ...], in dicts as well.
        rows: Which.
        total: How many rows the vector env has.
    """
    result: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            result[key] = rows_of_info(value, rows, total)
        elif isinstance(value, np.ndarray) and value.ndim and len(value) == total:
            result[key] = value[rows]
        else:
            result[key] = value
    return result
