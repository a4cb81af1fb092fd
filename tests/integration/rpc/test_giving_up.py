"""Calls, writes and connections that are given up, over real sockets."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    PreconditionError,
    UnavailableError,
)
from rlightning.policy.transfer import send_weights
from rlightning.rpc import channel as channels
from rlightning.rpc.channel import connect, stream_unary, unary, unary_stream
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvRet
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import FAST, EchoClient, connected, running


async def test_a_task_of_the_server_may_be_cancelled_while_it_sends():
    rpc = RpcConfig(heartbeat_s=0.1, lease_s=0.6)
    async with (
        running(rpc=rpc) as (service, server),
        FaultProxy(server.address) as proxy,
        connected(proxy.address, rpc=rpc) as client,
    ):
        session = service.handler.opened[0]
        await client.ask()
        proxy.black_hole()

        async def flood() -> None:
            while await session.send(bytes(2**20)):
                pass

        flooding = asyncio.create_task(flood())
        await assert_eventually(lambda: session.owner.write_since_ns)
        await asyncio.wait({flooding}, timeout=0.1)
        flooding.cancel()
        await asyncio.wait({flooding})
        assert flooding.cancelled()
        proxy.cut()
        proxy.restore()
        assert (await client.ask()).seq == 2
        assert client.session.epoch == 2


async def test_a_cancelled_send_leaves_a_session_that_works():
    async with (
        running() as (_, server),
        FaultProxy(server.address) as proxy,
        connected(proxy.address, rpc=RpcConfig()) as client,
    ):
        proxy.black_hole()
        sending = asyncio.create_task(_send_until_blocked(client))
        await assert_eventually(lambda: client.session._stream.writing)
        await asyncio.sleep(0.1)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        proxy.restore()
        await assert_eventually(lambda: client.session.epoch == 2)
        assert (await client.ask()).seq == 1


async def _send_until_blocked(client: EchoClient) -> None:
    data = client.encode(10, EnvRet("env", np.zeros(2**20, np.uint8)))
    while await client.session.send(data):
        pass


async def test_a_send_that_waits_for_a_lost_server_is_told_so_and_not_cancelled():
    async with (
        running() as (_, server),
        FaultProxy(server.address) as proxy,
        connected(proxy.address) as client,
    ):
        proxy.black_hole()
        sending = asyncio.create_task(_send_until_blocked(client))
        await assert_eventually(sending.done)
        assert sending.exception() is None
        assert client.session.epoch == 1
        proxy.cut()
        proxy.restore()


async def test_a_server_that_is_not_there_is_named():
    async with connect("127.0.0.1:1", rpc=FAST) as channel:
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1: cannot connect: .*refused"):
            await EchoClient(channel).session.start(0.3)
        assert time.monotonic() - begun < 15


async def test_a_welcome_that_does_not_come_is_asked_for_over_another_connection():
    service = EchoService(FAST)
    open_session = service.handler.on_open

    async def late(session, reader):
        await asyncio.sleep(0.5)
        return await open_session(session, reader)

    service.handler.on_open = late
    async with running(service) as (_, server), FaultProxy(server.address) as proxy:
        # The connection may be what is dead; or the server is slow, and gets more time each time.
        async with connected(proxy.address, welcome_timeout_s=0.1) as client:
            assert (await client.ask()).seq == 1
            assert proxy.accepted > 1
        async with connect(proxy.address, rpc=FAST) as channel:
            client = EchoClient(channel, "b", welcome_timeout_s=0.1)
            with pytest.raises((UnavailableError, AlreadyExistsError)):
                await client.session.start(0.3)


class Waiting(EchoService):
    """Answers no call that needs no session."""

    async def describe(self, request, context):
        self.log.append("describe")
        await asyncio.Event().wait()

    async def publish(self, requests, context):
        self.log.append("publish")
        await asyncio.Event().wait()


def waiting_calls(channel, service):
    """Calls of every kind that the service lets wait, as tasks."""

    async def pull():
        request = pb.PullWeightsRequest(min_policy_version=1)
        method = f"/{EchoService.name}/PullWeights"
        async for _ in unary_stream(channel, method, request, pb.PullWeightsResponse, timeout=20):
            service.log.append("pull")

    async def publish():
        method, response = f"/{EchoService.name}/PublishWeights", pb.PublishWeightsResponse
        await stream_unary(channel, method, endless(), response, timeout=20)

    async def endless():
        while True:
            yield pb.PublishWeightsRequest(chunk=b"1")
            await asyncio.sleep(0.01)

    async def describe():
        method, request = f"/{EchoService.name}/Describe", pb.PolicyServiceDescribeRequest()
        await unary(channel, method, request, pb.PolicyServiceDescribeResponse, timeout=20)

    return [asyncio.create_task(call()) for call in (pull, publish, describe)]


async def test_a_connection_that_is_given_up_cancels_nobody_who_shares_it():
    service = Waiting(FAST)
    async with running(service) as (_, server), connect(server.address, rpc=FAST) as channel:
        clients = EchoClient(channel, "a"), EchoClient(channel, "b")
        for client in clients:
            await client.session.start(5.0)
        calls = waiting_calls(channel, service)
        await assert_eventually(lambda: {*service.log} >= {"pull", "publish", "describe"})
        for client in clients:  # each takes the connection for dead
            client.session.renew(UnavailableError("nothing heard"))
        await asyncio.wait(calls, timeout=30)
        for call in calls:
            with pytest.raises(UnavailableError, match="the connection was given up"):
                call.result()
        await assert_eventually(lambda: all(len(client.welcomes) == 2 for client in clients))
        assert channel.connection == 1  # what one has made, the other does not close
        clients[0].session.renew(UnavailableError("nothing heard"))
        await assert_eventually(lambda: all(len(client.welcomes) == 3 for client in clients))
        for client in clients:
            assert (await client.ask()).seq == 1
            await client.session.close()


async def test_a_channel_that_is_closed_cancels_nobody_who_awaits_a_call_on_it():
    service = Waiting(FAST)
    async with running(service) as (_, server):
        channel = connect(server.address, rpc=FAST)
        client = EchoClient(channel)
        await client.session.start(5.0)
        calls = waiting_calls(channel, service)
        await assert_eventually(lambda: {*service.log} >= {"pull", "publish", "describe"})
        await channel.close()
        await asyncio.wait(calls, timeout=30)
        for call in calls:
            with pytest.raises(UnavailableError, match="the channel was closed"):
                call.result()
        # Where UNAVAILABLE is tried again, that ends.
        await assert_eventually(lambda: client.failures)
        with pytest.raises(PreconditionError, match="the channel was closed"):
            raise client.failures[0]
        with pytest.raises(PreconditionError, match="the channel was closed"):
            await send_weights(channel, 1, b"x", learner_id="a", timeout_s=60)
        await channel.renew()
        assert channel.connection == 1
        await client.session.close()


@asynccontextmanager
async def silent():
    """Yields a channel to what accepts connections and says nothing, and those it accepted."""
    accepted = []
    server = await asyncio.start_server(lambda *streams: accepted.append(streams), "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        async with connect(address, rpc=FAST) as channel:
            yield channel, accepted
    finally:
        for _, writer in accepted:
            writer.close()
        server.close()


async def one_chunk():
    yield pb.PublishWeightsRequest(chunk=b"1")


async def test_a_stream_to_a_service_that_never_answered_ends_with_its_connection():
    def publish(timeout):
        method, response = f"/{EchoService.name}/PublishWeights", pb.PublishWeightsResponse
        return stream_unary(channel, method, one_chunk(), response, timeout=timeout)

    async with silent() as (channel, accepted):
        call = asyncio.create_task(publish(20))
        await assert_eventually(lambda: accepted)
        await channel.renew()
        with pytest.raises(UnavailableError, match="the connection was given up"):
            await asyncio.wait_for(call, 30)
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(publish(0.2), 20)


async def test_a_task_is_cancelled_where_nothing_tells_for_whom_that_was_meant(monkeypatch):
    # As before Python 3.11.
    monkeypatch.setattr(channels, "own_cancellation", lambda given_up: not given_up)
    async with silent() as (channel, accepted):
        send = send_weights(channel, 1, b"x", learner_id="a", timeout_s=60)
        publishing = asyncio.create_task(send)
        await assert_eventually(lambda: accepted)
        await channel.renew()
        await assert_eventually(lambda: len(accepted) == 2)  # it tries again
        publishing.cancel()
        await asyncio.wait({publishing}, timeout=30)
        assert publishing.cancelled()
