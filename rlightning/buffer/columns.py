"""What a group of rows keeps: its columns, and counts of what happened to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlightning.buffer.utils.frozen import before_write
from rlightning.buffer.utils.layout import Array, Layout


class Column:
    """One stored field: the arrays of its leaves, with the same leading axes."""

    __slots__ = ("arrays", "layout")

    def __init__(self, layout: Layout, lead: tuple[int, ...]) -> None:
        self.layout = layout
        self.arrays = layout.allocate(lead)

    def write(self, index: Any, arrays: Sequence[Array]) -> None:
        """Writes one array per leaf at an index of the leading axes."""
        before_write(self.arrays, index)
        if len(arrays) == 1:
            self.arrays[0][index] = arrays[0]
            return
        for mine, array in zip(self.arrays, arrays, strict=True):
            mine[index] = array

    def fill(self, index: Any, value: Any) -> None:
        """Writes one number, or one for each row, into a column of a single leaf."""
        before_write(self.arrays, index)
        self.arrays[0][index] = value

    def read(self, index: Any) -> list[Array]:
        """Returns one array per leaf at an index of the leading axes."""
        return [array[index] for array in self.arrays]

    def resize(self, length: int) -> None:
        """Makes the first axis longer."""
        for i, mine in enumerate(self.arrays):
            longer = np.zeros((length, *mine.shape[1:]), mine.dtype)
            longer[: len(mine)] = mine
            self.arrays[i] = longer


class Counters:
    """What happened to the rows of a group, or of several.

    Attributes:
        completed: Transitions completed.
        lost: Observations that were followed by nothing that they could be joined with.
        segments: Times that rows began anew although their episode had not ended.
        cut: Open episodes that were ended from outside.
        discarded: Transitions given up before anyone had them.
    """

    __slots__ = ("completed", "cut", "discarded", "lost", "segments")

    def __init__(self) -> None:
        self.completed = self.lost = self.segments = self.cut = self.discarded = 0

    def add(self, other: Counters) -> None:
        """Adds the counts of another."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}
