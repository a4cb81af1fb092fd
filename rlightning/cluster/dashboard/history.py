"""What the charts of a run show: its newest points each, older ones ever more sparse."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Point = Sequence[float | None]
"""One figure per chart column; None for what was not measured."""


class History:
    """Points in order of time, numbered from 1; memory is bounded however long a run is.

    Args:
        recent: How many of the newest are all kept.
        older: How many of those before at most: every second one is dropped when there are more,
            and from then on every second one of those to come.
    """

    def __init__(self, *, recent: int = 600, older: int = 600) -> None:
        self._recent: deque[tuple[int, Point]] = deque()
        self._recent_kept, self._older_kept = recent, older
        self._older: list[tuple[int, Point]] = []
        self._stride = 1
        self.last = 0

    def append(self, point: Point) -> None:
        """Adds the newest point."""
        self.last += 1
        self._recent.append((self.last, point))
        if len(self._recent) <= self._recent_kept:
            return
        number, point = self._recent.popleft()
        if (number - 1) % self._stride:
            return
        self._older.append((number, point))
        if len(self._older) > self._older_kept:
            self._stride *= 2
            self._older = self._older[::2]

    def since(self, number: int) -> list[Point]:
        """Returns the points after the one with a number, oldest first; 0: all that are kept."""
        newest = self.last - len(self._recent)  # the last one before the recent ones
        if number >= newest:
            return [point for _, point in list(self._recent)[number - newest :]]
        older = [point for at, point in self._older if at > number]
        return [*older, *(point for _, point in self._recent)]
