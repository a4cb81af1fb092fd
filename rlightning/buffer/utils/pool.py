"""Values that lie beside a column: as many as are needed, each under a number of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Leaf

Numbers = npt.NDArray[np.int32]

_FIRST_LENGTH = 16


class Pool:
    """Arrays of some leaves, by number; numbers that were freed are given out again.

    Args:
        leaves: What one value consists of.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self.clear()

    def clear(self) -> None:
        """Drops all values and their memory."""
        self._arrays = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._free: list[int] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Memory that it has allocated, in bytes."""
        return sum(array.nbytes for array in self._arrays)

    def put(self, arrays: Sequence[Array]) -> Numbers:
        """Copies values; returns their numbers.

        Args:
            arrays: One array [n, ...] per leaf.
        """
        count = len(arrays[0])
        again = min(count, len(self._free))
        reused = self._free[len(self._free) - again :]
        del self._free[len(self._free) - again :]
        fresh = range(self._used, self._used + count - again)
        self._used = fresh.stop
        numbers = np.array([*reused, *fresh], np.int32)
        self._grow(self._used)
        for mine, new in zip(self._arrays, arrays, strict=True):
            mine[numbers] = new
        return numbers

    def get(self, leaf: int, numbers: Numbers) -> Array:
        """Returns copies of one leaf of values, [n, ...]."""
        taken: Array = self._arrays[leaf][numbers]
        return taken

    def free(self, numbers: Numbers) -> None:
        """Forgets values."""
        self._free.extend(numbers.tolist())

    def _grow(self, length: int) -> None:
        have = len(self._arrays[0])
        if length <= have:
            return
        length = max(length, have + have // 2, _FIRST_LENGTH)
        for i, mine in enumerate(self._arrays):
            longer = np.empty((length, *mine.shape[1:]), mine.dtype)
            longer[:have] = mine
            self._arrays[i] = longer
