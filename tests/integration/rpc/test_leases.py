"""How long silence is borne: leases and resume windows, over real sockets."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from rlightning.errors import ResourceExhaustedError
from rlightning.rpc.channel import connect
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    hello,
    raw_call,
    running,
    status_of,
)


async def test_a_write_is_not_given_up_for_the_time_in_which_the_server_stood_still():
    async with running() as (service, server), raw_call(server.address) as call:
        await call.write(hello())
        await call.read()
        stream = service.handler.opened[0].owner
        stream.write_since_ns = time.monotonic_ns()
        time.sleep(2 * FAST.lease_s)
        await asyncio.sleep(FAST.lease_s / 3)
        assert stream.error is None
        await assert_eventually(lambda: stream.error is not None)


async def test_a_black_hole_ends_the_lease_on_both_sides_and_is_resumed_after_it():
    async with (
        running() as (service, server),
        FaultProxy(server.address) as proxy,
        connected(proxy.address) as client,
    ):
        await client.ask()
        proxy.black_hole()
        begun = time.monotonic()
        await assert_eventually(lambda: service.registry.open_count == 0)
        assert FAST.lease_s * 0.5 < time.monotonic() - begun < FAST.lease_s + 15
        await assert_eventually(lambda: not client.session.connected)
        # Not over the old connection; gRPC itself would find out after 15 s that it is dead.
        await assert_eventually(lambda: proxy.accepted > 1, timeout_s=10)
        proxy.restore()
        assert (await client.ask()).seq == 2
        assert client.session.resumed
        assert client.session.epoch == 2


async def test_a_session_is_freed_at_the_end_of_its_resume_window():
    rpc = RpcConfig(heartbeat_s=0.05, lease_s=0.3, resume_window_s=0.3)
    async with running(rpc=rpc) as (service, server):
        async with raw_call(server.address) as call:
            await call.write(hello())
            token = pb.ActResponse.FromString(await call.read()).welcome.session.resume_token
        await assert_eventually(lambda: ("a", False) in service.handler.closed)
        assert tuple(service.registry.sessions) == ()
        async with raw_call(server.address) as call:
            await call.write(hello(token=token))
            welcome = pb.ActResponse.FromString(await call.read()).welcome.session
            assert (welcome.resumed, welcome.epoch) == (False, 1)


async def test_slots_are_bounded_and_the_dead_make_room():
    rpc = RpcConfig(heartbeat_s=0.05, lease_s=0.4, resume_window_s=60, max_sessions=2)
    async with (
        running(rpc=rpc) as (_, server),
        connected(server.address, "one", rpc=rpc),
        raw_call(server.address) as gone,
    ):
        await gone.write(hello("gone"))
        await gone.read()
        async with connect(server.address, rpc=rpc) as channel:
            with pytest.raises(ResourceExhaustedError, match=r"services\.policy\.rpc\.max_sess"):
                await EchoClient(channel, "three").session.start(5)
            gone.cancel()
            begun = time.monotonic()
            while True:
                three = EchoClient(channel, "three")
                try:
                    await three.session.start(5)
                    break
                except ResourceExhaustedError:
                    assert time.monotonic() - begun < 30
                    await asyncio.sleep(0.05)
            assert (await three.ask()).seq == 1
            await three.session.close()


async def test_a_client_that_says_nothing_is_ended_after_a_lease():
    async with running() as (_, server), raw_call(server.address) as call:
        code, details = await status_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no hello" in details


async def test_a_client_that_never_reads_is_ended_not_waited_for():
    async with running() as (service, server), raw_call(server.address) as call:
        await call.write(hello())
        await assert_eventually(lambda: bool(service.handler.opened))
        session = service.handler.opened[0]
        await assert_eventually(lambda: session.connected)

        async def flood() -> None:
            while await session.send(bytes(2**20)):
                pass

        async def beat() -> None:
            request = pb.ActRequest()
            request.heartbeat.SetInParent()
            while not call.done():
                await call.write(request.SerializeToString())
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beat())
        await asyncio.wait_for(flood(), 30)
        beating.cancel()
        await asyncio.wait({beating})
        await assert_eventually(lambda: service.registry.open_count == 0)


async def test_slow_work_in_a_handler_does_not_cost_the_lease():
    rpc = RpcConfig(heartbeat_s=0.05, lease_s=0.3)
    # A client that is more patient than the server: it is the server's lease that is at stake.
    async with running(rpc=rpc) as (service, server), raw_call(server.address, rpc=rpc) as call:
        await call.write(hello())
        epoch = pb.ActResponse.FromString(await call.read()).welcome.session.epoch
        service.handler.gate = asyncio.Event()
        request = pb.ActRequest()
        request.step.seq, request.step.epoch = 1, epoch
        request.step.env_ret.env_id = "env"
        request.step.env_ret.observation.int_value = 1
        await call.write(request.SerializeToString())
        await asyncio.sleep(0.8)
        service.handler.gate.set()
        assert pb.ActResponse.FromString(await call.read()).answer.seq == 1


async def test_a_loop_that_stood_still_does_not_end_leases():
    async with running() as (service, server), connected(server.address) as client:
        await client.ask()
        time.sleep(2 * FAST.lease_s)
        assert (await client.ask()).seq == 2
        await asyncio.sleep(FAST.lease_s)
        assert client.session.epoch == service.registry.open_count == 1


async def test_heartbeats_keep_an_idle_session_and_tell_what_the_client_does():
    async with running() as (service, server), connected(server.address) as client:
        client.session.activity.state = 2
        client.session.activity.busy_since_ns = 5
        await asyncio.sleep(2 * FAST.lease_s)
        session = service.handler.opened[0]
        assert (session.client_state, session.busy_since_ns) == (2, 5)
        assert client.session.connected
        assert client.session.epoch == 1
