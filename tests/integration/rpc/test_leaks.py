"""Connections that end badly, many times over, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os

import grpc.aio

from rlightning.rpc.channel import connect
from rlightning.testing import FaultProxy, assert_eventually, free_address
from tests.integration.rpc.harness import FAST, EchoClient, connected, hello, raw_call, running

_CYCLES = 25


def counts() -> dict[str, int]:
    gc.collect()
    calls = sum(issubclass(type(thing), grpc.aio.StreamStreamCall) for thing in gc.get_objects())
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "calls": calls,
    }


async def test_cycles_of_cuts_cancels_and_closes_are_flat():
    async with running() as (service, server), FaultProxy(server.address) as proxy:

        async def cycle(number: int) -> None:
            async with connected(proxy.address, f"cut-{number}") as client:
                await client.ask()
                proxy.reset()
                await client.ask()
            async with raw_call(server.address) as call:
                await call.write(hello(f"gone-{number}"))
                await call.read()

        async def settled() -> bool:
            return service.registry.open_count == 0

        for number in range(5):
            await cycle(number)
        await assert_eventually(settled)
        before = counts()
        for number in range(_CYCLES):
            await cycle(100 + number)
        await assert_eventually(settled)
        await assert_eventually(lambda: counts()["tasks"] <= before["tasks"] + 1)
        after = counts()
    for what, count in after.items():
        assert count <= before[what] + 3, (what, before, after)
    # Those that left without a word keep their state for the resume window, and no longer.
    assert all(session.owner is None for session in service.registry.sessions)


async def test_a_start_that_is_given_up_leaves_no_complaint_behind():
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    for number in range(40):
        async with connect(free_address(), rpc=FAST) as channel:
            session = EchoClient(channel).session
            start = asyncio.create_task(session.start(5))
            await asyncio.sleep(number / 2000)  # before, during and after the first attempt
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await session.close()
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
