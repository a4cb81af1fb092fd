"""Channels to a service, and single calls on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from typing_extensions import Self

from rlightning.errors import PreconditionError, ResourceExhaustedError, UnavailableError
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
        connection: Number of the connection that the next call goes over.
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
        self.connection = 0
        self._closed = False
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
            if self._closed:  # not UNAVAILABLE, after which many would try again
                raise PreconditionError("the channel was closed", peer=self.address)
            trace = current_trace()
            context = () if trace is None else ((trace_context.KEY, trace.traceparent),)
            return call(*args, metadata=self.metadata + context, **kwargs)

        return start

    @contextmanager
    def call_errors(self, method: str) -> Iterator[None]:
        """Turns what ends a call that is made inside into a RemoteError; around all of the call.

        gRPC cancels the calls of a connection that is given up, and so whoever awaits one.

        Args:
            method: Full name of the method.
        """
        connection = self.connection
        try:
            with status.remote_errors(peer=self.address, method=method):
                yield
        except asyncio.CancelledError:
            if self.connection == connection or own_cancellation(True):
                raise
            raise self.given_up() from None

    async def renew(self, connection: int | None = None) -> None:
        """Drops the connection, whatever it is in; calls that are open end with UNAVAILABLE.

        The next call makes another one. A function that was returned before calls over the old one.
        Before Python 3.11, a task whose call ends by this and that is cancelled before it has seen
        so gets the UNAVAILABLE, too, and not its CancelledError.

        Args:
            connection: Drop this one only: if there is another one by now, keep that. None: drop
                what is there.
        """
        if not self._closed and connection in (None, self.connection):
            old, self._channel = self._channel, self._make()
            self.connection += 1
            await old.close(None)

    def given_up(self) -> UnavailableError:
        """Returns why a call ended whose connection was given up."""
        what = "the channel was closed" if self._closed else "the connection was given up"
        return UnavailableError(what, peer=self.address)

    async def close(self) -> None:
        """Closes the connection for good; calls that are open end with UNAVAILABLE, as in `renew`.

        A call that is made later raises a PreconditionError.
        """
        self._closed = True
        self.connection += 1
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


def own_cancellation(given_up: bool) -> bool:
    """Tells whether a CancelledError is meant for this task, rather than for the call it awaits.

    Args:
        given_up: Whether the call was given up here. All that is known before Python 3.11: a
            CancelledError is the task's unless this is so.
    """
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)
    return cancelling() > 0 if cancelling is not None else not given_up


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
        with channel.call_errors(method):
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
        with channel.call_errors(method):
            while (data := await call.read()) is not EOF:
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

    async def write() -> None:
        try:
            async for request in requests:
                await call.write(_encode(channel, method, request))
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.UsageError):
            pass  # the server has answered already; what it said comes next

    # A write that waits for the connection does not notice that its call has ended.
    writing = asyncio.create_task(write())
    call.add_done_callback(lambda _: writing.cancel())
    try:
        with channel.call_errors(method):
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.result()
            data: bytes = await call
    finally:
        call.cancel()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
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
