"""Sessions over real sockets: opening, resuming, fencing, clocks."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import numpy as np
import pytest

from rlightning.errors import AlreadyExistsError, PreconditionError, UnavailableError
from rlightning.rpc.channel import connect
from rlightning.rpc.handlers import EOF
from rlightning.rpc.stream import Stream
from rlightning.testing import FaultProxy, assert_eventually, free_address
from rlightning.types import EnvRet
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.session_pb2 import CLIENT_STATE_LEAVING
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    hello,
    open_session,
    raw_call,
    running,
)


async def test_a_request_is_answered_under_its_number_and_measures_the_clock():
    async with running() as (service, server), connected(server.address) as client:
        answers = [await client.ask() for _ in range(3)]
    assert [answer.seq for answer in answers] == [1, 2, 3]
    assert client.session.offset.estimate() == (0, 0)  # one machine, one monotonic clock
    welcome = client.welcomes[0]
    assert welcome.policy_version == 7
    assert welcome.session.heartbeat_ms == 1000 * FAST.heartbeat_s
    assert welcome.session.lease_ms == 1000 * FAST.lease_s
    assert welcome.session.resume_window_ms == 1000 * FAST.resume_window_s
    assert (welcome.session.reconnect_initial_ms, welcome.session.reconnect_max_ms) == (100, 1000)
    assert not welcome.session.resumed
    assert service.handler.closed == [("a", False)]


async def test_half_close_frees_the_client_id_at_once():
    async with running() as (_, server):
        for _ in range(3):
            async with connected(server.address) as client:
                await client.ask()
                assert client.session.epoch == 1


async def test_a_client_that_goes_before_it_says_anything_leaves_nothing_behind():
    async with running() as (service, server):
        for _ in range(3):
            async with raw_call(server.address) as call:
                await call.write(hello())
                await call.read()
            await assert_eventually(lambda: not service.registry.sessions)
        assert service.handler.closed == [("a", False)] * 3


async def test_a_session_that_comes_back_waits_until_its_end_has_been_dealt_with():
    async with running() as (service, server):
        noted, on_close = asyncio.Event(), service.handler.on_close

        async def slow(session, *, resumable):
            await noted.wait()
            await on_close(session, resumable=resumable)

        service.handler.on_close = slow
        async with raw_call(server.address) as call:
            token = (await open_session(call)).session.resume_token
            call.cancel()
            await assert_eventually(lambda: service.registry.open_count == 0)
        async with raw_call(server.address) as call:
            await call.write(hello(token=token))
            await asyncio.sleep(0.2)
            assert len(service.handler.opened) == 1
            noted.set()
            assert pb.ActResponse.FromString(await call.read()).welcome.session.resumed
            assert service.handler.closed == [("a", True)]


async def test_a_stream_that_is_ended_in_its_welcome_tells_its_client_so(monkeypatch):
    write = Stream.write

    async def interrupted(stream, data):
        asyncio.get_running_loop().call_soon(stream.end, UnavailableError("too slow"))
        return await write(stream, data)

    monkeypatch.setattr(Stream, "write", interrupted)
    async with running() as (_, server), raw_call(server.address) as call:
        await call.write(hello())
        with pytest.raises(grpc.aio.AioRpcError, match="too slow"):
            await asyncio.wait_for(_read_to_the_end(call), 30)


async def _read_to_the_end(call):
    while await call.read() is not EOF:
        pass


async def test_a_half_close_without_a_farewell_is_taken_for_a_cut():
    async with running() as (service, server):
        async with raw_call(server.address) as call:
            token = (await open_session(call)).session.resume_token
            await call.done_writing()
            await assert_eventually(lambda: service.handler.closed == [("a", True)])
        async with raw_call(server.address) as call:
            await call.write(hello(token=token))
            assert pb.ActResponse.FromString(await call.read()).welcome.session.resumed
            leaving = pb.ActRequest()
            leaving.heartbeat.state = CLIENT_STATE_LEAVING
            await call.write(leaving.SerializeToString())
            await call.done_writing()
            await assert_eventually(lambda: service.handler.closed[1:] == [("a", False)])


async def test_many_tasks_may_send_at_once():
    async with running() as (service, server), connected(server.address) as client:
        answers = await asyncio.gather(*(client.ask() for _ in range(100)))
        assert sorted(answer.seq for answer in answers) == list(range(1, 101))
        assert service.handler.seqs == list(range(1, 101))


async def test_many_tasks_of_the_server_may_send_at_once():
    async with running() as (service, server), raw_call(server.address) as call:
        await call.write(hello())
        await call.read()
        session = service.handler.opened[0]
        await assert_eventually(lambda: session.connected)
        messages = []
        for number in range(100):
            messages.append(pb.ActResponse())
            messages[-1].answer.seq = number
        assert all(await asyncio.gather(*map(session.send, messages)))
        for number in range(100):
            assert pb.ActResponse.FromString(await call.read()).answer.seq == number


async def test_a_second_client_under_one_id_is_told_when_to_retry():
    async with running() as (_, server), connected(server.address) as first:
        async with connect(server.address, rpc=FAST) as channel:
            second = EchoClient(channel)
            with pytest.raises(AlreadyExistsError, match=r"retry in \d+ s"):
                await second.session.start(0.3)
        assert (await first.ask()).seq == 1


async def test_a_client_that_vanished_can_be_replaced_after_its_lease():
    async with running() as (service, server):
        async with raw_call(server.address) as call:
            await open_session(call)
        begun = time.monotonic()
        async with connected(server.address) as client:
            await client.ask()
        assert FAST.lease_s * 0.5 < time.monotonic() - begun < FAST.lease_s + 15
        assert service.handler.closed[:2] == [("a", True), ("a", False)]


async def test_a_cut_is_resumed_and_the_unanswered_request_answered_once_more():
    async with running() as (service, server), FaultProxy(server.address) as proxy:
        async with connected(proxy.address) as client:
            await client.ask()
            service.handler.gate = asyncio.Event()
            asking = asyncio.create_task(client.ask())
            await assert_eventually(lambda: server and client.seq == 2)
            proxy.reset()
            await assert_eventually(lambda: len(client.welcomes) == 2)
            service.handler.gate.set()
            assert (await asking).seq == 2
            assert client.session.epoch == 2
            assert client.session.resumed
            assert list(service.handler.opened[-1].state) == [1, 2]
        assert service.handler.opened[0] is service.handler.opened[1]
    assert service.handler.closed == [("a", True), ("a", False)]


async def test_a_takeover_fences_the_old_stream_before_the_new_one_opens():
    async with running() as (service, server), connected(server.address) as client:
        token = client.welcomes[0].session.resume_token
        async with raw_call(server.address) as call:
            await call.write(hello(token=token))
            welcome = pb.ActResponse.FromString(await call.read()).welcome
            assert welcome.session.epoch == 2
            assert welcome.session.resumed
            await assert_eventually(lambda: client.session.failure is not None)
            assert isinstance(client.session.failure, PreconditionError)
            assert client.session.failure.reason == "FENCED"
            assert client.failures == [client.session.failure]
            assert service.handler.closed == [("a", True)]
            with pytest.raises(PreconditionError):
                await client.session.send(b"")


async def test_a_message_of_another_epoch_is_refused():
    async with running() as (service, server), connected(server.address) as client:
        await client.session.send(client.encode(1, EnvRet("env", np.zeros(2)), epoch=7))
        await assert_eventually(lambda: client.session.failure is not None)
    assert client.session.failure.reason == "EPOCH"
    assert service.handler.seqs == []


async def test_after_a_restart_of_the_server_a_new_session_begins_within_a_second():
    async with running() as (_, server):
        address = server.address
        client_ready = connected(address)
        client = await client_ready.__aenter__()
        await client.ask()
    await asyncio.sleep(0.5)  # so that the pauses between attempts grow
    begun = time.monotonic()
    async with running(listen=address) as (service, _):
        assert (await client.ask()).seq == 2
        assert time.monotonic() - begun < 10
        assert client.session.epoch == 1
        assert not client.session.resumed
        assert service.handler.seqs == [2]
        await client_ready.__aexit__(None, None, None)


async def test_a_service_that_comes_back_on_another_node_is_found_there():
    port = free_address("127.0.0.2").rpartition(":")[2]
    nodes = [f"127.0.0.{number}:{port}" for number in (2, 3)]  # each with the port of the service
    async with AsyncExitStack() as stack:
        async with running(listen=nodes[1]):
            address = f"ipv4:{','.join(nodes)}"
            client = await stack.enter_async_context(connected(address))
            await client.ask()
        async with running(listen=nodes[0]):
            await client.ask()
            assert len(client.welcomes) == 2
            assert not client.welcomes[1].session.resumed
            await client.session.close()


async def test_a_client_that_was_cut_waits_as_long_as_its_server_told_it():
    rpc = FAST.model_copy(update={"reconnect_initial_ms": 400})
    async with running(rpc=rpc) as (_, server), FaultProxy(server.address) as proxy:
        async with connected(proxy.address) as client:
            proxy.cut()
            await assert_eventually(lambda: not client.session.connected)
            begun = time.monotonic()
            await assert_eventually(lambda: client.session.connected)
            assert time.monotonic() - begun > 0.3


@pytest.mark.parametrize("pause_ms", [20_000, 1], ids=["in a pause", "while it dials"])
async def test_a_client_that_is_closed_between_two_streams_gives_its_place_back(pause_ms):
    pauses = {"reconnect_initial_ms": pause_ms, "reconnect_max_ms": pause_ms}
    rpc = FAST.model_copy(update={"resume_window_s": 60.0, **pauses})
    async with running(rpc=rpc) as (service, server), FaultProxy(server.address) as proxy:
        async with connected(proxy.address) as client:
            await client.ask()
            proxy.delay_s = 0.05
            proxy.cut()
            if pause_ms == 1:
                await assert_eventually(lambda: proxy.accepted > 1)
            else:
                await assert_eventually(lambda: not client.session.connected)
        await assert_eventually(lambda: not service.registry.sessions)
        assert service.handler.closed[0] == ("a", True)
        assert service.handler.closed[-1] == ("a", False)


async def test_a_close_does_not_wait_long_for_a_server_that_is_away():
    rpc = FAST.model_copy(update={"connect_timeout_ms": 60_000})
    async with running() as (_, server), FaultProxy(server.address) as proxy:
        async with connected(proxy.address, rpc=rpc) as client:
            proxy.black_hole()
            await assert_eventually(lambda: not client.session.connected)
            await asyncio.wait_for(client.session.close(), 10)


async def test_a_server_learns_of_the_clock_of_a_client_on_another_machine(monkeypatch):
    async with running() as (service, server):
        async with connected(server.address) as client:
            assert service.handler.opened[0].offset.estimate() == (0, 0)  # one machine
        monkeypatch.setattr("rlightning.rpc.client.boot_id", lambda: "elsewhere")
        async with connected(server.address) as client:
            offset = service.handler.opened[1].offset
            await assert_eventually(lambda: offset.estimate() is not None)
            offset_ns, within_ns = offset.estimate()
            assert abs(offset_ns) <= within_ns
            assert within_ns > 0
            assert offset.clock_id == client.session.offset.clock_id  # both of this process


async def test_when_a_message_left_is_known_by_the_clock_that_heartbeats_tell_of():
    ahead_ns = 3600 * 10**9
    async with running() as (service, server), raw_call(server.address) as call:
        request = pb.ActRequest.FromString(hello())
        for number in range(4):
            request.timing.clock_id = "theirs"
            request.timing.sent_ns = time.monotonic_ns() + ahead_ns
            await call.write(request.SerializeToString())
            answer = pb.ActResponse.FromString(await call.read())
            heard_ns = time.monotonic_ns() + ahead_ns
            (session,) = service.handler.opened
            left = session.when_left(request)()
            assert (left is None) is (number == 0)  # the hello, which echoes nothing
            request = pb.ActRequest()
            request.heartbeat.SetInParent()
            request.timing.echo_sent_ns = answer.timing.sent_ns
            request.timing.received_ns = heard_ns
        offset_ns, within_ns = session.offset.estimate()
        assert abs(offset_ns - ahead_ns) <= within_ns < 60 * 10**9
        sent_ns = session.arrival.sent_ns - ahead_ns
        request.timing.clock_id = "theirs"
        left_ns, within_ns = session.when_left(request)()
        assert abs(left_ns - sent_ns) <= within_ns + 1
        assert left_ns <= session.arrival.received_ns
        request.timing.clock_id = "another"  # its machine has slept
        assert session.when_left(request)() is None
        request.timing.clock_id = "x" * 10**6  # no name of a clock: it is not kept
        await call.write(request.SerializeToString())
        await call.read()
        assert session.offset.clock_id == "theirs"
        assert session.when_left(request)() is None


async def test_a_callback_that_raises_fails_the_session_and_not_silently(caplog):
    async with running() as (_, server), connected(server.address) as client:
        client.explode = True
        with pytest.raises(AssertionError, match="no answer"):
            await client.ask(timeout_s=0.2)
        assert "ZeroDivisionError" in str(client.session.failure)
    assert "a callback of the session raised" in caplog.text
