"""What a session refuses, and how it says so: specs, sizes, messages out of place."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from gymnasium import spaces

from rlightning.errors import (
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.rpc.channel import connect
from rlightning.testing import assert_eventually
from rlightning.types import EnvRet
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.echo import EchoHandler, EchoService
from tests.integration.rpc.harness import (
    FAST,
    EchoClient,
    connected,
    hello,
    make_meta,
    raw_call,
    running,
    status_of,
)


async def test_another_spec_is_refused_field_by_field():
    service = EchoService(FAST, expected=make_meta())
    other = make_meta(
        observation_space=spaces.Box(-1, 1, (5,), np.float32), action_space=spaces.Discrete(3)
    )
    async with running(service) as (_, server), connect(server.address, rpc=FAST) as channel:
        with pytest.raises(PreconditionError) as refused:
            await EchoClient(channel, spec=other).session.start(5)
        assert "observation_space.shape: expected (4,), got (5,)" in str(refused.value)
        assert "action_space.n: expected 2, got 3" in str(refused.value)
        assert server.address in str(refused.value)
        assert refused.value.reason == "SPEC"
        assert service.handler.opened == []
        async with connected(server.address, spec=make_meta()) as client:
            assert client.welcomes[0].session.spec.num_envs == 8


async def test_a_message_past_the_session_cap_is_refused_on_both_sides():
    rpc = RpcConfig(heartbeat_s=0.1, lease_s=0.6, info_budget_bytes=4096)
    cap = 2 * 8 * 16 + 8 * 8 + 4096
    text = rf"{10**5}.* bytes passes the session's cap of {cap} bytes.*services\.policy\.rpc\.info_"
    async with running(rpc=rpc) as (service, server):
        async with connected(server.address, rpc=rpc, spec=make_meta()) as client:
            assert client.welcomes[0].session.max_message_bytes == cap
            big = client.encode(1, EnvRet("env", np.zeros(10**5, np.uint8)))
            with pytest.raises(ResourceExhaustedError, match=str(len(big))):
                await client.session.send(big)
            await client.session._stream.write(big)  # as a client would that does not check
            await assert_eventually(lambda: client.session.failure is not None)
            assert isinstance(client.session.failure, ResourceExhaustedError)
            assert text.partition(".*")[2].split(".*")[0].strip("\\") in str(client.session.failure)
            assert "services.policy.rpc.info_budget_bytes" in str(client.session.failure)
        assert service.handler.seqs == []


async def test_a_message_past_the_transport_cap_names_size_cap_and_key():
    calm = RpcConfig(heartbeat_s=0.1, lease_s=10)
    small = calm.model_copy(update={"max_message_bytes": 2**17})
    async with running(rpc=small) as (_, server):
        async with connected(server.address, rpc=small) as client:
            big = client.encode(1, EnvRet("env", np.zeros(2**17, np.uint8)))
            with pytest.raises(ResourceExhaustedError) as refused:
                await client.session.send(big)
            for word in (str(len(big)), str(2**17), "services.policy.rpc.max_message_bytes"):
                assert word in str(refused.value)
            assert (await client.ask()).seq == 1  # nothing was sent, so the stream lives
        async with connected(server.address, rpc=calm) as client:  # trusts its own, larger cap
            client.session._stream.cap = 2**30
            await client.session.send(client.encode(1, EnvRet("env", np.zeros(2**17, np.uint8))))
            await assert_eventually(lambda: client.session.failure is not None)
            assert "services.policy.rpc.max_message_bytes" in str(client.session.failure)


async def test_a_hello_is_small_and_what_follows_it_need_not_be(monkeypatch):
    monkeypatch.setattr(EchoHandler, "max_hello_bytes", 4096)
    async with running() as (service, server):
        async with raw_call(server.address) as call:
            await call.write(hello("a" * 5000))
            code, details = await status_of(call)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "a hello of 50" in details
            assert "passes the cap of 4096 bytes" in details
            assert tuple(service.registry.sessions) == ()
        async with connected(server.address) as client:
            assert (await client.ask(np.zeros(10**5, np.uint8))).seq == 1


async def test_an_answer_past_the_cap_is_the_services_own_error():
    async with running() as (service, server), connected(server.address) as client:
        await client.ask()
        session = service.handler.opened[0]
        with pytest.raises(ResourceExhaustedError, match="max_message_bytes"):
            await session.send(bytes(FAST.max_message_bytes + 1))
        assert (await client.ask()).seq == 2


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "ActRequest"),
        (pb.ActRequest().SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (hello("not/allowed"), grpc.StatusCode.INVALID_ARGUMENT, "client id"),
        (hello("x" * 65), grpc.StatusCode.INVALID_ARGUMENT, "client id"),
        (hello(version=2), grpc.StatusCode.FAILED_PRECONDITION, "protocol version 2"),
    ],
)
async def test_a_bad_opening_is_refused_without_a_session(first, code, text):
    async with running() as (service, server), raw_call(server.address) as call:
        await call.write(first)
        got, details = await status_of(call)
        assert (got, text in details) == (code, True), details
        assert tuple(service.registry.sessions) == ()


@pytest.mark.parametrize("second", [hello(), pb.ActRequest().SerializeToString()])
async def test_a_second_hello_or_an_empty_message_ends_the_session(second):
    async with running() as (service, server), raw_call(server.address) as call:
        await call.write(hello())
        await call.read()
        await call.write(second)
        code, _ = await status_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        await assert_eventually(lambda: tuple(service.registry.sessions) == ())


async def test_an_unknown_error_of_the_service_is_internal_and_tells_nothing(caplog):
    async with running() as (service, server), connected(server.address) as client:

        async def fail(session, reader):
            raise KeyError("/secret/path")

        service.handler.on_message = fail
        with pytest.raises(AssertionError, match="no answer"):
            await client.ask(timeout_s=0.2)
        assert "INTERNAL" in str(client.session.failure)
        assert "secret" not in str(client.session.failure)
    assert caplog.text.count("unexpected KeyError") == 1
