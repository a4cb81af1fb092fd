"""Episodes of several lengths as columns, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np

from rlightning.buffer.utils.layout import Layout, iter_arrays, map_arrays


def joined(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a read gave as columns, and what tells its parts apart.

    Episodes of several lengths, a list, are laid one after the other; `lengths` says how long each
    is.
    """
    if not isinstance(batch, list):
        return batch, {}
    layouts = {name: Layout.of_value(value, name, lead=1) for name, value in batch[0].items()}
    lengths = [len(next(iter_arrays(episode))) for episode in batch]
    columns = {}
    for name, layout in layouts.items():
        parts = [
            layout.flatten(episode[name], (length,))
            for episode, length in zip(batch, lengths, strict=True)
        ]
        columns[name] = layout.unflatten(
            [np.concatenate(same) for same in zip(*parts, strict=True)]
        )
    return columns, {"lengths": lengths}


def split(columns: Mapping[str, Any], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the episodes that `joined` laid one after the other; views."""
    parts = zip(accumulate(lengths, initial=0), accumulate(lengths), strict=False)
    slices = [slice(start, stop) for start, stop in parts]
    return [map_arrays(itemgetter(part), columns) for part in slices]
