"""The fault proxy itself: a fault that does not happen would prove nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from rlightning.testing import FaultProxy, assert_eventually, wait_until


@asynccontextmanager
async def echo_server():
    async def echo(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@asynccontextmanager
async def link():
    async with echo_server() as address, FaultProxy(address) as proxy:
        host, port = proxy.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        yield proxy, reader, writer
        writer.close()


async def say(reader, writer, data: bytes = b"hello") -> float:
    begun = time.monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    return time.monotonic() - begun


async def test_it_forwards_and_delays_each_way():
    async with link() as (proxy, reader, writer):
        assert await say(reader, writer) < 0.05
        proxy.delay_s = 0.05
        assert 0.1 <= await say(reader, writer) < 0.3


async def test_a_delay_does_not_limit_the_bandwidth():
    async with link() as (proxy, reader, writer):
        proxy.delay_s = 0.1
        assert await say(reader, writer, bytes(2**21)) < 1.0


async def test_bandwidth_is_limited():
    async with link() as (proxy, reader, writer):
        proxy.bytes_per_s = 10**6
        assert await say(reader, writer, bytes(200_000)) >= 0.2


async def test_a_cut_is_an_end_and_a_reset_an_error():
    async with link() as (proxy, reader, writer):
        await say(reader, writer)
        proxy.cut()
        assert await reader.read() == b""
    async with link() as (proxy, reader, writer):
        await say(reader, writer)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_half_close_is_forwarded():
    async with link() as (_, reader, writer):
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"last"


async def test_a_black_hole_swallows_until_it_is_restored():
    async with link() as (proxy, reader, writer):
        proxy.black_hole()
        writer.write(b"hello")
        reading = asyncio.create_task(reader.readexactly(5))
        await asyncio.wait({reading}, timeout=0.1)
        assert not reading.done()
        proxy.restore()
        assert await reading == b"hello"


async def test_refused_connections_are_accepted_again_at_the_same_address():
    async with link() as (proxy, reader, _):
        host, port = proxy.address.split(":")
        await proxy.refuse()
        assert await reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        await proxy.start()
        again = await asyncio.open_connection(host, int(port))
        await say(*again)
        assert proxy.accepted == 2
        again[1].close()


async def test_waiting_gives_up_with_what_did_not_happen():
    with pytest.raises(AssertionError, match="the moon"):
        await assert_eventually(lambda: False, 0.02, "the moon did not fall")
    with pytest.raises(AssertionError, match=r"0\.02 s"):
        wait_until(lambda: False, 0.02)
    wait_until(lambda: True)
