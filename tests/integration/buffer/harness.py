"""A buffer server in this loop or as a process, and clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlightning.buffer.remote_buffer import BufferClient, InsertClient, SampleClient
from rlightning.rpc.channel import connect
from rlightning.rpc.server import RunningServer, serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.testing.ports import free_address
from rlightning.testing.processes import ServerProcess
from rlightning.types import EnvMeta
from rlightning.utils.config import BufferConfig, ListenConfig, MainConfig, RpcConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Reader, Writer, fill_env_meta, fill_env_ret, fill_policy_response
from tests.unit.buffer.scripted import (
    ScriptedEnv,
    answer,
    check_order,
    check_transitions,
)

# Short enough for tests to wait for, long enough for a busy machine.
FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0)
# For tests in which a client is gone for good.
FORGETFUL = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=0.2)


@dataclass
class Buffers:
    """A running buffer server, and what tests look into."""

    server: RunningServer
    service: BufferService

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def table(self) -> Any:
        return self.service._tables["default"]


def config(**buffer: Any) -> MainConfig:
    settings = {"type": "RolloutBuffer", "capacity": 10_000, "rollout_length": 8, **buffer}
    return MainConfig(buffer=BufferConfig(**settings))


@asynccontextmanager
async def buffer_server(
    *, rpc: RpcConfig = FAST, listen: str = "127.0.0.1:0", **buffer: Any
) -> AsyncIterator[Buffers]:
    main = config(**buffer)
    main.services.buffer.rpc = rpc
    service = BufferService(main)
    server = await serve(service, listen=[ListenConfig(address=listen)], rpc=rpc)
    try:
        await server.ready()
        yield Buffers(server, service)
    finally:
        await server.stop(grace_s=2)


@asynccontextmanager
async def inserting(
    address: str, spec: EnvMeta, *, rpc: RpcConfig = FAST, **options: Any
) -> AsyncIterator[InsertClient]:
    async with InsertClient(address, spec=spec, rpc=rpc, **options) as client:
        yield client


@asynccontextmanager
async def sampling(
    address: str, *, rpc: RpcConfig = FAST, **options: Any
) -> AsyncIterator[SampleClient]:
    async with SampleClient(address, rpc=rpc, **options) as client:
        yield client


@asynccontextmanager
async def asking(address: str, *, rpc: RpcConfig = FAST) -> AsyncIterator[BufferClient]:
    async with BufferClient(address, rpc=rpc) as client:
        yield client


async def act(client: InsertClient, env: ScriptedEnv, steps: int, *, last: bool = True) -> None:
    """Inserts what an actor would: `steps` steps from a reset, and the outcome of the last."""
    env_ret = env.reset()
    for step in range(steps):
        await client.insert(env_ret, answer(env_ret, version=step))
        env_ret = env.step()
    if last:
        await client.insert(env_ret, None)


async def keep_acting(client: InsertClient, env: ScriptedEnv) -> None:
    """Inserts until cancelled."""
    env_ret = env.reset()
    version = 0
    while True:
        await client.insert(env_ret, answer(env_ret, version))
        env_ret = env.step()
        version += 1


@asynccontextmanager
async def acting(*pairs: tuple[InsertClient, ScriptedEnv]) -> AsyncIterator[None]:
    """Keeps inserting meanwhile; an actor that ends by itself has failed."""
    tasks = [asyncio.create_task(keep_acting(client, env)) for client, env in pairs]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_rollout(batch: Batch, length: int, rows: int) -> None:
    """Asserts that a rollout is whole and that each of its transitions belongs together."""
    assert batch.columns["reward"].shape == (length, rows)
    check_transitions(batch.columns)
    check_order(batch.columns)


class RawWriter:
    """An Insert stream message by message, for what an `InsertClient` would never do."""

    def __init__(self, call: Any, writer_id: str, spec: EnvMeta) -> None:
        self.call = call
        self.writer_id = writer_id
        self.spec = spec
        self.epoch = 0
        self.token = ""

    async def hello(self, storage_id: str = "") -> pb.InsertWelcome:
        writer, request = Writer(), pb.InsertRequest()
        request.hello.writer_id = self.writer_id
        request.hello.storage_id = storage_id
        request.hello.session.protocol_version = 1
        request.hello.session.client_id = self.writer_id
        request.hello.session.resume_token = self.token
        fill_env_meta(request.hello.session.spec, self.spec, writer)
        await self.call.write(writer.finish(request))
        welcome = (await self.read()).welcome
        self.epoch, self.token = welcome.session.epoch, welcome.session.resume_token
        return welcome

    async def insert(self, seq: int, env_ret: Any, response: Any = None, **fields: Any) -> None:
        writer, request = Writer(), pb.InsertRequest()
        request.insert.seq = seq
        request.insert.epoch = self.epoch
        request.insert.table = fields.pop("table", "")
        item = request.insert.items.add(**fields)
        if env_ret is not None:
            fill_env_ret(item.env_ret, env_ret, writer)
        if response is not None:
            fill_policy_response(item.response, response, writer)
        await self.call.write(writer.finish(request))

    async def read(self) -> pb.InsertResponse:
        data = await asyncio.wait_for(self.call.read(), 30)
        return Reader(pb.InsertResponse, data).message

    async def acked(self, seq: int) -> None:
        """Reads until everything up to a number is acked."""
        while (await self.read()).ack.seq < seq:
            pass


@asynccontextmanager
async def raw_writer(
    address: str, spec: EnvMeta, writer_id: str = "raw", token: str = ""
) -> AsyncIterator[RawWriter]:
    async with connect(address, rpc=FAST) as channel:
        call = channel.stream_stream("/rlightning.v1.BufferService/Insert")()
        try:
            writer = RawWriter(call, writer_id, spec)
            writer.token = token
            yield writer
        finally:
            call.cancel()


def buffer_process(folder: Path, **buffer: Any) -> tuple[ServerProcess, str]:
    """A buffer server process that comes back under the same address, and that address."""
    settings = {"type": "RolloutBuffer", "capacity": 10_000, "rollout_length": 8, **buffer}
    rpc = FAST.model_dump(exclude_defaults=True)
    file = folder / "buffer.yaml"
    file.write_text(json.dumps({"buffer": settings, "services": {"buffer": {"rpc": rpc}}}))
    address = free_address()
    arguments = ["-m", "rlightning.services.buffer_server", "--config", str(file)]
    return ServerProcess([*arguments, "--listen", address], folder), address
