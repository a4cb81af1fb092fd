"""Batches as they travel: episodes of several lengths as columns, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np

from rlightning.buffer.utils.layout import Layout, iter_arrays, map_arrays
from rlightning.wire import Batch, Limits, batch_pieces, decode_batch

# A string, of which a column of text has one for each transition, takes so many bytes at least.
_LEAST_VALUE_BYTES = 4
_ALL_ROWS = Limits(max_leaves=2**31 - 1)  # whose memory their table has counted


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


def pieces_of(batch: Batch) -> list[Any]:
    """Returns an encoded batch of any number of rows in pieces, for `read_batch`."""
    return batch_pieces(batch, _ALL_ROWS)


def read_batch(data: Any, max_bytes: int) -> Batch:
    """Returns an encoded batch of any number of rows: it may hold as many values as fit in it.

    Args:
        data: The encoded batch.
        max_bytes: How large it may be.

    Raises:
        CodecError: It cannot be read.
    """
    most = max(Limits.max_leaves, len(data) // _LEAST_VALUE_BYTES)
    return decode_batch(data, Limits(max_bytes=max_bytes, max_leaves=most))


def split(columns: Mapping[str, Any], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the episodes that `joined` laid one after the other; views."""
    parts = zip(accumulate(lengths, initial=0), accumulate(lengths), strict=False)
    slices = [slice(start, stop) for start, stop in parts]
    return [map_arrays(itemgetter(part), columns) for part in slices]
