"""The monotonic clocks of other processes against that of this one."""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from rlightning.latency.ways import OneWay, one_message_s

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_NAMESPACE_FILE = Path("/proc/self/timens_offsets")

_SECOND_NS = 10**9
DRIFT_LIMIT = 200e-6
"""How fast two clocks may drift apart: each of them is right to 100 ppm."""
# How much the drift may change while exchanges of a window are believed: heat, and time daemons.
_DRIFT_CHANGE = 50e-6
# A machine that slept for less has not slept.
_SUSPEND_NS = 10**6
# A path that takes as long as before in all, but whose middle has moved by more than a quarter of
# that, this often in a row, is a clock that was set.
_SHIFT_OF_TRIP = 0.25
_SHIFT_NS = 100_000
_SHIFTED_TIMES = 3
_UNKNOWN = (math.nan, math.nan)


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
    shifted = [word for word in offsets if word.lstrip("-").isdecimal() and int(word)]
    return "/".join([boot, *shifted])


class _OwnClock:
    """Names the monotonic clock of this process, anew when it stood still while the machine slept.

    Attributes:
        id: The name; new at every start, too.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._asleep_ns = _asleep_ns()
        self._look_ns = 0

    def id_at(self, now_ns: int) -> str:
        """Returns the name; looks once per second whether the machine has slept."""
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _SECOND_NS
            asleep_ns = _asleep_ns()
            if abs(asleep_ns - self._asleep_ns) > _SUSPEND_NS:
                self._asleep_ns = asleep_ns
                self.id = uuid.uuid4().hex
        return self.id


def _asleep_ns() -> int:
    """Returns how long this machine has slept since its boot, but for a constant."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
    if boottime is None:
        return 0
    return time.clock_gettime_ns(boottime) - time.monotonic_ns()


_OWN = _OwnClock()


def clock_id(now_ns: int | None = None) -> str:
    """Returns the name of this process's monotonic clock.

    New at every start, and after the machine has slept, when the clock has stood still.

    Args:
        now_ns: Monotonic time in nanoseconds, if the caller has read it.
    """
    return _OWN.id_at(time.monotonic_ns() if now_ns is None else now_ns)


class Offset(NamedTuple):
    """A clock minus another one; the true offset lies within the uncertainty."""

    offset_ns: int
    """The far clock minus the near one, in nanoseconds."""
    uncertainty_ns: int
    """How far `offset_ns` may be off, in nanoseconds."""

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> Offset | None:
        """Returns what `ClockOffset.summary` tells; None where it knew nothing, or no number."""
        offset_s, uncertainty_s = (summary.get(key) for key in ("offset_s", "uncertainty_s"))
        if not (_is_finite(offset_s) and _is_finite(uncertainty_s)):
            return None
        return cls(round(offset_s * 1e9), math.ceil(uncertainty_s * 1e9))

    def then(self, other: Offset) -> Offset:
        """Returns the offset of a third clock: `other` is that clock minus the far one of this."""
        return Offset(self.offset_ns + other.offset_ns, self.uncertainty_ns + other.uncertainty_ns)

    def inverse(self) -> Offset:
        """Returns the near clock minus the far one."""
        return Offset(-self.offset_ns, self.uncertainty_ns)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


