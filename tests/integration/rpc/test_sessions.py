"""Sessions over real sockets: opening, leases, resuming, fencing."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np
import pytest

from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.policy.transfer import send_weights
from rlightning.rpc import channel as channels
from rlightning.rpc.channel import connect, stream_unary, unary, unary_stream
from rlightning.rpc.handlers import EOF
from rlightning.rpc.stream import Stream
from rlightning.testing import FaultProxy, assert_eventually, free_address
from rlightning.types import EnvRet
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.session_pb2 import CLIENT_STATE_LEAVING
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    hello,
    open_session,
    raw_call,
    running,
    status_of,
)


async def test_a_request_is_answered_under_its_number_and_measures_the_clock():
    async with running() as (service, server), connected(server.address) as client:
        answers = [await client.ask() for _ in range(3)]
    assert [answer.seq for answer in answers] == [1, 2, 3]
    assert client.session.offset.estimate() == (0, 0)  # one machine, one monotonic clock
    welcome = client.welcomes[0]
    assert welcome.policy_version == 7
    assert (welcome.session.heartbeat_ms, welcome.session.lease_ms) == (100, 600)
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


async def test_a_stream_that_is_ended_in_its_welcome_tells_its_client_so(monkeypatch):
    write = Stream.write

    async def interrupted(stream, data):
        asyncio.get_running_loop().call_soon(stream.end, UnavailableError("too slow"))
        return await write(stream, data)

    monkeypatch.setattr(Stream, "write", interrupted)
    async with running() as (_, server), raw_call(server.address) as call:
        await call.write(hello())
        with pytest.raises(grpc.aio.AioRpcError, match="too slow"):
            await asyncio.wait_for(_read_to_the_end(call), 5)


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
        assert FAST.lease_s * 0.5 < time.monotonic() - begun < FAST.lease_s + 5
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
        assert time.monotonic() - begun < 3
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
        assert FAST.lease_s * 0.5 < time.monotonic() - begun < FAST.lease_s + 3
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
                    assert time.monotonic() - begun < 5
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
        await asyncio.wait_for(flood(), 5)
        beating.cancel()
        await asyncio.wait({beating})
        await assert_eventually(lambda: service.registry.open_count == 0)


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
        assert time.monotonic() - begun < 5


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
        await asyncio.wait(calls, timeout=10)
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
        await asyncio.wait(calls, timeout=10)
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
            await asyncio.wait_for(call, 10)
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
        await asyncio.wait({publishing}, timeout=10)
        assert publishing.cancelled()


async def test_a_callback_that_raises_fails_the_session_and_not_silently(caplog):
    async with running() as (_, server), connected(server.address) as client:
        client.explode = True
        with pytest.raises(AssertionError, match="no answer"):
            await client.ask(timeout_s=0.2)
        assert "ZeroDivisionError" in str(client.session.failure)
    assert "a callback of the session raised" in caplog.text
