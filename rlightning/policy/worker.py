"""One thread beside the event loop, for jobs that must not run at the same time."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable


class Worker:
    """Runs jobs one after the other, reports each on the event loop, and is an alarm clock.

    Args:
        name: Of the thread.
        ring: Called on the event loop when an alarm is due.
    """

    def __init__(self, name: str, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | int | None]
        self._inbox = queue.SimpleQueue()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None], done: Callable[[], None]) -> None:
        """Runs a job on the thread, then `done` on the event loop; cancels the alarm.

        Args:
            job: Must not raise.
            done: Learns of the job's result by what they share.
        """
        self._inbox.put((job, done))

    def set_alarm(self, due_ns: int) -> None:
        """Rings once, at a monotonic time; another alarm, or a job, replaces it."""
        self._inbox.put(due_ns)

    async def stop(self) -> None:
        """Ends the thread once the jobs that were submitted have run."""
        self._inbox.put(None)
        await asyncio.shield(self._stopped)  # who waits may give up, and wait again

    def _run(self) -> None:
        call_on_loop = self._loop.call_soon_threadsafe
        alarm_ns = 0
        while True:
            timeout = max(0.0, (alarm_ns - time.monotonic_ns()) * 1e-9) if alarm_ns else None
            try:
                item = self._inbox.get(timeout=timeout)
            except queue.Empty:
                alarm_ns = 0
                call_on_loop(self._ring)
                continue
            if isinstance(item, int):
                alarm_ns = item
                continue
            alarm_ns = 0
            if item is None:
                break
            job, done = item
            job()
            call_on_loop(done)
        call_on_loop(self._stopped.set_result, None)
