"""Clocks of other processes, durations, and histograms of both.

Durations come from the monotonic clock of one process. A one-way latency needs the offset between
two clocks, which is estimated from four stamps per exchange and always comes with its uncertainty.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

CLOCK_ID = uuid.uuid4().hex
"""Names the monotonic clock of this process; new at every start."""

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_NAMESPACE_FILE = Path("/proc/self/timens_offsets")

_BUCKET_NS = 10**9
_DRIFT_PPM = 200


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Returns an id that equals another process's id only if both read one monotonic clock.

    Empty where the system names no boot; containers of one machine share the id unless they live in
    a time namespace of their own.
    """
    try:
        boot = _BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""
    try:
        offsets = _CLOCK_NAMESPACE_FILE.read_text().split()
    except OSError:
        return boot
    shifted = [word for word in offsets if word.lstrip("-").isdigit() and int(word)]
    return "/".join([boot, *shifted])


class ClockOffset:
    """The monotonic clock of a peer against that of this process.

    Of the exchanges of the last `window_s` seconds, the one with the smallest round trip bounds the
    offset best: its error is at most half its round trip, plus what the clocks drift apart since
    (200 ppm are assumed). Memory is fixed: one exchange is kept per second.

    Use from one thread.
    """

    def __init__(self, *, window_s: float = 20.0, limit_s: float = 1.0) -> None:
        """Starts without a sample.

        Args:
            window_s: How long an exchange is believed, in seconds.
            limit_s: Above this uncertainty, in seconds, the offset counts as unknown.
        """
        self._window_ns = int(window_s * 1e9)
        self._limit_ns = int(limit_s * 1e9)
        self._buckets: deque[_Exchange] = deque(maxlen=max(1, math.ceil(window_s)) + 1)
        self._clock_id = ""
        self._same_clock = False

    @property
    def same_clock(self) -> bool:
        """Whether both processes read one clock."""
        return self._same_clock

    def set_peer(self, clock_id: str, *, same_clock: bool = False) -> None:
        """Names the peer's clock; another name than before forgets every exchange.

        Args:
            clock_id: The peer's `CLOCK_ID`.
            same_clock: Both processes read one clock: the offset is 0, with no uncertainty.
        """
        if clock_id != self._clock_id:
            self._buckets.clear()
            self._clock_id = clock_id
        self._same_clock = same_clock

    @property
    def clock_id(self) -> str:
        """Name of the peer's clock; empty before `set_peer`."""
        return self._clock_id

    def update(self, t1: int, t2: int, t3: int, t4: int) -> None:
        """Adds one exchange.

        Args:
            t1: When the request was sent, in nanoseconds of this clock.
            t2: When the peer had received it, in nanoseconds of the peer's clock.
            t3: When the peer sent the answer, in nanoseconds of the peer's clock.
            t4: When the answer was here, in nanoseconds of this clock.
        """
        round_trip = (t4 - t1) - (t3 - t2)
        if round_trip < 0 or t4 < t1:
            return  # no pair of steady clocks gives such stamps
        new = _Exchange(((t2 - t1) + (t3 - t4)) // 2, (round_trip + 1) // 2, t4)
        buckets = self._buckets
        if not buckets:
            buckets.append(new)
            return
        last = buckets[-1]
        if abs(new.offset_ns - last.offset_ns) > new.bound(t4) + last.bound(t4):
            # Both intervals cannot hold the true offset: a clock was paused or set in between.
            buckets.clear()
            buckets.append(new)
        elif t4 // _BUCKET_NS != last.at_ns // _BUCKET_NS:
            buckets.append(new)
        elif new.half_trip_ns <= last.bound(t4):
            buckets[-1] = new

    def estimate(self, now_ns: int | None = None) -> tuple[int, int] | None:
        """Returns (offset, uncertainty) in nanoseconds, or None while the offset is unknown.

        The offset is the peer's clock minus this one; the true one lies within the uncertainty.
        """
        if self._same_clock:
            return 0, 0
        now = time.monotonic_ns() if now_ns is None else now_ns
        best: tuple[int, int] | None = None
        for exchange in self._buckets:
            bound = exchange.bound(now)
            if now - exchange.at_ns <= self._window_ns and (best is None or bound < best[1]):
                best = exchange.offset_ns, bound
        if best is None or best[1] > self._limit_ns:
            return None
        return best

    @property
    def offset_ns(self) -> int | None:
        """The peer's clock minus this one, in nanoseconds; None while unknown."""
        estimate = self.estimate()
        return None if estimate is None else estimate[0]

    @property
    def uncertainty_ns(self) -> int | None:
        """How far `offset_ns` may be off, in nanoseconds; None while unknown."""
        estimate = self.estimate()
        return None if estimate is None else estimate[1]

    def uplink(self, sent_ns: int, received_ns: int) -> tuple[float, float] | None:
        """Returns the time of one message to the peer as (seconds, uncertainty in seconds).

        Args:
            sent_ns: When it was sent, by this clock.
            received_ns: When the peer had it, by the peer's clock.

        Returns:
            None while the offset is unknown, and where the figure is below its own uncertainty and
            so may have any sign.
        """
        return self._one_way(received_ns - sent_ns, -1, now_ns=None)

    def downlink(self, sent_ns: int, received_ns: int) -> tuple[float, float] | None:
        """Returns the time of one message from the peer as (seconds, uncertainty in seconds).

        Args:
            sent_ns: When the peer sent it, by the peer's clock.
            received_ns: When it was here, by this clock.

        Returns:
            As `uplink`.
        """
        return self._one_way(received_ns - sent_ns, 1, now_ns=received_ns)

    def _one_way(
        self, apparent_ns: int, sign: int, now_ns: int | None
    ) -> tuple[float, float] | None:
        estimate = self.estimate(now_ns)
        if estimate is None:
            return None
        offset, uncertainty = estimate
        latency = apparent_ns + sign * offset
        if latency < uncertainty:
            return None
        return latency / 1e9, uncertainty / 1e9


class _Exchange:
    """What one exchange says about the offset."""

    __slots__ = ("at_ns", "half_trip_ns", "offset_ns")

    def __init__(self, offset_ns: int, half_trip_ns: int, at_ns: int) -> None:
        self.offset_ns = offset_ns
        self.half_trip_ns = half_trip_ns
        self.at_ns = at_ns

    def bound(self, now_ns: int) -> int:
        """How far the true offset can be from this one at `now_ns`, in nanoseconds."""
        return self.half_trip_ns + max(0, now_ns - self.at_ns) * _DRIFT_PPM // 10**6


# 16 steps per power of two: a percentile is off by at most 1/32 of its value.
_STEPS = 16
_FIRST_EXPONENT = -29  # 2**-30 s, about a nanosecond
_LAST_EXPONENT = 14  # 2**14 s, about four and a half hours
_BUCKETS = (_LAST_EXPONENT - _FIRST_EXPONENT + 1) * _STEPS


class Histogram:
    """Durations in buckets of constant relative width; fixed memory, no allocation per record.

    Not thread-safe: record from one thread, or keep one histogram per thread and merge them.
    """

    __slots__ = ("_buckets", "count", "max", "min", "total")

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKETS
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = 0.0

    def record(self, seconds: float) -> None:
        """Adds one duration.

        Raises:
            ValueError: It is negative or not a number.
        """
        if not seconds >= 0:
            raise ValueError(f"a duration cannot be {seconds} s")
        fraction, exponent = math.frexp(seconds)
        index = (exponent - _FIRST_EXPONENT) * _STEPS + int((fraction - 0.5) * 2 * _STEPS)
        if fraction == 0.0 or not 0 <= index < _BUCKETS:
            index = 0 if fraction == 0.0 or index < 0 else _BUCKETS - 1
        self._buckets[index] += 1
        self.count += 1
        self.total += seconds
        if seconds < self.min:
            self.min = seconds
        if seconds > self.max:
            self.max = seconds

    def merge(self, other: Histogram) -> None:
        """Adds every duration of another histogram."""
        for index, count in enumerate(other._buckets):
            self._buckets[index] += count
        self.count += other.count
        self.total += other.total
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

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
        seen = 0
        for index, count in enumerate(self._buckets):
            seen += count
            if seen >= rank:
                exponent, step = divmod(index, _STEPS)
                middle = math.ldexp(0.5 + (step + 0.5) / (2 * _STEPS), exponent + _FIRST_EXPONENT)
                # Bucket middles may lie outside of what was recorded.
                return min(max(middle, self.min), self.max)
        return self.max

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


class LatencyStats(dict[str, Histogram]):
    """Histograms by name; a name is made by its first use. Not thread-safe, like `Histogram`."""

    def __missing__(self, name: str) -> Histogram:
        histogram = self[name] = Histogram()
        return histogram

    def record(self, name: str, seconds: float) -> None:
        """Adds one duration under `name`."""
        self[name].record(seconds)

    def merge(self, others: Mapping[str, Histogram]) -> None:
        """Adds every duration of other histograms, name by name."""
        for name, histogram in others.items():
            self[name].merge(histogram)

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns `Histogram.summary` by name."""
        return {name: histogram.summary() for name, histogram in self.items()}
