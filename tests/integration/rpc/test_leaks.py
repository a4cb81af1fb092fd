"""Connections that end badly, many times over, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys

import grpc.aio

from rlightning.rpc.channel import connect
from rlightning.testing import FaultProxy, assert_eventually, free_address
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    echo_process,
    hello,
    raw_call,
    running,
    serving,
)
from tests.proc import established, memory_mib

_CYCLES = 25
_SERVER_CYCLES = 300
# 14 KiB a cycle. Its size varies by 1.5 MiB from one look to the next, and is the same after 3000 cycles.
_GROWTH_MIB = 4.0


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


# Holds as many sessions as it is told to, each on a connection of its own, until it is killed.
_HOLDER = """
import asyncio, sys
from contextlib import AsyncExitStack
from tests.integration.rpc.harness import connected

async def main(address, name, count):
    async with AsyncExitStack() as stack:
        for number in range(count):
            client = await stack.enter_async_context(connected(address, f"{name}-{number}"))
            await client.ask()
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def test_a_server_keeps_no_socket_and_no_memory_of_clients_that_ended_badly(tmp_path):
    rpc = FAST.model_copy(update={"resume_window_s": 0.5})
    with echo_process(tmp_path, "--rpc", rpc.model_dump_json()) as server:
        address, pid = await serving(server), server.child.pid
        async with FaultProxy(address) as proxy:

            async def cut(number: int) -> None:
                async with raw_call(proxy.address) as call:
                    await call.write(hello(f"cut-{number}"))
                    await call.read()
                    proxy.reset()

            async def cancel(number: int) -> None:
                async with raw_call(address) as call:
                    await call.write(hello(f"gone-{number}"))
                    await call.read()

            async def kill(name: str, count: int) -> None:
                command = [sys.executable, "-c", _HOLDER, address, name, str(count)]
                holder = subprocess.Popen(command, stdout=subprocess.PIPE)
                try:
                    assert await asyncio.to_thread(holder.stdout.readline) == b"held\n"
                    assert established(pid) >= count
                finally:
                    holder.kill()
                    holder.wait()
                    holder.stdout.close()

            async def cycles(name: str, count: int) -> tuple[float, float]:
                await kill(name, count // 3)
                for number in range(count // 3):
                    await cut(f"{name}-{number}")
                    await cancel(f"{name}-{number}")
                await assert_eventually(lambda: established(pid) == 0)
                await asyncio.sleep(2 * rpc.resume_window_s)  # its sessions are freed as well
                return memory_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))

            memory, fds = await cycles("warm", _SERVER_CYCLES // 2)
            memory_after, fds_after = await cycles("measured", _SERVER_CYCLES)
            assert memory_after < memory + _GROWTH_MIB
            assert fds_after <= fds
            assert established(os.getpid()) == 0
