"""Work that an event loop gives to the thread that waits for it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class CallerThread(Executor):
    """Runs what a loop in another thread submits in the thread that called `run_until_done`.

    So an env is stepped where it was made, which simulators and drivers of hardware may insist on,
    and Ctrl-C reaches it there, while sockets and heartbeats are served elsewhere.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Takes one call."""
        future: Future[_T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                # Told to both sides: asyncio would end the loop with an interrupt.
                if not isinstance(error, Exception):
                    future.set_exception(InterruptedError("interrupted"))
                    raise
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(work)
        return future

    def run_until_done(self, job: Future[_T]) -> _T:
        """Works until a job of the other thread is done; returns its result or raises its error."""
        job.add_done_callback(lambda _: self._work.put(None))
        while not job.done():
            work = self._work.get()
            if work is not None:
                work()
        return job.result()
