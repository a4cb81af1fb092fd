"""When inserts and samples of a table wait for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlightning.utils.config import RateLimiterConfig


class RateLimiter:
    """Keeps the samples of a table in proportion to its inserts, as Reverb's limiters do.

    With `samples_per_insert`, `inserted * samples_per_insert - sampled` stays within `error_buffer`
    of its value when `min_size` were inserted and nothing was sampled; what is inserted at once,
    an episode at most, may pass the upper bound. A queue bounds what is in it instead. Everything
    is counted in transitions, or in episodes where that is the unit of the storage.

    Args:
        config: Its section of the configuration.

    Attributes:
        inserted: How many were stored so far.
        sampled: How many were handed out so far.
        min_size: How many must be there before one is sampled.
        queue_size: How many a queue holds before inserts wait; None if it is none.
    """

    def __init__(self, config: RateLimiterConfig) -> None:
        self.inserted = 0
        self.sampled = 0
        self.min_size = config.min_size
        self.queue_size = config.queue_size
        self._ratio = config.samples_per_insert
        self._least, self._most = -math.inf, math.inf
        if self._ratio is not None and config.error_buffer is not None:
            middle = self._ratio * self.min_size
            self._least, self._most = middle - config.error_buffer, middle + config.error_buffer

    @property
    def samples_per_insert(self) -> float | None:
        """How often each shall be sampled; None: as it happens."""
        return self._ratio

    @property
    def surplus(self) -> float:
        """How many samples the inserts so far allow that were not drawn; 0 without a ratio."""
        return 0.0 if self._ratio is None else self.inserted * self._ratio - self.sampled

    @property
    def most_at_once(self) -> float:
        """The largest batch that is served for certain, sooner or later; infinite without bounds.

        Inserts wait when there is no room for one more, and the batch must fit below that.
        """
        if self.queue_size is not None:
            return self.queue_size
        return math.inf if self._ratio is None else self._most - self._least - self._ratio

    def may_insert(self, size: int) -> bool:
        """Tells whether something may be inserted into a table of `size`."""
        if self.queue_size is not None:
            return size < self.queue_size
        return (
            size < self.min_size or self._ratio is None or self.surplus + self._ratio <= self._most
        )

    def may_sample(self, size: int, count: int) -> bool:
        """Tells whether `count` may be drawn from a table of `size`."""
        return size >= self.min_size and self.surplus - count >= self._least

    def state(self) -> dict[str, int]:
        """Returns what a limiter has to know after a restart, for `restore`."""
        return {"inserted": self.inserted, "sampled": self.sampled}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from where `state` was taken."""
        self.inserted, self.sampled = state["inserted"], state["sampled"]

    def describe(self, size: int) -> dict[str, Any]:
        """Returns counters and bounds by name, for people; those that do not apply are absent."""
        told: dict[str, Any] = {"inserted": self.inserted, "sampled": self.sampled, "size": size}
        if self.queue_size is not None:
            return {**told, "queue_size": self.queue_size}
        told["min_size"] = self.min_size
        if self._ratio is not None:
            told |= {
                "samples_per_insert": self._ratio,
                "surplus": self.surplus,
                "least_surplus": self._least,
                "most_surplus": self._most,
            }
        return told
