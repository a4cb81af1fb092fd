"""Which rows of a ring make up an episode, oldest first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]

_FIRST_LENGTH = 64


class EpisodeRegistry:
    """First slots and lengths of episodes; none of them wraps around the end of the ring.

    Attributes:
        total: Episodes added since the start.
    """

    def __init__(self) -> None:
        self.total = 0
        self._table = np.zeros((2, _FIRST_LENGTH), np.intp)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def starts(self) -> Slots:
        """First slot of each episode, oldest first; a view."""
        return self._table[0, self._first : self._end]

    @property
    def lengths(self) -> Slots:
        """Number of rows of each episode, oldest first; a view."""
        return self._table[1, self._first : self._end]

    def clear(self) -> None:
        """Forgets all episodes."""
        self._first = self._end = 0

    def append(self, start: int, lengths: Slots) -> None:
        """Adds episodes that lie one after the other from a slot on."""
        count = len(lengths)
        self.total += count
        if self._end + count > self._table.shape[1]:
            kept = self._table[:, self._first : self._end]
            table = np.zeros((2, max(2 * kept.shape[1], kept.shape[1] + count)), np.intp)
            table[:, : kept.shape[1]] = kept
            self._table, self._first, self._end = table, 0, kept.shape[1]
        self._table[0, self._end : self._end + count] = start + np.cumsum(lengths) - lengths
        self._table[1, self._end : self._end + count] = lengths
        self._end += count

    def drop_overlapping(self, start: int, stop: int) -> Slots:
        """Forgets the episodes that have rows in [start, stop); returns the slots of all theirs.

        The ring is written in order, so that these are the oldest ones.
        """
        starts, lengths = self.starts, self.lengths
        hit = np.flatnonzero((starts < stop) & (starts + lengths > start))
        count = int(hit[-1]) + 1 if len(hit) else 0
        slots = ranges(starts[:count], lengths[:count])
        self._first += count
        return slots

    def drop_at(self, start: int) -> Slots:
        """Forgets the episode that begins at a slot; returns its slots, none if there is none."""
        hit = np.flatnonzero(self.starts == start)
        if not len(hit):
            return np.zeros(0, np.intp)
        slots = ranges(self.starts[hit], self.lengths[hit])
        kept = np.delete(self._table[:, self._first : self._end], hit, axis=1)
        self._end -= 1
        self._table[:, self._first : self._end] = kept
        return slots


def ranges(starts: Slots, lengths: Slots) -> Slots:
    """Returns [s, s + 1, ..., s + n - 1] of each start s and length n, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + lengths, lengths) + np.arange(total)
