from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from rlightning.errors import DeadlineExceededError
from rlightning.rpc.loop import LoopThread, shared_loop


async def name_of_thread() -> str:
    return threading.current_thread().name


def test_coroutines_run_in_the_thread_and_their_errors_come_back():
    async def fail():
        raise KeyError("x")

    with LoopThread("loop") as loop:
        assert loop.run(name_of_thread()) == "loop"
        with pytest.raises(KeyError):
            loop.run(fail())


def test_a_coroutine_that_takes_too_long_is_cancelled():
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with LoopThread() as loop:
        with pytest.raises(DeadlineExceededError, match=r"0\.01 s"):
            loop.run(hang(), timeout=0.01)
        assert ended.wait(30)


def test_a_timeout_of_the_coroutine_itself_is_its_own():
    async def fail():
        raise asyncio.TimeoutError("mine")

    with LoopThread() as loop, pytest.raises(asyncio.TimeoutError, match="mine"):
        loop.run(fail(), timeout=1)


def test_a_wait_for_itself_is_refused():
    with LoopThread() as loop:

        async def inner():
            return loop.run(name_of_thread())

        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(inner())


def test_close_cancels_what_runs_and_can_be_repeated():
    ended = threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop = LoopThread()
    future = loop.submit(hang())
    loop.run(asyncio.sleep(0))
    loop.close()
    loop.close()
    assert ended.is_set()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(name_of_thread())


def test_nothing_is_taken_while_it_closes_and_all_who_close_it_wait():
    ending, go_on = threading.Event(), threading.Event()

    async def end_slowly():
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(go_on.wait)

    loop = LoopThread()
    future = loop.submit(end_slowly())
    loop.run(asyncio.sleep(0))
    closers = [threading.Thread(target=loop.close) for _ in range(2)]
    closers[0].start()
    assert ending.wait(30)
    closers[1].start()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(name_of_thread())
    assert all(closer.is_alive() for closer in closers)
    go_on.set()
    for closer in closers:
        closer.join(30)
    assert loop.loop.is_closed()
    assert future.cancelled()


def test_a_close_that_ctrl_c_cuts_off_can_be_repeated():
    go_on = threading.Event()

    async def end_slowly():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(go_on.wait)

    loop = LoopThread()
    loop.submit(end_slowly())
    loop.run(asyncio.sleep(0))
    interrupt = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        loop.close()
    assert not loop.loop.is_closed()
    threading.Timer(0.2, go_on.set).start()
    loop.close()
    assert loop.loop.is_closed()


def test_what_a_task_begins_as_it_ends_is_cancelled_too():
    begun = []

    async def begin_another():
        try:
            await asyncio.Event().wait()
        finally:
            begun.append(asyncio.create_task(asyncio.Event().wait()))

    loop = LoopThread()
    loop.submit(begin_another())
    loop.run(asyncio.sleep(0))
    loop.close()
    assert begun[0].cancelled()


def test_a_loop_is_not_closed_from_its_own_thread():
    async def close(loop):
        loop.close()

    with LoopThread() as loop:
        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(close(loop))
        assert loop.run(name_of_thread())


def test_there_is_one_shared_loop():
    assert shared_loop() is shared_loop()
    assert shared_loop().loop.is_running()


def test_the_loop_is_made_in_its_thread_where_no_signal_ends_it_half_done(monkeypatch):
    makers = []
    make = asyncio.new_event_loop

    def new_event_loop():
        makers.append(threading.current_thread().name)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)
    with LoopThread("own"):
        assert makers == ["own"]


def test_a_loop_that_cannot_be_made_is_told(monkeypatch):
    def new_event_loop():
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)
    with pytest.raises(OSError, match="too many open files"):
        LoopThread()
