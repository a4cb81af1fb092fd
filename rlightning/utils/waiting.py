"""Waits that are bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def wait_within(awaitable: Awaitable[_T], timeout_s: float | None) -> _T:
    """Waits as `asyncio.wait_for` does, and can always be cancelled.

    Before Python 3.12 that one drops a cancellation that comes together with the result.

    Args:
        awaitable: What to wait for; cancelled when the time is up.
        timeout_s: How long, in seconds; None: for ever.

    Raises:
        asyncio.TimeoutError: The time is up.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