class ClockOffset:
    """The monotonic clock of a peer against that of this process.

    An exchange bounds the offset from both sides, whatever its two ways took: the peer had the
    request after it was sent, and sent the answer before it was here. Of the exchanges of the last
    `window_s` seconds, the request that was fastest gives the upper bound and the answer that was
    fastest the lower one, each loosened by what the clocks may have drifted apart since. The
    offset is the middle, its uncertainty half the width: half of what the fastest ways took
    together, however unlike they are.

    Drift is bounded by the exchanges, too, and by 200 ppm. Exchanges that contradict what was known
    begin a new epoch, in which nothing of the last one counts: a clock was set, or stood still. So
    does a round trip that is as short as ever while its middle has moved.

    Memory is fixed: of each second three exchanges are kept. Use from one thread.

    References:
        RFC 5905, section 8 (offset and delay of four stamps); Moon, Skelly and Towsley, "Estimation
        and removal of clock skew from network delay measurements", 1999 (bounds that are lines).

    Attributes:
        epoch: How often the past had to be forgotten.
    """

    def __init__(self, *, window_s: float = 20.0, limit_s: float = 1.0) -> None:
        """Starts without a sample.

        Args:
            window_s: How long an exchange is believed, in seconds.
            limit_s: Above this uncertainty, in seconds, the offset counts as unknown.
        """
        self.epoch = 0
        self._window_ns = int(window_s * 1e9)
        self._limit_ns = int(limit_s * 1e9)
        self._seconds: deque[_Second] = deque(maxlen=max(1, math.ceil(window_s)) + 1)
        self._clock_id = ""
        self._own_id = _OWN.id
        self._same_clock = False
        self._newest_ns = 0
        self._shifted = 0
        # The bounds are lines through these heights at `_base_ns`, of these slopes.
        self._base_ns = 0
        self._lower = self._upper = 0.0
        self._slowest, self._fastest = -DRIFT_LIMIT, DRIFT_LIMIT
        # The shortest round trip, the middle of its bounds, and when it was.
        self._trip = self._trip_at = 0
        self._middle = 0.0

    @property
    def same_clock(self) -> bool:
        """Whether both processes read one clock."""
        return self._same_clock

    @property
    def clock_id(self) -> str:
        """Name of the peer's clock; empty before `set_peer`."""
        return self._clock_id

    def set_peer(self, clock_id: str, *, same_clock: bool = False) -> None:
        """Names the peer's clock; another name than before forgets every exchange.

        Args:
            clock_id: The peer's `clock_id`.
            same_clock: Both processes read one clock: the offset is 0, with no uncertainty.
        """
        if clock_id != self._clock_id:
            if self._clock_id:
                self.epoch += 1
            self._forget()
            self._clock_id = clock_id
        self._same_clock = same_clock

    def update(self, t1: int, t2: int, t3: int, t4: int) -> None:
        """Adds one exchange.

        Args:
            t1: When the request was sent, in nanoseconds of this clock.
            t2: When the peer had received it, in nanoseconds of the peer's clock.
            t3: When the peer sent the answer, in nanoseconds of the peer's clock.
            t4: When the answer was here, in nanoseconds of this clock.
        """
        if self._same_clock:
            return  # nothing to learn
        if self._own_id != _OWN.id:  # this machine has slept
            self._own_id = _OWN.id
            self._begin_epoch()
        elapsed = t4 - t1
        trip = elapsed - (t3 - t2)
        if elapsed < 0 or t3 < t2 or trip < -DRIFT_LIMIT * elapsed:
            return  # no pair of steady clocks gives such stamps
        lower, upper = t3 - t4, t2 - t1
        if self._seconds and self._contradicts(lower, upper, trip, t1, t4):
            self._begin_epoch()
        number = t4 // _SECOND_NS
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number, lower, upper, trip, t1, t4))
            self._renew(t4)
            return
        # Lines of one slope: which one is the best does not change with time.
        second, base = self._seconds[-1], self._base_ns
        height = lower - self._slowest * (t4 - base)
        if height > self._lower:
            self._lower = height
        if height > second.lower - self._slowest * (second.lower_at - base):
            second.lower, second.lower_at = lower, t4
        height = upper - self._fastest * (t1 - base)
        if height < self._upper:
            self._upper = height
        if height < second.upper - self._fastest * (second.upper_at - base):
            second.upper, second.upper_at = upper, t1
        if trip < second.trip:
            second.trip, second.middle = trip, (lower + upper) / 2
            if trip < self._trip:
                self._trip, self._middle, self._trip_at = trip, second.middle, t4
        self._newest_ns = t4

    def estimate(self, now_ns: int | None = None) -> Offset | None:
        """Returns the peer's clock minus this one, or None while it is unknown.

        It is unknown before the first exchange of an epoch, when none is left in the window, and
        when the uncertainty passes the limit.

        Args:
            now_ns: For which moment of this clock; now if None.
        """
        lower, upper = self.bounds(time.monotonic_ns() if now_ns is None else now_ns)
        if math.isnan(lower):
            return None
        return Offset(round((lower + upper) / 2), math.ceil((upper - lower) / 2))

    def bounds(self, now_ns: int) -> tuple[float, float]:
        """Returns the least and the greatest offset that are possible, in nanoseconds.

        Args:
            now_ns: For which moment of this clock.

        Returns:
            Both NaN while the offset is unknown, see `estimate`.
        """
        if self._same_clock:
            return 0.0, 0.0
        if not self._seconds or now_ns - self._newest_ns > self._window_ns:
            return _UNKNOWN
        if now_ns - self._seconds[0].at > self._window_ns:
            self._renew(now_ns)
        age = max(now_ns, self._newest_ns) - self._base_ns
        lower = self._lower + self._slowest * age
        upper = self._upper + self._fastest * age
        if upper - lower > 2 * self._limit_ns:
            return _UNKNOWN
        # Rounding, or a drift that changed within the margin.
        return (lower, upper) if lower <= upper else (upper, lower)

    @property
    def offset_ns(self) -> int | None:
        """The peer's clock minus this one, in nanoseconds; None while unknown."""
        estimate = self.estimate()
        return None if estimate is None else estimate.offset_ns

    @property
    def uncertainty_ns(self) -> int | None:
        """How far `offset_ns` may be off, in nanoseconds; None while unknown."""
        estimate = self.estimate()
        return None if estimate is None else estimate.uncertainty_ns

    @property
    def drift_ppm(self) -> tuple[float, float]:
        """How fast the peer's clock runs away from this one, and how far that may be off, ppm."""
        if self._same_clock:
            return 0.0, 0.0
        slowest, fastest = self._slowest * 1e6, self._fastest * 1e6
        return (slowest + fastest) / 2, (fastest - slowest) / 2

    def one_way(self, t1: int, t2: int, t3: int, t4: int) -> OneWay | None:
        """Returns how long the messages of an exchange were under way; None while unknown.

        Args:
            t1: As in `update`, which should have had this exchange before.
            t2: As in `update`.
            t3: As in `update`.
            t4: As in `update`.
        """
        return OneWay.of(t2 - t1, t4 - t3, *self.bounds(t4))

    def uplink(self, sent_ns: int, received_ns: int) -> tuple[float, float] | None:
        """Returns the time of one message to the peer as (seconds, uncertainty in seconds).

        Args:
            sent_ns: When it was sent, by this clock.
            received_ns: When the peer had it, by the peer's clock.

        Returns:
            None while the offset is unknown. The figure is never below its uncertainty.
        """
        return one_message_s(received_ns - sent_ns, *self.bounds(time.monotonic_ns()))

    def downlink(self, sent_ns: int, received_ns: int) -> tuple[float, float] | None:
        """Returns the time of one message from the peer as (seconds, uncertainty in seconds).

        Args:
            sent_ns: When the peer sent it, by the peer's clock.
            received_ns: When it was here, by this clock.

        Returns:
            As `uplink`.
        """
        lower, upper = self.bounds(received_ns)
        return one_message_s(received_ns - sent_ns, -upper, -lower)

    def summary(self) -> dict[str, Any]:
        """Returns the state for people and metrics.

        {offset_s, uncertainty_s, drift_ppm, drift_uncertainty_ppm, same_clock, epoch}; without the
        first two while the offset is unknown.
        """
        drift, uncertainty = self.drift_ppm
        found: dict[str, Any] = {}
        estimate = self.estimate()
        if estimate is not None:
            found["offset_s"] = estimate.offset_ns * 1e-9
            found["uncertainty_s"] = estimate.uncertainty_ns * 1e-9
        return {
            **found,
            "drift_ppm": drift,
            "drift_uncertainty_ppm": uncertainty,
            "same_clock": self._same_clock,
            "epoch": self.epoch,
        }

    def _contradicts(self, lower: int, upper: int, trip: int, t1: int, t4: int) -> bool:
        """Whether an exchange and the past cannot both be of two steady clocks."""
        age = t4 - self._base_ns
        if lower > self._upper + self._fastest * age:
            return True
        # The upper bound is one at t1, before which the past's lower bound may not have been one.
        if upper + 2 * DRIFT_LIMIT * (t4 - t1) < self._lower + self._slowest * age:
            return True
        shift = (lower + upper) / 2 - self._middle
        slack = (
            abs(trip - self._trip) / 2
            + _SHIFT_OF_TRIP * self._trip
            + _SHIFT_NS
            + DRIFT_LIMIT * (t4 - self._trip_at)
        )
        if abs(shift) <= slack:
            self._shifted = 0
            return False
        # In a row, and in one direction.
        self._shifted = self._shifted + 1 if shift > 0 else self._shifted - 1
        if self._shifted * shift < 0:
            self._shifted = 1 if shift > 0 else -1
        return abs(self._shifted) >= _SHIFTED_TIMES

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._forget()

    def _forget(self) -> None:
        self._seconds.clear()  # the first exchange afterwards renews all else
        self._shifted = 0
        self._newest_ns = 0
        self._slowest, self._fastest = -DRIFT_LIMIT, DRIFT_LIMIT

    def _renew(self, now_ns: int) -> None:
        """Bounds drift and offset anew by the exchanges that are in the window."""
        seconds = self._seconds
        while len(seconds) > 1 and now_ns - seconds[0].at > self._window_ns:
            seconds.popleft()
        newest = seconds[-1]
        slowest, fastest = -DRIFT_LIMIT, DRIFT_LIMIT
        for second in seconds:
            if second is newest:
                break
            past = newest.upper_at - second.lower_at
            if past > 0:
                fastest = min(fastest, (newest.upper - second.lower) / past + _DRIFT_CHANGE)
            past = newest.lower_at - second.upper_at
            if past > 0:
                slowest = max(slowest, (newest.lower - second.upper) / past - _DRIFT_CHANGE)
        if slowest > fastest:
            slowest, fastest = -DRIFT_LIMIT, DRIFT_LIMIT
        self._slowest, self._fastest = slowest, fastest
        base = self._base_ns = newest.lower_at
        self._lower = max(s.lower - slowest * (s.lower_at - base) for s in seconds)
        self._upper = min(s.upper - fastest * (s.upper_at - base) for s in seconds)
        best = min(seconds, key=lambda s: s.trip)
        self._trip, self._middle, self._trip_at = best.trip, best.middle, best.at
        self._newest_ns = max(self._newest_ns, newest.at)


class _Second:
    """The best exchanges of one second.

    Attributes:
        number: Which second of this clock.
        lower: Greatest lower bound of the offset, of an answer that was here at `lower_at`.
        upper: Least upper bound of the offset, of a request that was sent at `upper_at`.
        trip: Shortest round trip; `middle` is the offset in the middle of its bounds.
        at: When the first of them was here.
    """

    __slots__ = ("at", "lower", "lower_at", "middle", "number", "trip", "upper", "upper_at")

    def __init__(self, number: int, lower: int, upper: int, trip: int, t1: int, t4: int) -> None:
        self.number = number
        self.lower, self.lower_at = lower, t4
        self.upper, self.upper_at = upper, t1
        self.trip, self.middle = trip, (lower + upper) / 2
        self.at = t4
