"""Starts, pauses and stops what drives envs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from rlightning.errors import DeadlineExceededError
from rlightning.utils.waiting import wait_within


class ActorControl:
    """Starts, pauses and stops actors, each after the step in flight. Belongs to one event loop.

    Args:
        running: Whether the actors may run from the beginning.

    Attributes:
        stopping: Whether they shall end.
        resets: How often a reset of their envs was asked for.
    """

    def __init__(self, *, running: bool = True) -> None:
        self.stopping = False
        self.resets = 0
        self._branches: list[ActorControl] = []
        self._busy = 0
        self._go, self._stop, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        if running:
            self._go.set()

    @property
    def running(self) -> bool:
        """Whether the actors may run."""
        return self._go.is_set() and not self.stopping

    @property
    def idle(self) -> bool:
        """Whether every actor waits at the end of its step, or has ended."""
        return self._busy == 0

    def branch(self) -> ActorControl:
        """Returns a control that starts, pauses and stops with this one, and may stop before it.

        Its actors are not waited for here, nor reset.
        """
        branch = ActorControl(running=self._go.is_set())
        if self.stopping:
            branch.stop()
        self._branches = [*(one for one in self._branches if not one.stopping), branch]
        return branch

    def start(self) -> None:
        """Lets the actors run."""
        self._go.set()
        for branch in self._branches:
            branch.start()

    def pause(self) -> None:
        """Lets each actor wait at the end of its step."""
        if not self.stopping:
            self._go.clear()
            for branch in self._branches:
                branch.pause()

    def stop(self) -> None:
        """Lets each actor end at the end of its step."""
        self.stopping = True
        self._stop.set()
        self._go.set()
        for branch in self._branches:
            branch.stop()

    def reset_envs(self) -> None:
        """Lets each actor reset its env before the next step; what ran before is cut."""
        self.resets += 1

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until every actor waits or has ended; returns whether that came in time."""
        with suppress(asyncio.TimeoutError):
            await wait_within(self._idle.wait(), timeout_s)
        return self.idle

    async def sleep(self, seconds: float) -> None:
        """Waits, but no longer than until `stop`."""
        with suppress(asyncio.TimeoutError):
            await wait_within(self._stop.wait(), seconds)

    async def go_on(self) -> bool:
        """Waits while actors are paused; returns whether the one that asks may go on."""
        while not self._go.is_set():  # again, if it was paused anew before this one came round
            self.leave()
            try:
                await self._go.wait()
            finally:
                self.enter()
        return not self.stopping

    def enter(self) -> None:
        """Counts an actor that runs."""
        self._busy += 1
        self._idle.clear()

    def leave(self) -> None:
        """Counts an actor that runs no longer."""
        self._busy -= 1
        if not self._busy:
            self._idle.set()


class Quorum:
    """Tells when enough clients have been there; stays so from then on. Belongs to one event loop.

    Args:
        needed: How many have to be there at the same time.
        timeout_s: Seconds from now within which they have to.
        key: Config key of `needed`, for messages.
    """

    def __init__(self, needed: int, timeout_s: float, key: str) -> None:
        self._needed = needed
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._key = key
        self._present = 0
        self._there = asyncio.Event()
        self.count(0)

    @property
    def reached(self) -> bool:
        """Whether they have been there."""
        return self._there.is_set()

    def count(self, present: int) -> None:
        """Takes note of how many are there now."""
        self._present = present
        if present >= self._needed:
            self._there.set()

    async def wait(self) -> None:
        """Returns when they have been there.

        Raises:
            DeadlineExceededError: They did not come in time.
        """
        if self.reached:
            return
        try:
            await wait_within(self._there.wait(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise DeadlineExceededError(
                f"{self._present} of {self._needed} clients attached within "
                f"{self._timeout_s:g} s ({self._key})"
            ) from None
