"""Several storages as one: how much of a batch each gives, and how the parts become one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlightning.buffer.parts import split
from rlightning.buffer.utils.layout import Layout, iter_arrays
from rlightning.errors import InvalidRowError

Split = Literal["proportional", "equal"]
Indices = npt.NDArray[np.int64]

_SHIFT = 40  # a shard has fewer transitions than 2^40
# Up to here numpy draws without replacement among so many rows.
_MOST_ROWS = 10**9


def split_counts(
    batch_size: int, sizes: Sequence[int], split: Split, rng: np.random.Generator
) -> list[int]:
    """Returns how many rows of a batch each shard gives.

    `proportional` draws the numbers as if the rows of all shards lay in one storage and the batch
    were taken from there without replacement, so that each row has the same chance. `equal` gives
    each shard with rows as many; what does not divide goes to the first ones.

    Args:
        batch_size: Rows in the batch; at most the sum of the sizes.
        sizes: Rows of each shard.
        split: Which of both.
        rng: Draws the numbers.
    """
    total = sum(sizes)
    if split == "equal":
        filled = [i for i, size in enumerate(sizes) if size]
        counts = [0] * len(sizes)
        for turn, i in enumerate(filled):
            counts[i] = batch_size // len(filled) + (turn < batch_size % len(filled))
        return counts
    if total < _MOST_ROWS:
        drawn = rng.multivariate_hypergeometric(sizes, batch_size, method="marginals")
    else:
        drawn = rng.multinomial(batch_size, np.array(sizes) / total)
    return [int(count) for count in drawn]


def pack(shard: int, indices: npt.ArrayLike) -> Indices:
    """Returns positions in a shard as numbers that say which shard it is, int64."""
    numbers: Indices = np.asarray(indices, np.int64) | np.int64(shard << _SHIFT)
    return numbers


def unpack(numbers: npt.ArrayLike) -> tuple[Indices, Indices]:
    """Returns the shards and the positions that `pack` made one number each of."""
    packed = np.asarray(numbers, np.int64)
    return packed >> _SHIFT, packed & ((1 << _SHIFT) - 1)


def merge(parts: Sequence[Any], axis: int = 0) -> Any:
    """Returns batches as one, each row once and in order.

    Args:
        parts: At least one batch: columns by name, leaves [B, ...], or a list of episodes.
        axis: Along which they are laid side by side: 1 for rollouts, [T, N, ...].

    Returns:
        Columns; episodes that differ in length from part to part are a list.

    Raises:
        InvalidRowError: The parts differ in what they hold.
    """
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, list) for part in parts) or (axis == 0 and _ragged(parts)):
        return [episode for part in parts for episode in _episodes(part)]
    first = parts[0]
    merged = {}
    for name, value in first.items():
        layout = Layout.of_value(value, name, lead=axis + 1)
        leaves = []
        for part in parts:
            if part.keys() != first.keys():
                different = sorted(part.keys() ^ first.keys())
                raise InvalidRowError(f"columns {different} are in some shards only")
            leaves.append(layout.flatten(part[name], _lead(part[name], axis + 1)))
        merged[name] = layout.unflatten(
            [np.concatenate(same, axis=axis) for same in zip(*leaves, strict=True)]
        )
    return merged


def _lead(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(next(iter_arrays(value)).shape[:axes])


def _ragged(parts: Sequence[Any]) -> bool:
    """Tells whether parts are episodes of one length each, but not of the same."""
    shapes = [next(iter_arrays(part["reward"])).shape for part in parts if "reward" in part]
    return any(len(shape) > 1 and shape[1] != shapes[0][1] for shape in shapes)


def _episodes(part: Any) -> list[Any]:
    if isinstance(part, list):
        return part
    count, length = _lead(part, 2)
    flat = {
        name: layout.unflatten(
            [leaf.reshape(count * length, *leaf.shape[2:]) for leaf in layout.flatten(value, lead)]
        )
        for name, value in part.items()
        for layout in [Layout.of_value(value, name, lead=2)]
        for lead in [_lead(value, 2)]
    }
    return split(flat, [length] * count)
