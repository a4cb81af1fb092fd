"""Work that an event loop gives to the thread that waits for it."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")


class CallerThread(Executor):
    """Runs what a loop in another thread submits in the thread that called `run_until_done`.

    So an env is stepped where it was made, which simulators and drivers of hardware may insist on,
    and Ctrl-C reaches it there, while sockets and heartbeats are served elsewhere.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._in_call = False

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Takes one call."""
        future: Future[_T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._in_call = True
                result = function(*args, **kwargs)
                self._in_call = False
            except BaseException as error:
                self._in_call = False
                # Told to both sides: asyncio would end the loop with an interrupt.
                if not isinstance(error, Exception):
                    future.set_exception(InterruptedError("interrupted"))
                    raise
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(work)
        return future

    def run_until_done(self, job: Future[_T], stop: Callable[[], None]) -> _T:
        """Works until a job of the other thread is done; returns its result or raises its error.

        Ctrl-C interrupts the call that runs, if one does, and lets the job end in order. A second
        one ends the wait for that.

        Args:
            job: The job.
            stop: Tells it to end soon; called by a signal handler, at most once.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the job is done.
        """
        job.add_done_callback(lambda _: self._work.put(None))
        with self._interruptible(stop) as interrupted:
            while not job.done():
                work = self._work.get()
                if work is None:
                    continue
                try:
                    work()
                except KeyboardInterrupt:
                    if not interrupted.is_set():  # by another's signal handler
                        interrupted.set()
                        stop()
        if interrupted.is_set():
            raise KeyboardInterrupt
        return job.result()

    @contextmanager
    def _interruptible(self, stop: Callable[[], None]) -> Iterator[threading.Event]:
        """Takes Ctrl-C in the block; yields what is set by it.

        An interrupt that Python raises wherever this thread happens to be may get lost between two
        calls together with the result that the job waits for.
        """
        interrupted = threading.Event()

        def interrupt(number: int, frame: FrameType | None) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            interrupted.set()
            stop()
            if self._in_call:
                raise KeyboardInterrupt

        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield interrupted
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield interrupted
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
