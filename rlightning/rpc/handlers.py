"""gRPC handlers of methods that exchange bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from rlightning.errors import InvalidRequestError, ResourceExhaustedError
from rlightning.rpc import status

if TYPE_CHECKING:  # the stubs' classes are generic, those of gRPC are not
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    GenericHandler = grpc.GenericRpcHandler[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    Handler = grpc.RpcMethodHandler
    GenericHandler = grpc.GenericRpcHandler
    ServerInterceptor = grpc.aio.ServerInterceptor

EOF: Any = vars(grpc.aio)["EOF"]
"""What a read returns when the other side has half-closed; missing in the stubs."""

_DISCARD_S = 5.0
# A list of numbers takes many times its encoded size once it is read. Nothing that is asked for
# without a session needs more; a chunk of weights, the largest, has half of that.
_MAX_REQUEST_BYTES = 2 * 2**20

_Request = TypeVar("_Request", bound=Message)


class MethodHandler(Handler):
    """A handler of raw bytes.

    Args:
        kind: Name of the method of gRPC that it stands for, such as `unary_stream`.
        behaviour: What is called.
    """

    request_deserializer = None
    response_serializer = None
    unary_unary = None
    unary_stream = None
    stream_unary = None
    stream_stream = None

    def __init__(self, kind: str, behaviour: Callable[..., Any]) -> None:
        self.request_streaming = kind.startswith("stream_")
        self.response_streaming = kind.endswith("_stream")
        setattr(self, kind, behaviour)


def unary_unary(
    request_type: type[_Request], method: Callable[[_Request, Context], Awaitable[Message | bytes]]
) -> Handler:
    """Makes a handler of a method that takes one message and answers with one.

    Bytes that do not decode end the call with INVALID_ARGUMENT, errors of this library with their
    own status, all others with INTERNAL.
    """

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            return _encode(await method(_decode(request_type, data), context))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await status.abort(context, error)

    return MethodHandler("unary_unary", handle)


def unary_stream(
    request_type: type[_Request],
    method: Callable[[_Request, Context], AsyncIterator[Message | bytes]],
) -> Handler:
    """Makes a handler of a method that answers one message with several; see `unary_unary`."""

    async def handle(data: bytes, context: Context) -> None:
        try:
            async for response in method(_decode(request_type, data), context):
                await context.write(_encode(response))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await status.abort(context, error)

    return MethodHandler("unary_stream", handle)


def stream_unary(
    request_type: type[_Request],
    method: Callable[[AsyncIterator[_Request], Context], Awaitable[Message | bytes]],
) -> Handler:
    """Makes a handler of a method that answers several messages with one; see `unary_unary`."""

    async def handle(requests: AsyncIterator[bytes], context: Context) -> bytes:
        async def decoded() -> AsyncIterator[_Request]:
            async for data in requests:
                yield _decode(request_type, data)

        try:
            return _encode(await method(decoded(), context))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _discard(requests)
            await status.abort(context, error)

    return MethodHandler("stream_unary", handle)


async def _discard(requests: AsyncIterator[bytes]) -> None:
    """Reads what the client still sends, for some seconds.

    A client of gRPC's Python that is stopped in the middle of a write takes that for an internal
    error, and never sees the status.
    """

    async def read() -> None:
        async for _ in requests:
            pass

    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait({reading}, timeout=_DISCARD_S)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _decode(request_type: type[_Request], data: bytes) -> _Request:
    if len(data) > _MAX_REQUEST_BYTES:
        raise ResourceExhaustedError(
            f"a {request_type.DESCRIPTOR.name} of {len(data)} bytes; {_MAX_REQUEST_BYTES} are "
            "allowed: ask for less at once",
            reason="MESSAGE_TOO_LARGE",
        )
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"no valid {request_type.DESCRIPTOR.name}: {error}") from error


def _encode(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
