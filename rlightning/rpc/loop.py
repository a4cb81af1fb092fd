"""An event loop in a thread, for callers that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, TypeVar

from typing_extensions import Self

from rlightning.errors import DeadlineExceededError

_Result = TypeVar("_Result")


class LoopThread:
    """One daemon thread that runs one event loop.

    gRPC's objects belong to the loop in which they were made, and a process should have one loop:
    use `shared_loop()` unless the loop must end before the process does.
    """

    def __init__(self, name: str = "rlightning-loop") -> None:
        made: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # Of a kind that a finalizer may take once more in the thread that has it.
        self._lock = threading.RLock()
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(made,), name=name, daemon=True)
        self._thread.start()
        self._loop = made.result()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, _Result], timeout: float | None = None) -> _Result:
        """Runs a coroutine in the loop and waits for its result.

        Args:
            coroutine: What to run.
            timeout: Seconds to wait; the coroutine is cancelled then. None: as long as it takes.

        Raises:
            DeadlineExceededError: The time was up.
            RuntimeError: The loop is closed, or this is its own thread and would wait for itself.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # it ended with a TimeoutError of its own
                raise
            raise DeadlineExceededError(f"not done within {timeout:g} s") from None
        finally:
            future.cancel()  # also when a KeyboardInterrupt ended the wait

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Runs a coroutine in the loop; returns a future for its result.

        Raises:
            RuntimeError: The loop is closed, or this is its own thread.
        """
        problem = "the loop is closed"
        if threading.current_thread() is self._thread:
            problem = "called from the loop's own thread, which would wait for itself; use await"
        elif self._thread.is_alive():
            with self._lock:  # what comes before the stop is cancelled by it, never left waiting
                if not self._closing:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError(problem)

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Safe to repeat, and in several threads.

        Raises:
            RuntimeError: This is the loop's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a loop cannot be closed from its own thread")
        if self._thread.is_alive():  # it is not after a fork
            with self._lock:
                if not self._closing:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._closing = True  # last: a close that Ctrl-C cuts off here is repeated
            # Before Python 3.13 a join that Ctrl-C cuts off takes the thread for ended.
            self._ended.wait()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, made: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        # Made here, where no KeyboardInterrupt can come while it is half done.
        try:
            loop = asyncio.new_event_loop()
        except Exception as error:
            made.set_exception(error)
            return
        asyncio.set_event_loop(loop)
        made.set_result(loop)
        try:
            loop.run_forever()
        finally:
            close_loop(loop)
            self._ended.set()


@lru_cache(maxsize=1)
def shared_loop() -> LoopThread:
    """Returns the loop thread of this process; started on the first call, ends with the process."""
    return LoopThread()


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the tasks of a loop that has stopped, lets them end, and closes it."""
    while tasks := asyncio.all_tasks(loop):  # again for those that they began as they ended
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
