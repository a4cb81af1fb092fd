"""How many env steps a second."""

from __future__ import annotations

import threading
import time


class ThroughputTracker:
    """Events per second over windows of a few seconds, by name; safe to use from any thread.

    Args:
        log_interval_s: Length of a window at least.
    """

    def __init__(self, log_interval_s: float = 5.0) -> None:
        self.log_interval_s = log_interval_s
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[float, int]] = {}
        self._closed: dict[str, tuple[float, float]] = {}

    def record(self, name: str, count: int, step: int | None = None) -> None:
        """Counts events that are complete.

        Args:
            name: What they are.
            count: How many; none or fewer are ignored.
            step: Takes no part; documented.
        """
        if count <= 0:
            return
        now = time.monotonic()
        with self._lock:
            begin, total = self._windows.get(name, (now, 0))
            total += count
            if now - begin >= self.log_interval_s:
                self._closed[name] = (total / (now - begin), now)
                begin, total = now, 0
            self._windows[name] = (begin, total)

    def record_async(self, name: str, count: int, step: int | None = None) -> None:
        """Does the same as `record`, which never waits."""
        self.record(name, count, step)

    def get_stats(self) -> dict[str, float]:
        """Returns events per second of the last closed window by name; 0.0 after two idle ones."""
        now = time.monotonic()
        with self._lock:
            return {
                name: value if now - closed_at < 2 * self.log_interval_s else 0.0
                for name, (value, closed_at) in self._closed.items()
            }
