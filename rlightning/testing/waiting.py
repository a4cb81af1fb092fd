"""Waiting for something to become true, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

INTERVAL_S = 0.01


async def assert_eventually(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0, message: str = ""
) -> None:
    """Waits until a condition holds, without blocking the event loop.

    Args:
        condition: Asked every 10 ms; may be a coroutine function.
        timeout_s: Seconds until it must hold.
        message: What did not happen; for the error.

    Raises:
        AssertionError: It does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        if time.monotonic() > deadline:
            raise AssertionError(message or f"not true within {timeout_s:g} s: {condition}")
        await asyncio.sleep(INTERVAL_S)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0, message: str = "") -> None:
    """Waits until a condition holds, blocking this thread; see `assert_eventually`.

    Raises:
        AssertionError: It does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(message or f"not true within {timeout_s:g} s: {condition}")
        time.sleep(INTERVAL_S)
