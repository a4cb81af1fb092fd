"""Work of another thread's loop, and Ctrl-C at any moment of it."""

import asyncio
import os
import random
import signal
import threading
import time

import pytest

from rlightning.env.remote_env.caller_thread import CallerThread
from rlightning.rpc.loop import LoopThread


@pytest.fixture
def loop():
    with LoopThread("job") as thread:
        yield thread


def interrupt_in(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_calls_run_here_and_their_results_and_errors_go_there(loop):
    here = CallerThread()

    async def job():
        run = asyncio.get_running_loop().run_in_executor
        with pytest.raises(ZeroDivisionError):
            await run(here, lambda: 1 / 0)
        return await run(here, threading.get_ident)

    submitted = loop.submit(job())
    assert here.run_until_done(submitted, lambda: None) == threading.get_ident()


def test_ctrl_c_never_leaves_the_job_waiting(loop):
    for _ in range(40):
        here, stopped = CallerThread(), threading.Event()

        async def job(here=here, stopped=stopped):
            run = asyncio.get_running_loop().run_in_executor
            await run(here, lambda: None)  # the handler is there
            interrupt_in(random.uniform(0.005, 0.02))
            while not stopped.is_set():
                call = run(here, lambda: None)
                assert (await asyncio.wait({call}, timeout=30))[0], "a call got lost"
                call.exception()

        submitted = loop.submit(job())
        with pytest.raises(KeyboardInterrupt):
            here.run_until_done(submitted, stopped.set)
        submitted.result(0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_interrupts_a_long_call(loop):
    here, stopped = CallerThread(), threading.Event()

    def long_call():
        interrupt_in(0.1)
        time.sleep(60)

    async def job():
        await asyncio.get_running_loop().run_in_executor(here, long_call)

    submitted = loop.submit(job())
    with pytest.raises(KeyboardInterrupt):
        here.run_until_done(submitted, stopped.set)
    assert stopped.is_set()
    assert isinstance(submitted.exception(0), InterruptedError)


def test_a_second_ctrl_c_does_not_wait_for_the_job(loop):
    here, heard, end = CallerThread(), threading.Event(), threading.Event()

    async def job():
        await asyncio.get_running_loop().run_in_executor(here, lambda: None)
        interrupt_in(0)
        while not heard.is_set():
            await asyncio.sleep(0.01)
        interrupt_in(0)
        while not end.is_set():
            await asyncio.sleep(0.01)

    submitted = loop.submit(job())
    with pytest.raises(KeyboardInterrupt):
        here.run_until_done(submitted, heard.set)
    assert not submitted.done()
    end.set()
    submitted.result(30)


def test_a_handler_of_the_callers_own_stays(loop):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        here = CallerThread()
        submitted = loop.submit(asyncio.sleep(0.3, "done"))
        interrupt_in(0.1)
        assert here.run_until_done(submitted, lambda: None) == "done"
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [1]
