"""What readers of the page are sent: how the cluster fares, and the points they have not seen."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlightning.cluster.dashboard.history import History, Point

_UNSEEN = 0


class Feed:
    """Takes one state of the cluster at a time and makes events of it. Belongs to one event loop.

    A reader gets the newest state, and all points that it has not seen: one who comes late, comes
    back, or reads slowly, gets several at once.

    Args:
        columns: Name of each figure of a point.

    Attributes:
        ended: Whether there is nothing more to come.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.ended = False
        self._columns = list(columns)
        self._history = History()
        self._state: Mapping[str, Any] = {}
        # Numbers of points mean nothing to another process.
        self._id = secrets.token_hex(4)
        self._news = asyncio.Event()
        self._made: dict[int, bytes] = {}

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._history.last

    def publish(self, state: Mapping[str, Any], point: Point) -> None:
        """Makes this the newest state and point.

        Args:
            state: Plain data, as `page/app.js` reads it.
            point: One figure per column.
        """
        if len(point) != len(self._columns):
            raise ValueError(f"expected {len(self._columns)} figures, got {len(point)}")
        self._state = state
        self._history.append(point)
        self._made.clear()
        self._tell()

    def end(self) -> None:
        """Lets readers go once they have the newest event."""
        self.ended = True
        self._tell()

    async def newer(self, seen: int) -> None:
        """Waits until there is an event after the one that was seen, or the end."""
        while self.last <= seen and not self.ended:
            await self._news.wait()

    def resume(self, last_event_id: str) -> int:
        """Returns the event that a reader saw last; 0 for one who comes anew, or from elsewhere."""
        feed, _, number = last_event_id.partition("-")
        # `isdecimal` alone would take any number of digits of any script.
        known = feed == self._id and number.isascii() and number.isdecimal() and len(number) < 16
        return min(int(number), self.last) if known else _UNSEEN

    def event(self, seen: int) -> bytes:
        """Returns the newest event for who has seen those up to `seen`, as it is sent."""
        if seen not in self._made:
            data: dict[str, Any] = {
                "state": self._state,
                "fresh": seen == _UNSEEN,
                "columns": self._columns,
                "points": self._history.since(seen),
            }
            text = json.dumps(data, separators=(",", ":"), allow_nan=False)
            self._made[seen] = f"id: {self._id}-{self.last}\ndata: {text}\n\n".encode()
        return self._made[seen]

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
