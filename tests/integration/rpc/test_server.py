"""Listeners, health, start, drain and stop of a server in this process."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rlightning.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from rlightning.rpc import health
from rlightning.rpc.channel import connect, unary
from rlightning.rpc.health import ServingStatus, check_health
from rlightning.rpc.server import serve
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvRet
from rlightning.utils.config.rpc import ListenConfig, RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import FAST, EchoClient, connected, hello, raw_call, running

DESCRIBE = "/rlightning.v1.PolicyService/Describe"
SERVING, NOT_SERVING = ServingStatus.SERVING, ServingStatus.NOT_SERVING


async def describe(address: str, timeout: float = 5) -> pb.PolicyServiceDescribeResponse:
    async with connect(address, rpc=FAST) as channel:
        request = pb.PolicyServiceDescribeRequest()
        return await unary(
            channel, DESCRIBE, request, pb.PolicyServiceDescribeResponse, timeout=timeout
        )


async def test_health_follows_the_start_and_the_stop():
    service = EchoService(FAST)
    service.go.clear()
    server = await serve(service, rpc=FAST)
    names = ("", "readiness", service.name)
    assert [await health.check(server.address, name) for name in names] == [NOT_SERVING] * 3
    assert await health.check(server.address, "liveness") is SERVING
    service.go.set()
    await server.ready()
    assert [await health.check(server.address, name) for name in names] == [SERVING] * 3
    with pytest.raises(NotFoundError):
        await health.check(server.address, "nobody")
    await server.stop()
    with pytest.raises(UnavailableError):
        await health.check(server.address)


async def test_the_stock_health_client_is_answered():
    async with running() as (service, server), grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service.name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: status.status for name, status in listed.statuses.items()} == dict.fromkeys(
            ("", "readiness", "liveness", service.name), 1
        )
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await watch.read()).status == unknown
        watch.cancel()


async def test_a_watch_sees_not_serving_before_the_port_closes():
    async with running() as (service, server), grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        # As watchers do, it reads already: what nobody reads may be dropped when the stream ends.
        last = asyncio.create_task(watch.read())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(server.stop())
        assert (await last).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        await stopping
    assert service.log == ["start", "drain", "close"]


async def test_a_stop_with_idle_streams_and_watchers_uses_none_of_the_grace():
    async with (
        running() as (service, server),
        connected(server.address) as client,
        raw_call(server.address) as call,
    ):
        await call.write(hello("idle"))
        await call.read()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            begun = time.monotonic()
            await server.stop(grace_s=30)
            assert time.monotonic() - begun < 15
            watch.cancel()
        drain = pb.ActResponse.FromString(await call.read()).drain
        assert 15_000 < drain.deadline_ms <= 30_000
        assert client.session.draining
        await assert_eventually(lambda: not client.session.connected)
        assert client.session.failure is None  # it tries again, for it may come back
    assert ("a", False) in service.handler.closed


async def test_what_is_in_flight_is_answered_before_the_streams_end():
    service = EchoService(FAST)

    async def drain(deadline_s):
        service.handler.gate.set()
        await assert_eventually(lambda: service.handler.seqs == [1])

    service.drain = drain
    async with running(service) as (_, server), connected(server.address) as client:
        service.handler.gate = asyncio.Event()
        asking = asyncio.create_task(client.ask())
        await assert_eventually(
            lambda: service.handler.opened and service.handler.opened[0].arrival
        )
        await server.stop(grace_s=5)
        assert (await asking).seq == 1


async def test_a_client_that_is_stopped_in_the_middle_of_a_write_tries_again():
    async with running() as (service, server), connected(server.address) as client:
        service.handler.gate = asyncio.Event()  # the server reads nothing more after one message
        big = client.encode(1, EnvRet("env", np.zeros(2**20, np.uint8)))

        async def flood() -> None:
            while await client.session.send(big):
                pass

        flooding = asyncio.create_task(flood())
        await assert_eventually(lambda: bool(service.handler.opened))
        await asyncio.wait({flooding}, timeout=0.1)
        assert client.session._stream.writing
        await server.stop(grace_s=1)
        await flooding
        await assert_eventually(lambda: not client.session.connected)
        assert client.session.failure is None


async def test_a_drain_that_hangs_ends_with_the_grace(caplog):
    service = EchoService(FAST)

    async def hang(deadline_s):
        await asyncio.Event().wait()

    service.drain = hang
    async with running(service) as (_, server), connected(server.address):
        begun = time.monotonic()
        await server.stop(grace_s=1.0)
        assert time.monotonic() - begun < 15
    assert "drain took more than" in caplog.text
    assert service.log[-1] == "close"


async def test_calls_wait_for_the_start_and_then_go_through():
    service = EchoService(FAST)
    service.go.clear()
    server = await serve(service, rpc=FAST)
    call = asyncio.create_task(describe(server.address))
    async with connect(server.address, rpc=FAST) as channel:
        client = EchoClient(channel)
        opening = asyncio.create_task(client.session.start(5))
        await asyncio.sleep(0.1)
        assert service.log == []
        assert service.handler.opened == []
        service.go.set()
        await call
        await opening
        assert (await client.ask()).seq == 1
        await client.session.close()
    await server.stop()


async def test_an_early_method_is_served_while_the_service_starts():
    service = EchoService(FAST)
    service.go.clear()
    service.early_methods = {"Describe"}
    server = await serve(service, rpc=FAST)
    await describe(server.address)
    assert service.log == ["describe"]
    await server.stop()
    assert service.log == ["describe", "close"]  # never started, so nothing to drain
    with pytest.raises(UnavailableError, match="stopped before"):
        await server.ready()


async def test_a_start_that_raises_is_told_to_who_waits():
    service = EchoService(FAST)

    async def fail():
        raise ConfigError("no such model")

    service.start = fail
    server = await serve(service, rpc=FAST)
    with pytest.raises(ConfigError, match="no such model"):
        await server.ready()
    assert await health.check(server.address) is NOT_SERVING
    await server.stop()


async def test_a_taken_port_is_an_error_and_not_shared():
    async with running() as (_, server):
        with pytest.raises(ConfigError, match=f"cannot listen on {server.address}"):
            await serve(EchoService(FAST), listen=[ListenConfig(address=server.address)])
        await describe(server.address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "expected HOST:PORT"),
        ("127.0.0.1:http", "expected HOST:PORT"),
        ("127.0.0.1:99999", "a port of at most 65535"),
        ("198.51.100.7:0", "cannot assign requested address"),
        ("no-such-host.invalid:0", "not known|failure in name resolution"),
    ],
)
async def test_an_address_that_cannot_be_listened_on(address, reason):
    listen = [ListenConfig(plaintext=True).model_copy(update={"address": address})]
    with pytest.raises(ConfigError, match=rf"cannot listen on {address}: .*({reason})"):
        await serve(EchoService(FAST), listen=listen, rpc=FAST)


async def test_several_listeners_serve_one_service():
    listen = [ListenConfig(), ListenConfig(address="[::1]:0"), ListenConfig(address="localhost:0")]
    service = EchoService(FAST)
    server = await serve(service, listen=listen[:1] + listen[2:], rpc=FAST)
    await server.ready()
    assert len(set(server.addresses)) == 2
    for address in server.addresses:
        async with connected(address):
            assert (await describe(address)).sessions == 1
    await server.stop()


async def test_reflection_shows_the_services_when_asked_for():
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for wanted in (True, False):
        server = await serve(EchoService(FAST), rpc=FAST, reflection=wanted)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([request]))
            if wanted:
                names = {s.name for s in (await call.read()).list_services_response.service}
                assert {"rlightning.v1.PolicyService", "grpc.health.v1.Health"} <= names
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            call.cancel()
        await server.stop()


async def test_a_request_that_does_not_decode_is_invalid():
    async with running() as (service, server), connect(server.address, rpc=FAST) as channel:
        call = channel.unary_unary(DESCRIBE)(b"\xff", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.log == ["start"]


async def test_errors_of_a_unary_method_keep_their_meaning():
    service = EchoService(FAST)
    errors = iter([InvalidRequestError("no", reason="BECAUSE"), KeyError("secret")])

    async def fail(request, context):
        raise next(errors)

    service.describe = fail
    async with running(service) as (_, server):
        with pytest.raises(InvalidRequestError, match=f"{server.address}: no") as refused:
            await describe(server.address)
        assert refused.value.reason == "BECAUSE"
        with pytest.raises(Exception, match="INTERNAL: internal error"):
            await describe(server.address)


async def test_a_call_has_a_deadline():
    service = EchoService(FAST)

    async def hang(request, context):
        await asyncio.Event().wait()

    service.describe = hang
    async with running(service) as (_, server):
        with pytest.raises(DeadlineExceededError):
            await describe(server.address, timeout=0.1)


async def test_the_probe_tells_serving_from_all_else():
    async with running() as (_, server):
        address = server.address
        assert await asyncio.to_thread(check_health, address, "readiness")
        assert not await asyncio.to_thread(check_health, address, "nobody")
    begun = time.monotonic()
    assert not await asyncio.to_thread(check_health, address)
    async with FaultProxy(address) as proxy:
        proxy.black_hole()
        assert not await asyncio.to_thread(check_health, proxy.address, timeout_s=0.2)
    assert time.monotonic() - begun < 15


async def test_frequent_pings_on_an_idle_stream_are_welcome():
    # With gRPC's own limits, the fourth ping ends the connection with too_many_pings, after 4 s.
    rpc = RpcConfig(keepalive_time_s=1, keepalive_timeout_s=1, heartbeat_s=20, lease_s=40)
    async with running(rpc=rpc) as (_, server), connected(server.address, rpc=rpc) as client:
        await asyncio.sleep(4.5)
        assert (await client.ask()).seq == 1
        assert client.session.epoch == 1


async def test_a_connection_over_a_long_way_is_made_in_the_first_attempt():
    async with running(rpc=RpcConfig()) as (_, server), FaultProxy(server.address) as proxy:
        proxy.delay_s = 0.15
        async with connected(proxy.address, rpc=RpcConfig()) as client:
            assert (await client.ask()).seq == 1
            assert proxy.accepted == 1
