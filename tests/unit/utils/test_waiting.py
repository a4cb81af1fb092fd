from __future__ import annotations

import asyncio

import pytest

from rlightning.utils.waiting import wait_within


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
    await asyncio.wait({task}, timeout=1)
    assert task.cancelled()
