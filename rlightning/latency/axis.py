"""Moments of several processes, each by its own clock, on one axis of time."""

from __future__ import annotations

from rlightning.latency.clock import DRIFT_LIMIT, ClockOffset, Offset


class Axis:
    """The monotonic clock of one of several peers, which moments of all of them are told by.

    The peers need not know each other: this process knows the clock of each against its own, and
    from the axis to a peer the way is that to this process, turned round, and on to the peer. Both
    uncertainties count, and what clocks may have drifted since. Of what was known of a clock the
    best is kept, so that moments do not jump to and fro with each exchange, until that clock leaps.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Offset, int, int]] = {}

    def learn(self, clock: ClockOffset, now_ns: int) -> None:
        """Takes what is known of a peer's clock; the first peer's is the axis.

        Args:
            clock: That clock against this process's.
            now_ns: The monotonic time of this process.
        """
        newest = clock.estimate(now_ns)
        if newest is None:
            return
        known = self._aged(clock.clock_id, now_ns)
        leapt = known is not None and self._known[clock.clock_id][2] != clock.epoch
        if known is None or leapt or newest.uncertainty_ns <= known.uncertainty_ns:
            self._known[clock.clock_id] = newest, now_ns, clock.epoch

    def offset(self, clock_id: str, now_ns: int) -> Offset | None:
        """Returns a peer's clock minus the axis; None if nothing was ever known of it.

        Args:
            clock_id: The `ClockOffset.clock_id` of the peer.
            now_ns: The monotonic time of this process.
        """
        if clock_id not in self._known:
            return None
        axis = next(iter(self._known))
        if clock_id == axis:
            return Offset(0, 0)
        to_axis, to_peer = self._aged(axis, now_ns), self._aged(clock_id, now_ns)
        assert to_axis is not None
        assert to_peer is not None
        return to_axis.inverse().then(to_peer)

    def _aged(self, clock_id: str, now_ns: int) -> Offset | None:
        known = self._known.get(clock_id)
        if known is None:
            return None
        offset, learned_ns, _ = known
        drifted_ns = round(DRIFT_LIMIT * (now_ns - learned_ns))
        return Offset(offset.offset_ns, offset.uncertainty_ns + drifted_ns)
