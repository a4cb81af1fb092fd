"""The floor: a bare `grpc.aio` bidirectional echo with uvloop, as a server process and a client job."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc
import uvloop

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
]


async def _echo(_: Any, context: grpc.aio.ServicerContext) -> None:
    """Answers each message with as many bytes as its first four bytes say."""
    replies: dict[int, bytes] = {}
    while (message := await context.read()) is not grpc.aio.EOF:
        size = int.from_bytes(message[:4], "little")
        await context.write(replies.setdefault(size, bytes(size)))


async def _source(_: Any, context: grpc.aio.ServicerContext) -> None:
    """Answers each message with as many messages of as many bytes as its two numbers say."""
    parts: dict[int, bytes] = {}
    while (message := await context.read()) is not grpc.aio.EOF:
        size = int.from_bytes(message[4:8], "little")
        for _part in range(int.from_bytes(message[:4], "little")):
            await context.write(parts.setdefault(size, bytes(size)))


async def serve() -> None:
    """Serves until stdin closes; prints its address as JSON."""
    server = grpc.aio.server(options=OPTIONS)
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(_echo),
        "Source": grpc.stream_stream_rpc_method_handler(_source),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


async def round_trips(
    channel: grpc.aio.Channel, request: int, reply: int, seconds: float
) -> list[int]:
    """Round trips of `request` bytes answered by `reply` bytes, one in flight, in ns."""
    call = channel.stream_stream("/bench/Echo")()
    message, stamps = reply.to_bytes(4, "little") + bytes(request - 4), []
    end = time.perf_counter_ns() + int(seconds * 1e9)
    while (start := time.perf_counter_ns()) < end:
        await call.write(message)
        await call.read()
        stamps.append(time.perf_counter_ns() - start)
    await call.done_writing()
    await call.read()
    return stamps


if __name__ == "__main__":
    uvloop.run(serve())
