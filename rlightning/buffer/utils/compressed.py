"""A column whose rows are compressed one by one, so that any of them can be read alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Leaf

Codec = Literal["zlib"]

# The level that costs least: higher ones gain a few percent on images for several times the work.
_ZLIB_LEVEL = 1
_BLOB_BYTES = 33 + 8  # of a bytes object beside what it holds, and of the reference to it


class CompressedRows:
    """Rows [capacity, *shape] of one leaf, each compressed without loss.

    Stands where an array stands: it is assigned to by slots and read with `take`.

    Args:
        capacity: Number of rows.
        leaf: What one row looks like.
    """

    def __init__(self, capacity: int, leaf: Leaf) -> None:
        self._leaf = leaf
        self._rows: list[bytes | None] = [None] * capacity
        self._held_bytes = 0

    @property
    def nbytes(self) -> int:
        """Memory of the rows, in bytes."""
        return self._held_bytes + 8 * len(self._rows)

    @property
    def held_bytes(self) -> int:
        """That part of it which grows with what comes, in bytes."""
        return self._held_bytes

    def __setitem__(self, where: slice | npt.NDArray[np.intp], arrays: Array) -> None:
        """Compresses rows into slots."""
        slots = range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
        rows = self._rows
        for slot, array in zip(slots, arrays, strict=True):
            blob = zlib.compress(np.ascontiguousarray(array).view(np.ndarray).data, _ZLIB_LEVEL)
            before = rows[slot]
            self._held_bytes += len(blob) - (len(before) if before is not None else -_BLOB_BYTES)
            rows[slot] = blob

    def restore(self, slot: int, blob: bytes) -> None:
        """Puts a compressed row of before into an empty slot."""
        self._held_bytes += len(blob) + _BLOB_BYTES
        self._rows[slot] = blob

    def take(
        self,
        slots: Sequence[int] | npt.NDArray[np.intp],
        axis: int = 0,
        out: Array | None = None,
        mode: str = "wrap",
    ) -> Array:
        """Returns rows [n, *shape] by slot, which counts around the end."""
        leaf, rows = self._leaf, self._rows
        slots = np.asarray(slots) % len(rows)
        if out is None:
            out = np.empty((len(slots), *leaf.shape), leaf.dtype)
        known: dict[int, int] = {}  # a batch often holds a row more than once
        for i, slot in enumerate(slots.tolist()):
            if slot in known:
                out[i] = out[known[slot]]
                continue
            blob = rows[slot]
            if blob is None:
                out[i] = 0
            else:
                out[i] = np.frombuffer(zlib.decompress(blob), leaf.dtype).reshape(leaf.shape)
            known[slot] = i
        return out
