"""The turns in which a policy does what is asked of it, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class Turns:
    """Runs functions one at a time: in the thread of who asks, or on one of its own.

    Attributes:
        load: Requests that wait for an answer, or are being answered.
    """

    def __init__(self) -> None:
        self.load = 0
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def use_thread(self) -> None:
        """Runs everything from now on on a thread of its own."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "policy")

    def run(self, function: Callable[[], _T]) -> Future[_T]:
        """Runs a function after those given before; without a thread, before this returns."""
        if self._executor is not None:
            return self._executor.submit(function)
        future: Future[_T] = Future()
        try:
            future.set_result(function())
        except Exception as error:  # raised again where the result is asked for
            future.set_exception(error)
        return future

    def take(self, requests: int) -> None:
        """Counts requests that wait from now on; `answering` takes them off again."""
        with self._lock:
            self.load += requests

    @contextmanager
    def answering(self, requests: int) -> Iterator[None]:
        """Answers, for the length of a block, requests that were counted, or fails them."""
        try:
            yield
        finally:
            with self._lock:
                self.load -= requests

    def close(self) -> None:
        """Ends the thread once what was given is done."""
        if self._executor is not None:
            self._executor.shutdown()
