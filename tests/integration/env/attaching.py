"""Envs that attach to a cluster whose servers run in this loop, on real sockets."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.env.remote_client import EnvClient
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.rpc.channel import connect
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.testing import assert_eventually, free_address
from rlightning.types import EnvMeta, EnvRet
from rlightning.utils.config import ListenConfig, MainConfig, RpcConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_env_meta, fill_env_ret, read_policy_response
from tests.integration.pairing.env import Counting

# Short enough for tests to wait for, long enough for a busy machine.
FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0, reconnect_initial_ms=10)
# A place that was not given back stays taken: for tests of clients that give theirs back.
KEEPING = FAST.model_copy(update={"resume_window_s": 100.0})
COUNT = {"name": "count", "backend": "gymnasium", "task": "tests.integration.pairing.env:Counting"}
CART = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 2}
ECHO = {"type": "tests.integration.pairing.policy:Echo"}
PATIENCE_S = 40.0
CLI = "from rlightning.cli import main; main()"


class Cluster:
    """The three servers in this loop; the env server may be stopped and started again.

    Attributes:
        service: The env service.
        policy: The policy service.
        stores: The buffer service.
        client: Asks the env server.
        buffer: Asks the buffer server.
    """

    def __init__(self, stack, env, policy, rpc):
        self.stack = stack
        self.config = MainConfig.from_dict(
            {
                "env": env,
                "policy": {"device": "cpu", "initial_weights": "random", **policy},
                "buffer": {
                    "type": "ReplayBuffer",
                    "capacity": 100_000,
                    "auto_truncate_episode": True,
                },
            }
        )
        for name in ("env", "policy", "buffer"):
            getattr(self.config.services, name).rpc = rpc
        self.service = None
        self.env_address = free_address()

    async def start(self):
        services = self.config.services
        self.policy, self.stores = PolicyService(self.config), BufferService(self.config)
        for section, service in ((services.policy, self.policy), (services.buffer, self.stores)):
            server = await serve(service, rpc=section.rpc)
            self.stack.push_async_callback(server.stop, grace_s=5)
            await server.ready()
            section.address = server.address
        await self.start_env()
        self.client = await self.stack.enter_async_context(EnvClient(self.env_address))
        self.buffer = await self.stack.enter_async_context(
            BufferClient(services.buffer.dial_address)
        )

    async def start_env(self):
        self.service = EnvService(self.config)
        rpc = self.config.services.env.rpc
        self.env = await serve(
            self.service, listen=[ListenConfig(address=self.env_address)], rpc=rpc
        )
        self.stack.push_async_callback(self.env.stop, grace_s=5)
        await self.env.ready()

    async def rows(self, client):
        """The columns that one counting client brought."""
        columns = await self.buffer.get()
        mine = columns["observation"][:, 0] == client.given._state[0]
        return {name: column[mine] for name, column in columns.items()}

    async def env_ids(self):
        return [meta.env_id for meta in (await self.client.describe()).envs]


@asynccontextmanager
async def cluster(env=COUNT, policy=ECHO, rpc=FAST, *, min_clients=0):
    async with AsyncExitStack() as stack:
        running = Cluster(stack, env, policy, rpc)
        running.config.services.env.min_clients = min_clients
        await running.start()
        yield running


async def left(running):
    """Waits until every attached env has given its place back."""
    await assert_eventually(lambda: running.service._attached.groups == {}, PATIENCE_S)


@asynccontextmanager
async def attached(address, env, name="robot", kind=RemoteEnvClient, **options):
    """Runs a client in a thread of its own; yields it and its outcome, which comes later."""
    host, _, port = address.rpartition(":")
    client = kind(env, host, int(port), name=name, rpc=FAST, **options)
    outcome = []

    def run():
        try:
            client.run()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client.outcome, client.given = outcome, getattr(env, "unwrapped", env)
    try:
        yield client
    finally:
        client.stop()
        await asyncio.to_thread(thread.join, 15)
        assert not thread.is_alive()
        client.close()


async def stepped(client, more=100):
    goal = client.status.steps + more
    await assert_eventually(
        lambda: client.outcome != [] or client.status.steps >= goal, PATIENCE_S, "no steps"
    )
    assert client.outcome == [] or client.outcome == [None], client.outcome


class TenSteps(RemoteEnvClient):
    """Stops after ten steps."""

    def is_finish(self):
        return self.status.steps >= 10


class RawClient:
    """An Attach stream message by message, for what a `RemoteEnvClient` would never do."""

    def __init__(self, call):
        self.call = call
        self.env = Counting()
        self.spec = EnvMeta("raw", self.env.action_space, self.env.observation_space, 1)
        self.env_ret = EnvRet("raw", self.env.reset()[0][None])

    async def hello(self, *, spec=None, cameras=(), **fields):
        writer, request = Writer(), pb.AttachRequest()
        request.hello.cameras.extend(cameras)
        request.hello.session.protocol_version = 1
        request.hello.session.client_id = "raw"
        request.hello.last_seq = fields.pop("last_seq", 0)
        fill_env_meta(request.hello.session.spec, spec or self.spec, writer)
        await self.call.write(writer.finish(request))
        self.epoch = (await self.read()).message.welcome.epoch

    async def send(self, *steps, **fields):
        writer, request = Writer(), pb.AttachRequest()
        request.steps.epoch = self.epoch
        for seq, wants_action in steps:
            step = request.steps.steps.add(seq=seq, wants_action=wants_action, **fields)
            fill_env_ret(step.env_ret, self.env_ret, writer)
        await self.call.write(writer.finish(request))

    async def read(self):
        return Reader(pb.AttachResponse, await asyncio.wait_for(self.call.read(), 20))

    async def answer(self):
        reader = await self.read()
        answer = reader.message.answer
        return answer.seq, read_policy_response(answer.response, reader)

    def step(self, response):
        outcome = self.env.step(np.asarray(response.action)[0])
        observation, reward, terminated, truncated, _ = outcome
        flags = [reward, terminated, truncated]
        final = {}
        if terminated or truncated:
            final = {"final_rows": np.zeros(1, np.int32), "final_observation": observation[None]}
            observation = self.env.reset()[0]
        self.env_ret = EnvRet("raw", observation[None], *map(np.atleast_1d, flags), final)


@asynccontextmanager
async def raw_client(running, **fields):
    async with connect(running.env_address, rpc=FAST) as channel:
        call = channel.stream_stream("/rlightning.v1.EnvService/Attach")()
        client = RawClient(call)
        await client.hello(**fields)
        yield client
        call.cancel()
