from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from rlightning.testing import assert_eventually
from rlightning.utils.waiting import in_thread, wait_within


async def test_what_comes_in_time_is_returned_and_what_raises_raises():
    assert await wait_within(asyncio.sleep(0, 7), 10) == 7
    assert await wait_within(asyncio.sleep(0, 7), None) == 7
    with pytest.raises(ZeroDivisionError):
        await wait_within(_raises(), 10)


async def _raises():
    raise ZeroDivisionError


async def test_what_takes_too_long_is_cancelled_first():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        await wait_within(slow(), 0.01)
    assert ended


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_the_result_is_not_dropped(turns):
    event = asyncio.Event()

    async def wait_for_ever():
        while True:
            await wait_within(event.wait(), 10)
            event.clear()

    task = asyncio.create_task(wait_for_ever())
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=30)
    assert task.cancelled()


class Argument:
    """What a thread works on."""


async def given_up(work: Callable[[], None]) -> weakref.ref[Argument]:
    """Cancels what a thread does for an argument, then lets it be done."""
    begun, go_on = threading.Event(), threading.Event()

    def waits(_: Argument) -> None:
        begun.set()
        go_on.wait(30)
        work()

    argument = Argument()
    task = asyncio.create_task(in_thread(None, waits, argument))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    return weakref.ref(argument)


async def test_what_fails_in_a_thread_after_a_cancellation_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise OSError("the disk did not confirm it")

    await given_up(fail)
    assert "the disk did not confirm it" in caplog.text


async def test_a_cancelled_thread_lets_go_of_what_it_had_at_once() -> None:
    gc.disable()
    try:
        argument = await given_up(lambda: None)
        await assert_eventually(lambda: argument() is None)
    finally:
        gc.enable()
