"""Histograms of durations in fixed memory."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
SETTLING = threading.Lock()
"""Held while what was gathered is sorted in: one thread may record while another one reads."""


class Column(NamedTuple):
    """Durations of one name, sorted.

    Attributes:
        buckets: How many are in each bucket of a `Histogram`.
        metrics: How many are at most each of `EDGES_S` and above the one before; then all above.
        number: How many there are.
        total: Their sum in seconds.
        least: The shortest in seconds; infinite without any.
        greatest: The longest in seconds; 0 without any.
    """

    buckets: npt.NDArray[np.int64]
    metrics: npt.NDArray[np.int64]
    number: int
    total: float
    least: float
    greatest: float


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
        self.take(sort_columns(np.array([[seconds]]))[0])

    def take(self, column: Column) -> None:
        """Adds durations that were sorted before."""
        self._buckets += column.buckets
        self.count += column.number
        self.total += column.total
        self.min = min(self.min, column.least)
        self.max = max(self.max, column.greatest)

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
        return self._quantiles(q)[0]

    def _quantiles(self, *shares: float) -> list[float]:
        if not self.count:
            return [math.nan] * len(shares)
        ranks = [max(1, math.ceil(share * self.count)) for share in shares]
        indices: list[int] = np.searchsorted(np.cumsum(self._buckets), ranks).tolist()
        middles = (
            math.ldexp(0.5 + (step + 0.5) / (2 * _STEPS), exponent + _FIRST_EXPONENT)
            for exponent, step in (divmod(index, _STEPS) for index in indices)
        )
        # Bucket middles may lie outside of what was recorded.
        return [min(max(middle, self.min), self.max) for middle in middles]

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
        p50, p90, p99 = self._quantiles(0.5, 0.9, 0.99)
        figures = {"mean": self.mean, "p50": p50, "p90": p90, "p99": p99, "max": self.max}
        return {"count": self.count, **figures}


class SlidingHistogram:
    """Durations of the last minute, and counts of all of them for metrics.

    What is recorded is gathered and sorted into buckets many at a time, so that a record costs a
    fraction of a microsecond. Memory is fixed: six histograms of ten seconds each. One thread may
    record while others read.

    Args:
        enabled: False records nothing.
        feed: Called before anything is read: brings in what is gathered elsewhere.

    Attributes:
        count: Durations so far.
        total: Their sum in seconds.
    """

    WINDOW_S = 60.0
    """What `summary` covers, in seconds; up to a sixth less."""

    _SLOTS = 6
    SLOT_S = WINDOW_S / _SLOTS
    _GATHERED = 256

    __slots__ = (
        "_classic",
        "_enabled",
        "_feed",
        "_new",
        "_number",
        "_settled",
        "_settled_s",
        "_slot_end",
        "_slots",
        "_uncertainties",
    )

    def __init__(self, *, enabled: bool = True, feed: Callable[[], None] | None = None) -> None:
        self._enabled = enabled
        self._feed = feed
        self._new: list[float] = []
        self._settled = 0
        self._settled_s = 0.0
        self._classic = np.zeros(len(EDGES_S) + 1, np.int64)
        self._slots: list[Histogram] = []
        self._uncertainties = [0.0] * self._SLOTS
        self._number = -1
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
        if not seconds >= 0:
            _check(seconds)
        now = time.monotonic()
        if now >= self._slot_end or len(self._new) >= self._GATHERED:
            with SETTLING:
                self._settle_own(now)
        self._new.append(seconds)
        if uncertainty_s:
            index = self._number % self._SLOTS
            if uncertainty_s > self._uncertainties[index]:
                self._uncertainties[index] = uncertainty_s

    def record_many(self, values: npt.NDArray[Any]) -> None:
        """Adds many at once; what is negative or not a number is left out.

        Args:
            values: [n]; not changed.
        """
        if self._enabled and values.size:
            now = time.monotonic()
            with SETTLING:
                self._settle_own(now)
                self.take(sort_columns(values[None].astype(np.float64))[0], self._number)

    def take(self, column: Column, number: int, uncertainty_s: float = 0.0) -> None:
        """Adds durations that were sorted elsewhere; call while `SETTLING` is held.

        Args:
            column: The durations.
            number: In which slot, of `SLOT_S` seconds each by `time.monotonic`, they were recorded.
            uncertainty_s: How far they may be off at the most, in seconds.
        """
        self._turn_to(number)
        self._classic += column.metrics
        self._settled += column.number
        self._settled_s += column.total
        if number > self._number - self._SLOTS:  # else the last minute is over for them
            index = number % self._SLOTS
            self._slots[index].take(column)
            self._uncertainties[index] = max(self._uncertainties[index], uncertainty_s)

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
        self._settle(time.monotonic())
        return self._settled

    @property
    def total(self) -> float:
        """Sum of all durations so far, in seconds."""
        self._settle(time.monotonic())
        return self._settled_s

    def window(self) -> Histogram:
        """Returns the durations of the last minute."""
        self._settle(time.monotonic())
        found = Histogram()
        for slot in self._slots:
            if slot.count:
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
        """Sorts in all that was gathered, and turns to the slot of now."""
        with SETTLING:
            if self._feed is not None:
                self._feed()
            self._settle_own(now)

    def _settle_own(self, now: float) -> None:
        if self._new:
            new, self._new = self._new, []
            self.take(sort_columns(np.array([new]))[0], self._number)
        self._turn_to(int(now / self.SLOT_S))

    def _turn_to(self, number: int) -> None:
        if not self._slots:
            self._slots = [Histogram() for _ in range(self._SLOTS)]
        if number > self._number:
            for passed in range(max(self._number + 1, number - self._SLOTS + 1), number + 1):
                self._slots[passed % self._SLOTS].clear()
                self._uncertainties[passed % self._SLOTS] = 0.0
            self._number = number
            self._slot_end = (number + 1) * self.SLOT_S


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


def sort_columns(columns: npt.NDArray[np.float64]) -> Sequence[Column]:
    """Sorts durations of several names at once, for much less than each name alone would cost.

    Args:
        columns: Durations in seconds, [names, durations]; NaN for one that is not known. Changed.

    Returns:
        The known ones of each name.
    """
    names = len(columns)
    known = columns >= 0
    of_name, values = np.nonzero(known)[0], columns[known]
    fractions, exponents = np.frexp(values)
    buckets = ((fractions - 0.5) * (2 * _STEPS)).astype(np.intp)
    buckets += (exponents - _FIRST_EXPONENT) * _STEPS
    buckets[fractions == 0.0] = 0
    np.clip(buckets, 0, _BUCKETS - 1, out=buckets)
    found = np.bincount(of_name * _BUCKETS + buckets, minlength=names * _BUCKETS)
    edges = len(EDGES_S) + 1
    metrics = np.bincount(
        of_name * edges + np.searchsorted(_EDGES, values), minlength=names * edges
    )
    columns[~known] = 0.0
    return list(
        map(
            Column,
            found.reshape(names, _BUCKETS),
            metrics.reshape(names, edges),
            known.sum(axis=1).tolist(),
            columns.sum(axis=1).tolist(),
            np.where(known, columns, math.inf).min(axis=1, initial=math.inf).tolist(),
            columns.max(axis=1, initial=0.0).tolist(),
        )
    )


def _check(seconds: Any) -> None:
    if not seconds >= 0:
        raise ValueError(f"a duration cannot be {seconds} s")
