"""Priorities of stored transitions: what is drawn more often, or stays longer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.sum_tree import SumTree
from rlightning.buffer.utils.watcher import Slots
from rlightning.errors import InvalidRowError


class Priorities:
    """Priorities of the rows of a container, whose `watcher` it has to be.

    New rows get the highest priority that any row had (Schaul et al., arXiv:1511.05952).

    Args:
        capacity: Slots of the container.
        alpha: The power of priorities that chances are proportional to.

    Attributes:
        tree: The chances by slot, up to a factor; 0 where nothing is.
    """

    def __init__(self, capacity: int, alpha: float = 1.0) -> None:
        self.alpha = alpha
        self.tree = SumTree(capacity)
        self._held = np.zeros(capacity, np.bool_)
        self._highest = 1.0

    @staticmethod
    def check(priorities: npt.NDArray[np.float64]) -> None:
        """Checks priorities.

        Raises:
            InvalidRowError: One is not finite, or negative.
        """
        if not np.isfinite(priorities).all() or (priorities < 0).any():
            raise InvalidRowError("priorities: expected finite numbers, none of them negative")

    def update(self, slots: Slots, priorities: npt.NDArray[np.float64]) -> None:
        """Sets priorities of rows, finite and not negative; of repeated ones the last counts.

        Raises:
            InvalidRowError: One is not; nothing was changed.
        """
        self.check(priorities)
        self._highest = max(self._highest, float(priorities.max(initial=0.0)))
        self.tree.set(slots, priorities**self.alpha)

    def update_sequences(
        self,
        container: DataContainer,
        begins: Slots,
        length: int,
        priorities: npt.NDArray[np.float64],
    ) -> None:
        """Sets priorities of all rows of sequences, but of those that others have overwritten.

        Args:
            container: What holds them.
            begins: The positions that they begin at, [n].
            length: How many rows each has.
            priorities: One for each, [n].
        """
        slots = container.following(begins, length)
        numbers = container.generation[slots]
        mine = numbers == numbers[:, :1] + np.arange(length)
        self.update(slots[mine], np.repeat(priorities, mine.sum(axis=1)))

    def wrote(self, slots: Slots) -> None:
        """Gives new rows the highest priority that any had."""
        self._held[slots] = True
        self.tree.set(slots, np.full(len(slots), self._highest**self.alpha))

    def released(self, slots: Slots) -> None:
        """Lets nothing be drawn from slots."""
        self._held[slots] = False
        self.tree.set(slots, np.zeros(len(slots)))

    def lowest(self, count: int) -> Slots:
        """Returns the slots of the rows of lowest priority."""
        held = np.flatnonzero(self._held)
        values = self.tree.values[held]
        if count >= len(held):
            return held
        return np.sort(held[np.argpartition(values, count)[:count]])
