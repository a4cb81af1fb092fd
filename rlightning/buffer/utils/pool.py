"""Values that lie beside a column: as many as are needed, each under a number of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.frozen import before_write
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
        kept = max(0, len(self._free) - count)
        chosen = self._free[kept:]
        del self._free[kept:]
        if len(chosen) < count:
            fresh = range(self._used, self._used + count - len(chosen))
            chosen += fresh
            self._used = fresh.stop
            self._grow(self._used)
        numbers = np.array(chosen, np.int32)
        where = slice(chosen[0], chosen[0] + 1) if count == 1 else numbers
        before_write(self._arrays, where)
        for mine, new in zip(self._arrays, arrays, strict=True):
            mine[where] = new
        return numbers

    def put_one(self, arrays: Sequence[Array]) -> int:
        """Copies one value; returns its number.

        Args:
            arrays: One array [...] per leaf.
        """
        if self._free:
            number = self._free.pop()
        else:
            number = self._used
            self._used += 1
            self._grow(self._used)
        before_write(self._arrays, number)
        for leaf, new in enumerate(arrays):
            self._arrays[leaf][number] = new
        return number

    def get(self, leaf: int, numbers: Numbers) -> Array:
        """Returns copies of one leaf of values, [n, ...]."""
        return self._arrays[leaf].take(numbers, axis=0)

    def array(self, leaf: int) -> Array:
        """Returns where one leaf of all values lies, also of those that were freed."""
        return self._arrays[leaf]

    def free_one(self, number: int) -> None:
        """Forgets one value."""
        self._free.append(number)

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
