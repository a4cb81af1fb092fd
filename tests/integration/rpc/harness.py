"""A client for the echo service, with what a test wants to know of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from gymnasium import spaces

from rlightning.errors import RemoteError
from rlightning.rpc import health
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.handlers import EOF
from rlightning.rpc.health import ServingStatus
from rlightning.rpc.server import RunningServer, serve
from rlightning.testing import ServerProcess, assert_eventually
from rlightning.types import EnvMeta, EnvRet
from rlightning.utils.config.rpc import ListenConfig, RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_env_ret, read_policy_response
from tests.integration.rpc.echo import METHOD, EchoService

# Short enough for tests to wait for, long enough for a busy machine.
FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0)


def make_meta(**overrides) -> EnvMeta:
    fields = {
        "env_id": "env",
        "action_space": spaces.Discrete(2),
        "observation_space": spaces.Box(-1, 1, (4,), np.float32),
        "num_envs": 8,
    }
    return EnvMeta(**(fields | overrides))


class EchoClient:
    """Asks and waits; keeps what is unanswered, as an owner of a session must."""

    def __init__(self, channel: Channel, client_id: str = "a", **options) -> None:
        self.pending: dict[int, tuple[EnvRet, asyncio.Future[pb.ActAnswer]]] = {}
        self.welcomes: list[pb.ActWelcome] = []
        self.answered: list[int] = []
        self.echoed: Any = None
        self.failures: list[RemoteError] = []
        self.seq = 0
        self.explode = False
        self.session = SessionClient(
            channel,
            METHOD,
            request_type=pb.ActRequest,
            response_type=pb.ActResponse,
            client_id=client_id,
            on_message=self._on_message,
            on_welcome=self._on_welcome,
            on_failure=self.failures.append,
            **options,
        )

    async def ask(self, observation=None, timeout_s: float = 20.0) -> pb.ActAnswer:
        self.seq += 1
        env_ret = EnvRet(
            "env", np.zeros((8, 4), np.float32) if observation is None else observation
        )
        future = asyncio.get_running_loop().create_future()
        self.pending[self.seq] = env_ret, future
        await self.session.send(self.encode(self.seq, env_ret))
        await asyncio.wait({future}, timeout=timeout_s)
        assert future.done(), "no answer"
        return future.result()

    def encode(self, seq: int, env_ret: EnvRet, epoch: int | None = None) -> bytes:
        request, memory = self.session.new_request(), self.session.memory
        if memory is not None:
            memory.begin(request.timing.sent_ns)
        writer = Writer(memory=memory)
        request.step.seq = seq
        request.step.epoch = self.session.epoch if epoch is None else epoch
        fill_env_ret(request.step.env_ret, env_ret, writer)
        return writer.finish(request)

    async def _on_welcome(self, reader: Reader[pb.ActResponse]) -> None:
        self.welcomes.append(reader.message.welcome)
        for seq, (env_ret, _) in list(self.pending.items()):
            await self.session.send_now(self.encode(seq, env_ret))

    def _on_message(self, reader: Reader[pb.ActResponse]) -> None:
        if self.explode:
            raise ZeroDivisionError
        answer = reader.message.answer
        if self.session.memory is not None:
            self.session.memory.free(reader.message.timing.echo_sent_ns)
        self.answered.append(answer.seq)
        self.echoed = read_policy_response(answer.response, reader).action
        entry = self.pending.pop(answer.seq, None)
        if entry is not None and not entry[1].done():
            entry[1].set_result(answer)


@asynccontextmanager
async def running(
    service: EchoService | None = None, *, rpc: RpcConfig = FAST, listen: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[EchoService, RunningServer]]:
    service = service or EchoService(rpc)
    server = await serve(service, listen=[ListenConfig(address=listen)], rpc=rpc)
    try:
        await server.ready()
        yield service, server
    finally:
        await server.stop(grace_s=2.0)


def echo_process(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> ServerProcess:
    """The echo service as a process of its own."""
    return ServerProcess(
        ["-m", "tests.integration.rpc.echo_main", *arguments], folder, prefix=prefix
    )


async def serving(server: ServerProcess) -> str:
    """The address of a server process, once it is SERVING."""
    address = server.address()

    async def is_serving() -> bool:
        return await health.check(address) is ServingStatus.SERVING

    await assert_eventually(is_serving)
    return address


@asynccontextmanager
async def connected(
    address: str, client_id: str = "a", *, rpc: RpcConfig = FAST, **options
) -> AsyncIterator[EchoClient]:
    async with connect(address, rpc=rpc) as channel:
        client = EchoClient(channel, client_id, **options)
        await client.session.start(5.0)
        try:
            yield client
        finally:
            await client.session.close()


@asynccontextmanager
async def raw_call(address: str, *, rpc: RpcConfig = FAST) -> AsyncIterator:
    """A bare Act stream, for what a `SessionClient` would never do."""
    async with connect(address, rpc=rpc) as channel:
        call = channel.stream_stream(METHOD)()
        try:
            yield call
        finally:
            call.cancel()


def hello(client_id: str = "a", token: str = "", version: int = 1) -> bytes:
    request = pb.ActRequest()
    request.hello.session.protocol_version = version
    request.hello.session.client_id = client_id
    request.hello.session.resume_token = token
    return request.SerializeToString()


async def open_session(call, token: str = "") -> pb.ActWelcome:
    """Says hello and one heartbeat, so that there is a session to come back to."""
    await call.write(hello(token=token))
    welcome = pb.ActResponse.FromString(await call.read()).welcome
    heartbeat = pb.ActRequest()
    heartbeat.heartbeat.SetInParent()
    await call.write(heartbeat.SerializeToString())
    await call.read()
    return welcome


async def status_of(call) -> tuple[grpc.StatusCode, str]:
    """Reads a call to its end."""
    try:
        while await call.read() is not EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()
