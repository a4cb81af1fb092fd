"""Tensors through memory that a client and a server on one host share: agreed, refused, lost."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rlightning.rpc.session import _is_of_this_host
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.tensor_pb2 import DTYPE_UINT8
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    echo_process,
    hello,
    raw_call,
    running,
    serving,
    status_of,
)

SHARED = 2**20
OFF = FAST.model_copy(update={"shared_memory_bytes": 0})


def image(value: int) -> np.ndarray:
    return np.full((4, 64, 64, 3), value, np.uint8)


async def asked(client: EchoClient, value: int) -> np.ndarray:
    """What the server saw of an image."""
    await client.ask(image(value))
    return client.echoed


async def assert_seen(client: EchoClient, value: int) -> None:
    np.testing.assert_array_equal(await asked(client, value), image(value))


async def assert_counted(service: EchoService, images: int) -> None:
    """Waits until the last request was dealt with: its answer may be here before that."""
    await assert_eventually(lambda: service.registry.shared_bytes == images * image(0).nbytes)


def maps_of(pid: int) -> int:
    if pid == os.getpid():
        gc.collect()  # what an earlier test left in its tracebacks
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:rlightning")


async def test_images_come_through_memory_and_are_what_was_sent() -> None:
    async with running() as (service, server):
        async with connected(server.address, shared_bytes=SHARED) as client:
            for value in range(50):  # far more than there is room for at once
                await assert_seen(client, value)
            await assert_counted(service, 50)


@pytest.mark.parametrize("side", ["client", "server", "unasked"])
async def test_without_it_everything_goes_by_bytes(side: str) -> None:
    rpc = OFF if side == "server" else FAST
    options: dict[str, Any] = {} if side == "unasked" else {"shared_bytes": SHARED}
    if side == "client":
        options["shared_bytes"] = 0
    async with running(rpc=rpc) as (service, server):
        async with connected(server.address, **options) as client:
            assert client.session.memory is None
            await assert_seen(client, 7)
        assert service.registry.shared_bytes == 0


async def test_no_more_is_accepted_than_the_server_allows() -> None:
    rpc = FAST.model_copy(update={"shared_memory_bytes": SHARED})
    async with running(rpc=rpc) as (_, server):
        async with connected(server.address, "a", shared_bytes=SHARED) as client:
            assert client.session.memory is not None
        async with connected(server.address, "b", shared_bytes=SHARED + 1) as client:
            assert client.session.memory is None
            await assert_seen(client, 7)


@pytest.mark.parametrize("what", ["memfd_create", "posix_fallocate"])
async def test_a_system_that_has_none_or_not_enough_goes_by_bytes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    async with running() as (service, server):
        monkeypatch.setattr(os, what, fail)
        async with connected(server.address, shared_bytes=SHARED) as client:
            await assert_seen(client, 7)
        assert service.registry.shared_bytes == 0


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4321", True),
        ("ipv6:%5B::1%5D:4321", True),
        ("unix:", True),
        ("unix:/run/x.sock", True),
        ("ipv4:10.0.0.7:4321", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:4321", False),
        ("", False),
    ],
)
def test_only_a_peer_of_this_host_is_looked_at(peer: str, *, local: bool) -> None:
    assert _is_of_this_host(peer) == local


async def test_a_made_up_offer_is_declined_and_the_session_lives() -> None:
    async with running() as (_, server), raw_call(server.address) as call:
        request = pb.ActRequest.FromString(hello())
        offer = request.hello.session.shared_memory
        offer.pid, offer.fd, offer.size_bytes, offer.nonce = os.getpid(), 0, SHARED, bytes(32)
        await call.write(request.SerializeToString())
        welcome = pb.ActResponse.FromString(await call.read()).welcome.session
        assert welcome.epoch == 1
        assert not welcome.shared_memory


def referring(offset: int, size: int) -> bytes:
    request = pb.ActRequest()
    request.step.seq, request.step.epoch = 1, 1
    request.step.env_ret.env_id = "env"
    tensor = request.step.env_ret.observation.tensor_value
    tensor.dtype, tensor.shared_offset = DTYPE_UINT8, offset
    tensor.shape.append(size)
    return request.SerializeToString()


async def test_a_reference_to_what_is_not_shared_ends_that_stream_alone_and_says_where() -> None:
    async with running() as (_, server):
        async with connected(server.address, "other", shared_bytes=SHARED) as other:
            async with raw_call(server.address) as call:
                await call.write(hello())
                await call.read()
                await call.write(referring(64, 10))
                code, details = await status_of(call)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "observation: refers to shared memory, and none was agreed on" in details
            async with connected(server.address, "b", shared_bytes=SHARED) as client:
                await client.session.send(referring(SHARED - 5, 10))
                await assert_eventually(lambda: bool(client.failures))
                assert f"which has {SHARED}" in str(client.failures[0])
            await assert_seen(other, 3)


async def test_after_a_cut_memory_is_offered_anew_and_what_was_unanswered_is_sent_again() -> None:
    async with running() as (service, server), FaultProxy(server.address) as proxy:
        async with connected(proxy.address, shared_bytes=SHARED) as client:
            await assert_seen(client, 1)
            before = client.session.memory
            service.handler.gate = asyncio.Event()
            unanswered = asyncio.create_task(asked(client, 2))
            await assert_eventually(lambda: len(service.handler.opened) == 1)
            proxy.reset()
            await assert_eventually(lambda: client.session.epoch == 2)
            service.handler.gate.set()
            np.testing.assert_array_equal(await unanswered, image(2))
            assert client.session.memory not in (None, before)
            await assert_counted(service, 2)  # what was cut off was not read
            await assert_seen(client, 3)
            await assert_counted(service, 3)


async def test_a_server_that_is_killed_leaves_nothing_behind_and_the_next_one_shares_again(
    tmp_path: Path,
) -> None:
    server = echo_process(tmp_path, "--rpc", FAST.model_dump_json())
    before = maps_of(os.getpid())
    with server:
        address = await serving(server)
        arguments = [*server._arguments]
        arguments[-2:-2] = ["--listen", address]
        async with connected(address, shared_bytes=SHARED) as client:
            await assert_seen(client, 1)
            assert maps_of(server.child.pid) == 1
            server.child.kill()
            server.child.wait()
            server._arguments = arguments
            server.start()
            await serving(server)
            await assert_seen(client, 2)
            assert client.session.memory is not None
            assert maps_of(server.child.pid) == 1
            assert maps_of(os.getpid()) == before + 1


# Opens a session that shares memory, asks once and waits to be killed.
_CLIENT = """
import asyncio, sys
from tests.integration.rpc.harness import connected
from tests.integration.rpc.test_shared_memory import SHARED, assert_seen

async def main(address):
    async with connected(address, shared_bytes=SHARED) as client:
        await assert_seen(client, 1)
        assert client.session.memory is not None
        print("asked", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


async def test_a_client_that_is_killed_leaves_nothing_behind() -> None:
    files, before = set(os.listdir("/dev/shm")), maps_of(os.getpid())
    async with running() as (service, server):
        child = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, server.address], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            assert await asyncio.to_thread(child.stdout.readline) == b"asked\n"
            assert maps_of(os.getpid()) == before + 1
            await assert_counted(service, 1)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        await assert_eventually(lambda: maps_of(os.getpid()) <= before)
        async with connected(server.address, "next", shared_bytes=SHARED) as client:
            await assert_seen(client, 2)
    assert set(os.listdir("/dev/shm")) <= files


async def test_sessions_that_come_and_go_keep_no_memory_and_no_descriptor() -> None:
    before = maps_of(os.getpid())
    async with running() as (_, server):
        for number in range(3):
            async with connected(server.address, f"a{number}", shared_bytes=SHARED) as client:
                await assert_seen(client, number)
                assert maps_of(os.getpid()) == before + 2
            del client
        await assert_eventually(lambda: maps_of(os.getpid()) <= before)
