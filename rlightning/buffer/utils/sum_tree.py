"""A tree of sums: numbers by slot, found again by a running total."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]


class SumTree:
    """Numbers of which each is found with a chance proportional to it.

    Node i has the children 2i and 2i + 1, and holds their sum; the numbers are the leaves. Sums are
    made anew from the children at every change, so that no rounding adds up.

    Args:
        capacity: How many numbers; all are 0 at first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._leaves = 1 << max(capacity - 1, 0).bit_length()
        self._tree = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self._tree[1])

    @property
    def values(self) -> Numbers:
        """The numbers, [capacity]; a view."""
        return self._tree[self._leaves : self._leaves + self._capacity]

    def set(self, slots: Slots, values: Numbers) -> None:
        """Sets numbers; where a slot comes twice, the last counts."""
        if not len(slots):
            return
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and (slots[1:] > slots[:-1]).all():
            self._set_run(first + self._leaves, last + self._leaves, values)
            return
        nodes = slots + self._leaves
        self._tree[nodes] = values
        while nodes[0] > 1:
            nodes = nodes >> 1
            if len(nodes) > 8:  # below, sorting takes longer than summing twice
                nodes = np.unique(nodes)
            self._tree[nodes] = self._tree[2 * nodes] + self._tree[2 * nodes + 1]

    def _set_run(self, first: int, last: int, values: Numbers) -> None:
        """Sets neighbouring leaves: at every level their parents are neighbours too."""
        self._tree[first : last + 1] = values
        while first > 1:
            children = self._tree[first & ~1 : (last | 1) + 1]
            first, last = first >> 1, last >> 1
            np.add(children[::2], children[1::2], out=self._tree[first : last + 1])

    def find(self, sums: Numbers) -> Slots:
        """Returns for each sum the slot where the running total of the numbers exceeds it.

        Args:
            sums: Not negative, below `total`.
        """
        nodes, rest = np.ones(len(sums), np.intp), sums.copy()
        while nodes.size and nodes[0] < self._leaves:
            nodes = 2 * nodes
            left = self._tree[nodes]
            # Rounding must not lead to where nothing is.
            right = (rest >= left) & (self._tree[nodes + 1] > 0)
            rest -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._leaves
