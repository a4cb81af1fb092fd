"""Messages of a few KB that are many MB when they are decompressed."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rlightning.utils.config.rpc import MIB, RpcConfig
from tests.integration.rpc.echo import METHOD
from tests.integration.rpc.harness import connected, echo_process, serving
from tests.proc import memory_mib

SERVICE = METHOD.rpartition("/")[0]
BOMBS = 2  # at once, on each method
# Decompressed, they would take 64 MiB each and more.
BOUND_MIB = 16.0


def call(address: str, method: str, bomb: bytes, kind: grpc.Compression) -> grpc.RpcError:
    """Sends a message, compressed, on a connection of its own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options, compression=kind) as channel:
        try:
            if method == "Describe":
                channel.unary_unary(f"{SERVICE}/{method}")(bomb, timeout=20)
            else:
                list(channel.stream_stream(f"{SERVICE}/{method}")(iter([bomb]), timeout=20))
        except grpc.RpcError as error:
            return error
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("kind", "mib"),
    [(grpc.Compression.Gzip, 100), (grpc.Compression.Gzip, 64), (grpc.Compression.Deflate, 64)],
    ids=["past-the-cap", "below-the-cap", "deflate"],
)
async def test_what_would_grow_is_refused_and_costs_the_server_nothing(tmp_path, kind, mib):
    bomb = bytes(mib * MIB)
    with echo_process(tmp_path, "--rpc", RpcConfig().model_dump_json()) as server:
        address = await serving(server)
        async with connected(address) as bystander:
            await bystander.ask()
            before = memory_mib(server.child.pid, "VmHWM")
            errors = await asyncio.gather(
                *(
                    asyncio.to_thread(call, address, method, bomb, kind)
                    for method in ("Describe", "Act")
                    for _ in range(BOMBS)
                )
            )
            for error in errors:
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "is disabled" in error.details()
            assert memory_mib(server.child.pid, "VmHWM") < before + BOUND_MIB
            assert (await bystander.ask()).seq == 2
            assert bystander.session.epoch == 1
