"""Calls of the policy service without a session, repeated while it cannot be reached."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from io import BytesIO
from typing import TypeVar

from google.protobuf.message import Message

from rlightning.errors import DeadlineExceededError, RemoteError, UnavailableError
from rlightning.latency import ClockOffset
from rlightning.rpc.channel import Channel, stream_unary, unary, unary_stream
from rlightning.rpc.protocol import measure, stamp
from rlightning.utils.waiting import wait_within
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import split_batch

SERVICE = "rlightning.v1.PolicyService"
"""Full name of the policy service."""

_T = TypeVar("_T")

# What a transfer may take besides its bytes, and the slowest line that weights get through.
_TIMEOUT_S = 10.0
_LEAST_BYTES_PER_S = 2**16


def transfer_timeout_s(nbytes: int) -> float:
    """Returns how long one attempt to move weights of some bytes may take, in seconds."""
    return _TIMEOUT_S + nbytes / _LEAST_BYTES_PER_S


async def send_weights(
    channel: Channel,
    version: int,
    data: bytes,
    *,
    learner_id: str,
    timeout_s: float,
    retry: bool = True,
    policy: str = "",
) -> int:
    """Sends weights and returns the version in use; see `PolicyClient.publish_weights`."""
    header = pb.WeightsHeader(
        policy_version=version,
        total_bytes=len(data),
        sha256=await _sha256(data),
        learner_id=learner_id,
        policy=policy,
    )

    async def requests() -> AsyncIterator[Message]:
        yield pb.PublishWeightsRequest(header=header)
        for _, part in split_batch(data):
            yield pb.PublishWeightsRequest(chunk=bytes(part))

    async def publish(left_s: float) -> int:
        response = await stream_unary(
            channel,
            f"/{SERVICE}/PublishWeights",
            requests(),
            pb.PublishWeightsResponse,
            timeout=left_s,
        )
        return response.policy_version

    if not retry:
        return await publish(timeout_s)
    return await _until_reached(publish, timeout_s)


async def fetch_weights(
    channel: Channel,
    min_version: int,
    *,
    timeout_s: float,
    policy: str = "",
    max_bytes: int | None = None,
    flowing: bool = False,
) -> tuple[int, bytes]:
    """Returns version and bytes of the weights in use; see `PolicyClient.pull_weights`."""

    async def pull(left_s: float) -> tuple[int, bytes]:
        responses = unary_stream(
            channel,
            f"/{SERVICE}/PullWeights",
            pb.PullWeightsRequest(min_policy_version=min_version, policy=policy),
            pb.PullWeightsResponse,
            timeout=left_s,
        )
        header = pb.WeightsHeader()
        received = BytesIO()  # joining parts would need all of it twice
        left = 0
        began = time.monotonic()
        async with aclosing(responses):
            while True:
                wait_s = None
                if flowing:
                    allowed_s = transfer_timeout_s(header.total_bytes - left)
                    wait_s = allowed_s - (time.monotonic() - began)
                response = await _next_of(responses, wait_s, channel.address)
                if response is None:
                    break
                if response.WhichOneof("body") == "header":
                    header, left = response.header, response.header.total_bytes
                    if max_bytes is not None and left > max_bytes:
                        raise RemoteError(
                            f"weights of {left} bytes come; {max_bytes} are allowed",
                            peer=channel.address,
                        )
                    continue
                left -= len(response.chunk)
                if left < 0 or not response.chunk:
                    raise RemoteError(
                        f"expected {header.total_bytes} bytes of weights, as announced",
                        peer=channel.address,
                    )
                received.write(response.chunk)
        data = received.getvalue()
        if await _sha256(data) != header.sha256:
            raise RemoteError("the weights' checksum does not match", peer=channel.address)
        return header.policy_version, data

    return await _until_reached(pull, timeout_s)


async def keep_lease(
    channel: Channel, learner_id: str, *, policy: str = "", leaving: bool = False, timeout_s: float
) -> int:
    """Takes or keeps the lease on publishing, or gives it up; returns the version in use.

    Raises:
        AlreadyExistsError: Another learner holds it.
        UnavailableError: The server cannot be reached.
    """
    request = pb.KeepLeaseRequest(learner_id=learner_id, policy=policy, leaving=leaving)
    response = await unary(
        channel, f"/{SERVICE}/KeepLease", request, pb.KeepLeaseResponse, timeout=timeout_s
    )
    return response.policy_version


async def describe(
    channel: Channel, offset: ClockOffset, *, timeout_s: float
) -> pb.PolicyServiceDescribeResponse:
    """Returns what the server says of itself, and learns of its clock; see `PolicyClient`."""
    return await _until_reached(lambda left_s: look(channel, left_s, offset), timeout_s)


async def look(
    channel: Channel, timeout_s: float, offset: ClockOffset | None = None
) -> pb.PolicyServiceDescribeResponse:
    """Returns what the server says of itself now.

    Args:
        channel: To the server.
        timeout_s: How long to wait for its answer, in seconds.
        offset: Learns of the server's clock.

    Raises:
        UnavailableError: It cannot be reached.
        RemoteError: It answered with an error, or not in time.
    """
    request = pb.PolicyServiceDescribeRequest()
    stamp(request)
    response = await unary(
        channel,
        f"/{SERVICE}/Describe",
        request,
        pb.PolicyServiceDescribeResponse,
        timeout=timeout_s,
    )
    if offset is not None:
        measure(offset, request, response)
    return response


async def _sha256(data: bytes) -> bytes:
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def _next_of(responses: AsyncIterator[_T], timeout_s: float | None, peer: str) -> _T | None:
    """Returns the next response, or None after the last one."""
    try:
        return await wait_within(anext(responses, None), timeout_s)
    except asyncio.TimeoutError:
        raise DeadlineExceededError("the weights do not come, or too slowly", peer=peer) from None


async def _until_reached(call: Callable[[float], Awaitable[_T]], timeout_s: float) -> _T:
    """Repeats a call that may be repeated while the server cannot be reached."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.1
    while True:
        left_s = deadline - time.monotonic()
        try:
            return await call(max(0.001, left_s))
        except UnavailableError:
            if left_s <= pause_s:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)
