"""A client process of the network buffer benchmarks; jobs come as JSON lines on stdin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import uvloop

from benchmarks.echo import OPTIONS
from benchmarks.harness import answer_jobs
from benchmarks.workload import SPACES
from rlightning.buffer.insert_message import InsertMessage
from rlightning.buffer.remote_buffer import InsertClient, SampleClient
from rlightning.buffer.utils.layout import iter_arrays
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import RpcConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_ret, fill_policy_response

Answer = dict[str, Any]

ROWS, BATCH = 64, 256
EPISODE = 50
_PIECE_BYTES = 2**20 - 4096  # as large as the parts in which batches come
_IN_FLIGHT = 8
_AHEAD = 4


class Steps:
    """What a vector env of 64 rows returns whose episodes last 50 steps; and answers to it."""

    def __init__(self, kind: str) -> None:
        observation, action = SPACES["img" if kind == "img" else "cp"]
        self.meta = EnvMeta(f"{kind}-0", action, observation, ROWS)
        rng = np.random.default_rng(0)
        shape = (EPISODE, ROWS, *(observation.shape or ()))
        if kind == "img":
            shape = (4, *shape[1:])
            self._seen: Any = rng.integers(0, 255, shape, np.uint8)
        else:
            self._seen = rng.normal(size=shape).astype(np.float32)
        self._response = PolicyResponse(self.meta.env_id, action=rng.integers(0, 2, ROWS))
        self._reward = rng.normal(size=ROWS).astype(np.float32)
        self._t = 0

    def next(self) -> tuple[EnvRet, PolicyResponse]:
        """Returns the next step of all rows."""
        self._t += 1
        terminated = (np.arange(ROWS) + self._t) % EPISODE == 0
        ended = np.flatnonzero(terminated)
        observation = self._seen[self._t % len(self._seen)]
        env_ret = EnvRet(
            self.meta.env_id, observation, self._reward, terminated, np.zeros(ROWS, bool)
        )
        if len(ended):
            env_ret.info = {"final_rows": ended, "final_observation": observation[ended]}
        return env_ret, self._response


def message_bytes(kind: str) -> int:
    """Size of a message with one item, in bytes."""
    writer, item, message = Writer(), pb.InsertItem(), InsertMessage()
    env_ret, response = Steps(kind).next()
    fill_env_ret(item.env_ret, env_ret, writer)
    fill_policy_response(item.response, response, writer)
    data = writer.finish(item)
    message.add([data], len(data), 1)
    return len(message.take(pb.InsertRequest(), 1, 1))


async def insert(job: Answer) -> Answer:
    """Inserts 64 rows an item until the time is up, at least `items`, and all are acked; rows per second."""
    steps = Steps(job["kind"])
    rpc = RpcConfig() if job.get("shared") else RpcConfig(shared_memory_bytes=0)
    async with InsertClient(job["address"], spec=steps.meta, window_items=32, rpc=rpc) as client:
        count, begun = 0, time.perf_counter()
        least = job.get("items", 0)
        while count < least or time.perf_counter() - begun < job["seconds"]:
            await client.insert(*steps.next())
            count += 1
        await client.flush()
        return {"per_s": count * ROWS / (time.perf_counter() - begun)}


async def sample(job: Answer) -> Answer:
    """Takes batches of 256 that are fetched ahead; transitions per second."""
    async with SampleClient(job["address"], batch_size=BATCH, prefetch=_AHEAD) as client:
        batch = await client.next_batch(30)
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < job["seconds"]:
            batch = await client.next_batch(30)
            count += 1
        rate = count * BATCH / (time.perf_counter() - begun)
        return {"per_s": rate, "bytes": sum(leaf.nbytes for leaf in iter_arrays(batch.columns))}


async def sink(job: Answer) -> Answer:
    """Writes as many bytes for every item, of which each is acked by a few bytes."""
    async with grpc.aio.insecure_channel(job["address"], options=OPTIONS) as channel:
        call = channel.stream_stream("/bench/Echo")()
        message = (50).to_bytes(4, "little") + bytes(message_bytes(job["kind"]) - 4)
        room, count = asyncio.Semaphore(_IN_FLIGHT), 0

        async def acks() -> None:
            while await call.read() is not grpc.aio.EOF:
                room.release()

        reading = asyncio.ensure_future(acks())
        begun = time.perf_counter()
        while time.perf_counter() - begun < job["seconds"]:
            await room.acquire()
            await call.write(message)
            count += 1
        await call.done_writing()
        await reading
        return {"per_s": count * ROWS / (time.perf_counter() - begun)}


async def source(job: Answer) -> Answer:
    """Reads as many bytes for every batch, in parts of at most 1 MiB, as many batches ahead."""
    size = job["bytes"]
    parts = -(-size // _PIECE_BYTES)
    async with grpc.aio.insecure_channel(job["address"], options=OPTIONS) as channel:
        call = channel.stream_stream("/bench/Source")()
        ask = parts.to_bytes(4, "little") + (size // parts).to_bytes(4, "little")
        for _ in range(1 + _AHEAD):
            await call.write(ask)
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < job["seconds"]:
            for _ in range(parts):
                await call.read()
            count += 1
            await call.write(ask)
        rate = count * BATCH / (time.perf_counter() - begun)
        call.cancel()
        return {"per_s": rate}


JOBS: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
    "insert": insert,
    "sample": sample,
    "sink": sink,
    "source": source,
}

if __name__ == "__main__":
    uvloop.run(answer_jobs(JOBS))
