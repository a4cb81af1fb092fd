"""Channels to a service, and single calls on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from typing_extensions import Self

from rlightning.errors import ResourceExhaustedError
from rlightning.rpc import status, trace_context
from rlightning.rpc.auth import call_metadata, channel_credentials
from rlightning.rpc.handlers import EOF
from rlightning.rpc.options import channel_options
from rlightning.rpc.trace_context import current_trace
from rlightning.utils.config.rpc import ClientAuthConfig, RpcConfig

_Response = TypeVar("_Response", bound=Message)
Metadata = tuple[tuple[str, str], ...]


class Channel:
    """A gRPC channel that shows the client's token on every call, and whose trace it is part of.

    Messages are bytes.

    Belongs to the event loop in which it was made. `connect` makes it.

    Attributes:
        address: What was dialled.
        rpc: Limits and times.
        metadata: Sent with every call.
    """

    def __init__(
        self,
        address: str,
        make: Callable[[], grpc.aio.Channel],
        rpc: RpcConfig,
        metadata: Metadata,
    ) -> None:
        self.address = address
        self.rpc = rpc
        self.metadata = metadata
        self._make = make
        self._channel = make()

    def unary_unary(self, method: str) -> Callable[..., Any]:
        """Returns the function that calls a method, as gRPC does."""
        return self._with_metadata(self._channel.unary_unary(method, None, None))

    def unary_stream(self, method: str) -> Callable[..., Any]:
        """Returns the function that calls a method, as gRPC does."""
        return self._with_metadata(self._channel.unary_stream(method, None, None))

    def stream_unary(self, method: str) -> Callable[..., Any]:
        """Returns the function that calls a method, as gRPC does."""
        return self._with_metadata(self._channel.stream_unary(method, None, None))

    def stream_stream(self, method: str) -> Callable[..., Any]:
        """Returns the function that calls a method, as gRPC does."""
        return self._with_metadata(self._channel.stream_stream(method, None, None))

    def _with_metadata(self, call: Any) -> Callable[..., Any]:
        # Not an interceptor: gRPC would send every message of a stream through it.
        def start(*args: Any, **kwargs: Any) -> Any:
            trace = current_trace()
            context = () if trace is None else ((trace_context.KEY, trace.traceparent),)
            return call(*args, metadata=self.metadata + context, **kwargs)

        return start

    async def renew(self) -> None:
        """Drops the connection, whatever it is in; calls that are open end with UNAVAILABLE.

        The next call makes another one. A function that was returned before calls over the old one.
        """
        old, self._channel = self._channel, self._make()
        await old.close(None)

    async def close(self) -> None:
        """Closes the connection; calls that are still open end with UNAVAILABLE."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def connect(
    address: str, *, rpc: RpcConfig | None = None, auth: ClientAuthConfig | None = None
) -> Channel:
    """Makes a channel; it connects on its first call, and again whenever it must.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        rpc: Limits and times; default: those of `RpcConfig`.
        auth: Token and certificates; default: none, in plaintext.

    Raises:
        ConfigError: A file that `auth` names cannot be read.
    """
    rpc = rpc or RpcConfig()
    options = channel_options(rpc)
    credentials = channel_credentials(auth, options)

    def make() -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    return Channel(address, make, rpc, call_metadata(auth))


async def unary(
    channel: Channel,
    method: str,
    request: Message,
    response_type: type[_Response],
    *,
    timeout: float,
) -> _Response:
    """Calls a method that takes one message and answers with one.

    Args:
        channel: Where to.
        method: Full name, `/package.Service/Method`.
        request: The message.
        response_type: What comes back.
        timeout: Seconds until the answer must be here.

    Raises:
        RemoteError: The call failed; its class tells how.
    """
    call = channel.unary_unary(method)(_encode(channel, method, request), timeout=timeout)
    try:
        with status.remote_errors(peer=channel.address, method=method):
            data: bytes = await call
    finally:
        call.cancel()
    return _decode(channel, response_type, data)


async def unary_stream(
    channel: Channel,
    method: str,
    request: Message,
    response_type: type[_Response],
    *,
    timeout: float,
) -> AsyncGenerator[_Response, None]:
    """Calls a method that takes one message and answers with several; yields them.

    Close the iterator (`contextlib.aclosing`) when leaving it early: the call goes on until then.

    Args:
        channel: Where to.
        method: Full name, `/package.Service/Method`.
        request: The message.
        response_type: What comes back.
        timeout: Seconds until the last answer must be here.

    Raises:
        RemoteError: The call failed; its class tells how.
    """
    call = channel.unary_stream(method)(_encode(channel, method, request), timeout=timeout)
    try:
        while True:
            with status.remote_errors(peer=channel.address, method=method):
                data = await call.read()
            if data is EOF:
                return
            yield _decode(channel, response_type, data)
    finally:
        call.cancel()


async def stream_unary(
    channel: Channel,
    method: str,
    requests: AsyncIterator[Message | bytes],
    response_type: type[_Response],
    *,
    timeout: float,
) -> _Response:
    """Calls a method that takes several messages and answers with one.

    Args:
        channel: Where to.
        method: Full name, `/package.Service/Method`.
        requests: The messages, encoded or not.
        response_type: What comes back.
        timeout: Seconds until the answer must be here.

    Raises:
        RemoteError: The call failed; its class tells how.
    """
    call = channel.stream_unary(method)(timeout=timeout)
    try:
        with status.remote_errors(peer=channel.address, method=method):
            try:
                async for request in requests:
                    await call.write(_encode(channel, method, request))
                await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.UsageError):
                pass  # the server has answered already; what it said comes next
            data: bytes = await call
    finally:
        call.cancel()
    return _decode(channel, response_type, data)


def _encode(channel: Channel, method: str, request: Message | bytes) -> bytes:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    cap = channel.rpc.max_message_bytes
    if len(data) > cap:
        raise ResourceExhaustedError(
            status.too_large(len(data), cap, method),
            peer=channel.address,
            reason="MESSAGE_TOO_LARGE",
        )
    return data


def _decode(channel: Channel, response_type: type[_Response], data: bytes) -> _Response:
    try:
        return response_type.FromString(data)
    except DecodeError as error:
        raise status.from_code(
            grpc.StatusCode.INTERNAL,
            f"the answer is no valid {response_type.DESCRIPTOR.name}: {error}",
            peer=channel.address,
        ) from error
