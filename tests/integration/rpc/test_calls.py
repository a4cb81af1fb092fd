"""Methods without a session: one message or many, either way."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from rlightning.errors import (
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.rpc.channel import connect, stream_unary, unary_stream
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.harness import FAST, running

PULL = "/rlightning.v1.PolicyService/PullWeights"
PUBLISH = "/rlightning.v1.PolicyService/PublishWeights"


def pull(channel, count: int, timeout: float = 5):
    request = pb.PullWeightsRequest(min_policy_version=count)
    return aclosing(unary_stream(channel, PULL, request, pb.PullWeightsResponse, timeout=timeout))


async def chunks(channel, count: int):
    async with pull(channel, count) as responses:
        async for response in responses:
            yield response.chunk


async def publish(channel, *chunks: bytes) -> int:
    async def requests():
        for chunk in chunks:
            yield pb.PublishWeightsRequest(chunk=chunk)

    response = await stream_unary(
        channel, PUBLISH, requests(), pb.PublishWeightsResponse, timeout=5
    )
    return response.policy_version


async def test_many_answers_come_in_order():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        assert [chunk[0] async for chunk in chunks(channel, 100)] == list(range(100))


async def test_an_error_after_some_answers_is_raised_after_them():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        got = chunks(channel, 2)
        assert [await anext(got), await anext(got)] == [b"\0", b"\1"]
        with pytest.raises(NotFoundError, match="no more"):
            await anext(got)


async def test_leaving_early_ends_the_call():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        async with pull(channel, 1) as responses:
            assert (await anext(responses)).chunk == b"\0"
        begun = time.monotonic()
        await server.stop(grace_s=30)
        assert time.monotonic() - begun < 15


async def test_an_open_call_does_not_hold_up_the_stop():
    async with (
        running() as (_, server),
        connect(server.address, rpc=FAST) as channel,
        pull(channel, 1) as responses,
    ):
        await anext(responses)
        begun = time.monotonic()
        await server.stop(grace_s=30)
        assert time.monotonic() - begun < 15
        with pytest.raises(UnavailableError):
            await anext(responses)


async def test_many_requests_get_one_answer():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        assert await publish(channel, bytes(10), bytes(20)) == 30
        assert await publish(channel) == 0


async def test_a_refusal_comes_before_all_requests_were_sent():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        with pytest.raises(InvalidRequestError, match="an empty chunk"):
            await publish(channel, b"", *[bytes(2**20)] * 50)


async def test_a_request_past_the_cap_is_not_sent():
    small = RpcConfig(max_message_bytes=2**17)
    async with running() as (_, server), connect(server.address, rpc=small) as channel:
        with pytest.raises(ResourceExhaustedError, match=r"services\.policy\.rpc\.max_message"):
            await publish(channel, bytes(2**17))


async def test_a_call_to_nobody_is_unavailable():
    async with connect("127.0.0.1:1", rpc=FAST) as channel:
        with pytest.raises(UnavailableError, match="cannot connect"):
            await publish(channel, bytes(10))
        with pytest.raises(UnavailableError, match="cannot connect"):
            await anext(chunks(channel, 1))


async def test_a_cancelled_call_raises_what_cancels_it():
    async with running() as (_, server), connect(server.address, rpc=FAST) as channel:
        calling = asyncio.create_task(publish_forever(channel))
        await asyncio.wait({calling}, timeout=0.05)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()


async def publish_forever(channel) -> None:
    async def requests():
        while True:
            yield pb.PublishWeightsRequest(chunk=bytes(10))
            await asyncio.sleep(0.01)

    await stream_unary(channel, PUBLISH, requests(), pb.PublishWeightsResponse, timeout=5)
