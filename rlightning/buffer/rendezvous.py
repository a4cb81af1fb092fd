"""Where the writers and learners of a table wait: for room, for batches, and for each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from rlightning.buffer.producers import Producers
from rlightning.errors import DeadlineExceededError, PreconditionError, UnavailableError
from rlightning.utils.waiting import wait_within

PRODUCER_SILENT = "PRODUCER_SILENT"
"""Reason of the error that tells a learner of a producer that sends nothing."""

BLOCKED = "BLOCKED"
"""Reason of the error that tells both sides that they wait for each other."""

# A loop that wakes so much later than it wanted to has not run meanwhile.
_STOOD_STILL_NS = 10**9
# For how long both sides have to wait for each other before they are told.
_BLOCKED_NS = 10**9

_T = TypeVar("_T")


class Rendezvous:
    """Lets both sides wait, and tells them when neither can go on.

    Args:
        name: Name of the table.
        producers: Its writers.
        counters: Says what the rate limiter of the table counts, for people; None without one.
        may_move: Tells whether learners wait for something else than data.

    Attributes:
        name: As given.
        producers: As given.
        counters: As given.
        readers: Learners that take batches, also those that are away for a moment.
        blocked: What both sides were told when they waited for each other; empty if they do not.
        blocked_total: How often they did.
    """

    def __init__(
        self,
        name: str,
        producers: Producers,
        *,
        counters: Callable[[], str] | None = None,
        may_move: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.producers = producers
        self.counters = counters
        self.readers = 0
        self.blocked = ""
        self.blocked_total = 0
        self._may_move = may_move
        self._asking = 0  # learners that wait for a batch now
        self._stuck_since: int | None = None
        self._room = asyncio.Event()
        self._ready = asyncio.Event()

    def moved(self, *, room: bool = False, ready: bool = False) -> None:
        """Takes note that something was stored, taken or removed.

        Args:
            room: Whether there may be more room for inserts now.
            ready: Whether there may be a batch now.
        """
        self.blocked, self._stuck_since = "", None
        if room:
            self._room.set()
        if ready:
            self._ready.set()

    def hold(self, env_id: str, writer_id: str, waiting: int, by: Rendezvous | None) -> None:
        """Takes note how many messages of a writer wait, and for the room of which table."""
        producer = self.producers.of(env_id, writer_id)
        if producer is None:
            return
        producer.waiting = waiting
        holder = by if waiting and by is not None and by.counters is not None else None
        if holder is not producer.held_by:
            producer.held_by = holder
            if holder is not None:
                self._ready.set()  # a learner may wait for these very messages

    async def wait_room(self) -> None:
        """Returns when there may be more room than now, or when `blocked` says why not."""
        self._room.clear()
        await self._room.wait()

    async def wait_for(
        self,
        attempt: Callable[[], _T | None],
        timeout_s: float | None = None,
        *,
        patience_s: float = 0.0,
    ) -> _T:
        """Waits until an attempt to take something of the table succeeds; returns what it gave.

        Args:
            attempt: Returns None while there is nothing.
            timeout_s: How long, in seconds; None: for ever.
            patience_s: For how long nothing is complained about, in seconds.

        Raises:
            DeadlineExceededError: There was nothing in time.
            UnavailableError: A producer has sent nothing for `producer_timeout_s`, and holds the
                others up; reason `PRODUCER_SILENT`, the message names it.
            PreconditionError: All producers wait for a rate limiter, and all learners for them;
                reason `BLOCKED`, the message has the counters.
        """
        begun = time.monotonic_ns()
        deadline = None if timeout_s is None else begun + int(timeout_s * 1e9)
        patient_until = begun + int(patience_s * 1e9)
        self._asking += 1
        try:
            while (got := attempt()) is None:
                now = time.monotonic_ns()
                if deadline is not None and now >= deadline:
                    raise DeadlineExceededError(
                        f"no batch in table '{self.name}' within {timeout_s:g} s"
                    )
                alarm = max(self.producers.silent_at(), patient_until)
                if now >= alarm:
                    silence = self.producers.silence(self.name)
                    raise UnavailableError(silence, reason=PRODUCER_SILENT)
                stuck = self._stuck_at(now, patient_until)
                if stuck is not None and now >= stuck:
                    raise PreconditionError(self._tell_blocked(), reason=BLOCKED)
                wake = min(at for at in (alarm, deadline, stuck) if at is not None)
                self._ready.clear()
                try:
                    await wait_within(self._ready.wait(), (wake - now) / 1e9)
                except asyncio.TimeoutError:
                    if time.monotonic_ns() - wake > _STOOD_STILL_NS:
                        # This process was stopped: what the producers sent has not been read yet.
                        patient_until = time.monotonic_ns() + self.producers.timeout_ns
        finally:
            self._asking -= 1
        return got

    def _stuck_at(self, now: int, patient_until: int) -> int | None:
        """Returns when both sides will have waited for each other too long; None if they do not."""
        all_ask = self._asking >= max(1, self.readers)
        if not all_ask or self._may_move() or not self.producers.held_for(self):
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        return max(self._stuck_since + _BLOCKED_NS, patient_until)

    def _tell_blocked(self) -> str:
        """Tells the writers, and returns what a learner is told."""
        holders = {holder.name: holder for holder in self.producers.held_for(self)}
        told = "; ".join(
            f"table '{name}' has {holder.counters()}"
            for name, holder in holders.items()
            if holder.counters is not None
        )
        message = (
            f"table '{self.name}': learners wait for data, and inserts for samples: neither can go "
            f"on. {told}. Change batch_size or where of the learners, or buffer.rate_limiter"
        )
        self._stuck_since = None
        for holder in holders.values():
            holder.blocked = message
            holder.blocked_total += 1
            holder._room.set()
        return message
