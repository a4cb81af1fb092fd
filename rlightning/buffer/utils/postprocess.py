"""Functions that make columns of the steps of a finished episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlightning.buffer.utils.layout import map_arrays
from rlightning.buffer.utils.utils import (
    default_compute_gae,
    default_gae_no_loop,
    default_postprocess_fn,
)

__all__ = [
    "default_compute_gae",
    "default_gae_no_loop",
    "default_postprocess_fn",
    "n_step_postprocess_fn",
]


def n_step_postprocess_fn(
    n: int, gamma: float = 0.99
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns a function whose transitions look `n` steps ahead.

    `reward` becomes the sum of the next n rewards, discounted; `next_observation` that of the last
    of these steps, `terminated`, `truncated` and `cut` its flags, and the new column `discount`
    (float32) what its value counts: gamma to the power of the number of steps. Towards the end of
    an episode there are fewer steps. So a target is `reward + discount * V(next_observation)`,
    without the second part where `terminated` is set.

    Args:
        n: Number of steps, at least 1.
        gamma: Discount of one step.

    Raises:
        ValueError: Fewer than one step.
    """
    if n < 1:
        raise ValueError(f"n: expected at least 1, got {n}")

    def postprocess(episode: Mapping[str, Any]) -> dict[str, Any]:
        columns = default_postprocess_fn(episode)
        length = len(
            next(iter(columns["reward"].values()))
            if isinstance(columns["reward"], Mapping)
            else columns["reward"]
        )
        last = np.minimum(np.arange(length) + n, length) - 1
        for name in ("next_observation", "terminated", "truncated", "cut"):
            if name in columns:
                columns[name] = map_arrays(lambda leaf: leaf[last], columns[name])
        columns["reward"] = map_arrays(lambda leaf: _ahead(leaf, n, gamma), columns["reward"])
        columns["discount"] = (gamma ** (last - np.arange(length) + 1)).astype(np.float32)
        return columns

    return postprocess


def _ahead(rewards: Any, n: int, gamma: float) -> Any:
    """Returns the discounted sums of the next n rewards, [T, ...]; of fewer at the end."""
    total = np.zeros(rewards.shape, np.float64)
    for k in range(min(n, len(rewards))):
        total[: len(rewards) - k] += gamma**k * rewards[k:]
    return total.astype(rewards.dtype)
