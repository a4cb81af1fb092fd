"""Waits that are bounded in time, and such as outlast a cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_P = ParamSpec("_P")


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


async def in_thread(
    executor: Executor | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Does something in a thread, and is over only once the thread is done, also if cancelled.

    What the thread uses may so be closed or removed afterwards, whatever happened. What it raises
    after a cancellation is logged.

    Args:
        executor: Whose thread; None: of those that `asyncio.to_thread` has.
        work: What to do.
        *args: Its arguments.
        **kwargs: Its arguments by name.
    """
    done = asyncio.get_running_loop().run_in_executor(executor, partial(work, *args, **kwargs))
    cancelled = False  # not the error itself, which would hold this frame, and that the error
    while not done.done():
        try:
            await asyncio.wait({done})
        except asyncio.CancelledError:
            cancelled = True
    if not cancelled:
        return done.result()
    if (error := done.exception()) is not None:
        logger.error("what was cancelled failed: %s", error, exc_info=error)
    raise asyncio.CancelledError
