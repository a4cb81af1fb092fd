"""Histograms of durations in fixed memory."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

# 16 steps per power of two: a percentile is off by at most 1/32 of its value.
_STEPS = 16
_FIRST_EXPONENT = -29  # 2**-30 s, about a nanosecond
_LAST_EXPONENT = 14  # 2**14 s, about four and a half hours
_BUCKETS = (_LAST_EXPONENT - _FIRST_EXPONENT + 1) * _STEPS

# fmt: off
EDGES_S = (
    0.0, 1e-5, 5e-5, 1e-4, 3e-4, 6e-4, 8e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3, 0.01, 0.013,
    0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.65, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)
# fmt: on
"""Upper edges of the buckets that metrics have: those of gRFC A66, in seconds."""

_EDGES = np.array(EDGES_S)
# One thread may record while another one reads.
_SETTLING = threading.Lock()


class Histogram:
    """Durations in buckets of constant relative width.

    Not thread-safe: record from one thread, or keep one histogram per thread and merge them.
    """

    __slots__ = ("_buckets", "count", "max", "min", "total")

    def __init__(self) -> None:
        self._buckets = np.zeros(_BUCKETS, np.int64)
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = 0.0

    def record(self, seconds: float) -> None:
        """Adds one duration.

        Raises:
            ValueError: It is negative or not a number.
        """
        _check(seconds)
        self._add(np.array([seconds]))

    def merge(self, other: Histogram) -> None:
        """Adds every duration of another histogram."""
        self._buckets += other._buckets
        self.count += other.count
        self.total += other.total
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def clear(self) -> None:
        """Forgets everything."""
        self._buckets[:] = 0
        self.count, self.total, self.min, self.max = 0, 0.0, math.inf, 0.0

    @property
    def mean(self) -> float:
        """Mean in seconds; NaN without a record."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Returns the duration in seconds that a share `q` of the records does not exceed.

        Exact to 1/32 of the value; NaN without a record.
        """
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(q * self.count))
        index = int(np.searchsorted(np.cumsum(self._buckets), rank))
        exponent, step = divmod(index, _STEPS)
        middle = math.ldexp(0.5 + (step + 0.5) / (2 * _STEPS), exponent + _FIRST_EXPONENT)
        # Bucket middles may lie outside of what was recorded.
        return min(max(middle, self.min), self.max)

    @property
    def p50(self) -> float:
        """Median in seconds."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """90th percentile in seconds."""
        return self.quantile(0.9)

    @property
    def p99(self) -> float:
        """99th percentile in seconds."""
        return self.quantile(0.99)

    def summary(self) -> dict[str, float]:
        """Returns {count, mean, p50, p90, p99, max}, in seconds but for the count.

        Without a record only {count: 0}.
        """
        if not self.count:
            return {"count": 0}
        return {
            "count": self.count,
            "mean": self.mean,
            "p50": self.p50,
            "p90": self.p90,
            "p99": self.p99,
            "max": self.max,
        }

    def _add(self, values: npt.NDArray[np.float64]) -> None:
        fractions, exponents = np.frexp(values)
        steps = ((fractions - 0.5) * (2 * _STEPS)).astype(np.intp)
        indices = (exponents - _FIRST_EXPONENT) * _STEPS + steps
        indices[fractions == 0.0] = 0
        np.clip(indices, 0, _BUCKETS - 1, out=indices)
        np.add.at(self._buckets, indices, 1)
        self.count += values.size
        self.total += float(values.sum())
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))


class SlidingHistogram:
    """Durations of the last minute, and counts of all of them for metrics.

    What is recorded is gathered and sorted into buckets many at a time, so that a record costs a
    fraction of a microsecond. Memory is fixed: six histograms of ten seconds each. One thread may
    record while others read.

    Args:
        enabled: False records nothing.

    Attributes:
        count: Durations so far.
        total: Their sum in seconds.
    """

    WINDOW_S = 60.0
    """What `summary` covers, in seconds; up to a sixth less."""

    _SLOTS = 6
    _SLOT_S = WINDOW_S / _SLOTS
    _GATHERED = 256

    __slots__ = (
        "_classic",
        "_enabled",
        "_new",
        "_number",
        "_settled",
        "_settled_s",
        "_slot_end",
        "_slots",
        "_uncertainties",
    )

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._new: list[float] = []
        self._settled = 0
        self._settled_s = 0.0
        self._classic = np.zeros(len(EDGES_S) + 1, np.int64)
        self._slots: list[Histogram] = []
        self._uncertainties = [0.0] * self._SLOTS
        self._number = 0
        self._slot_end = 0.0

    def record(self, seconds: float, uncertainty_s: float = 0.0) -> None:
        """Adds one duration.

        Args:
            seconds: The duration.
            uncertainty_s: How far it may be off, in seconds; 0 for what one clock measured.

        Raises:
            ValueError: It is negative or not a number.
        """
        if not self._enabled:
            return
        self.record_at(time.monotonic(), seconds)
        if uncertainty_s:
            index = self._number % self._SLOTS
            if uncertainty_s > self._uncertainties[index]:
                self._uncertainties[index] = uncertainty_s

    def record_at(self, now: float, seconds: float) -> None:
        """Adds one duration at a moment, by `time.monotonic`, also where nothing is enabled."""
        if not seconds >= 0:
            _check(seconds)
        if now >= self._slot_end or len(self._new) >= self._GATHERED:
            self._settle(now)
        self._new.append(seconds)

    def merge(self, other: SlidingHistogram) -> None:
        """Adds every duration of another one of this process, each in its time."""
        now = time.monotonic()
        other._settle(now)
        self._settle(now)
        for index, slot in enumerate(other._slots):
            self._slots[index].merge(slot)
            self._uncertainties[index] = max(
                self._uncertainties[index], other._uncertainties[index]
            )
        self._classic += other._classic
        self._settled += other._settled
        self._settled_s += other._settled_s

    @property
    def count(self) -> int:
        """Durations so far."""
        return self._settled + len(self._new)

    @property
    def total(self) -> float:
        """Sum of all durations so far, in seconds."""
        return self._settled_s + sum(self._new)

    def window(self) -> Histogram:
        """Returns the durations of the last minute."""
        self._settle(time.monotonic())
        found = Histogram()
        for slot in self._slots:
            found.merge(slot)
        return found

    def summary(self) -> dict[str, float]:
        """Returns `Histogram.summary` of the last minute.

        With `uncertainty` beside it, the greatest in seconds, where durations had one.
        """
        found = self.window().summary()
        uncertainty = max(self._uncertainties)
        if uncertainty and found["count"]:
            found["uncertainty"] = uncertainty
        return found

    def classic(self) -> tuple[list[int], int, float]:
        """Returns what metrics show of all durations so far.

        Returns:
            How many are at most each of `EDGES_S`, how many there are, and their sum in seconds.
        """
        self._settle(time.monotonic())
        return np.cumsum(self._classic)[:-1].tolist(), self._settled, self._settled_s

    def _settle(self, now: float) -> None:
        """Sorts in what was gathered, and turns to the slot of now."""
        with _SETTLING:
            self._settle_alone(now)

    def _settle_alone(self, now: float) -> None:
        if not self._slots:
            self._slots = [Histogram() for _ in range(self._SLOTS)]
        if self._new:
            new, self._new = self._new, []
            values = np.array(new)
            self._slots[self._number % self._SLOTS]._add(values)
            np.add.at(self._classic, np.searchsorted(_EDGES, values), 1)
            self._settled += values.size
            self._settled_s += float(values.sum())
        if now >= self._slot_end:
            number = int(now / self._SLOT_S)
            for passed in range(max(self._number + 1, number - self._SLOTS + 1), number + 1):
                self._slots[passed % self._SLOTS].clear()
                self._uncertainties[passed % self._SLOTS] = 0.0
            self._number = number
            self._slot_end = (number + 1) * self._SLOT_S


class Counts:
    """How many of a kind of small numbers there were, such as rows of batches, for metrics.

    Args:
        edges: Upper edges of the buckets, ascending.
    """

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0

    def record(self, value: float, count: int = 1) -> None:
        """Adds a number, `count` times."""
        self._counts[bisect_left(self._edges, value)] += count
        self._total += value * count

    @property
    def edges(self) -> tuple[float, ...]:
        """Upper edges of the buckets."""
        return self._edges

    def classic(self) -> tuple[list[int], int, float]:
        """Returns how many are at most each edge, how many there are, and their sum."""
        cumulative: list[int] = np.cumsum(self._counts).tolist()
        return cumulative[:-1], cumulative[-1], self._total


def _check(seconds: Any) -> None:
    if not seconds >= 0:
        raise ValueError(f"a duration cannot be {seconds} s")
