"""Arrays of sampled batches that nobody uses any more, for the next ones to be written into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

LEAST_BYTES = 2**18
"""From this size on it pays: smaller arrays are in memory that the process has anyway."""

_MOST_BATCHES = 2


class BatchMemory:
    """Keeps the arrays of a few batches, by the number of rows that were asked for.

    Writing into fresh memory costs more than writing into memory that was used before: the system
    has to clear every page of it first.

    Args:
        max_bytes: What they may take in memory, in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[int, list[Mapping[str, Any]]] = OrderedDict()

    def take(self, rows: int) -> Mapping[str, Any] | None:
        """Returns a batch of so many rows to be written anew; None if there is none."""
        batches = self._held.get(rows)
        if not batches:
            return None
        self._held.move_to_end(rows)
        return batches.pop()

    def give_back(self, rows: int, batch: Mapping[str, Any], nbytes: int) -> None:
        """Keeps a batch that nobody uses any more, or drops it where that would be too much."""
        batches = self._held.setdefault(rows, [])
        self._held.move_to_end(rows)
        if len(batches) < _MOST_BATCHES and nbytes * (len(batches) + 1) <= self._max_bytes:
            batches.append(batch)
        while len(self._held) > 1:  # one size at a time: learners rarely have two
            self._held.popitem(last=False)
