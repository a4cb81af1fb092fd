"""Counts the calls of a server and what came of them, for metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio

from rlightning.latency.histogram import Counts
from rlightning.rpc.handlers import Context, Handler, MethodHandler, ServerInterceptor

# Seconds. A call that is a session lasts as long as that.
_EDGES_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0, 3600.0)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_TYPES = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


class MethodCalls:
    """The calls of one method.

    Attributes:
        kind: `unary`, `client_stream`, `server_stream` or `bidi_stream`.
        started: How many there were; those that are not handled yet are open.
        handled: How many have ended, by the name of their status code.
        seconds: How long they lasted.
    """

    def __init__(self, handler: Handler) -> None:
        self.kind = _TYPES[bool(handler.request_streaming), bool(handler.response_streaming)]
        self.started = 0
        self.handled: Counter[str] = Counter()
        self.seconds = Counts(_EDGES_S)

    def counting(self, handler: Handler) -> Handler:
        """Returns a handler that does what another one does, and is counted."""
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        behaviour: Callable[[Any, Context], Awaitable[Any]] = getattr(handler, kind)

        async def counted(request: Any, context: Context) -> Any:
            self.started += 1
            begun, code = time.monotonic(), "UNKNOWN"
            try:
                response = await behaviour(request, context)
                code = _code_of(context, "OK")
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except grpc.aio.AbortError:
                code = _code_of(context, "UNKNOWN")
                raise
            finally:
                self.handled[code] += 1
                self.seconds.record(time.monotonic() - begun)
            return response

        return MethodHandler(kind, counted)


class CallCounts(ServerInterceptor):
    """The first interceptor of a server, so that calls which others refuse are counted, too.

    Args:
        services: The handlers by method, by service. Calls of other methods are not counted: what
            callers make up has no bound.
    """

    def __init__(self, services: Mapping[str, Mapping[str, Handler]]) -> None:
        self._calls = {
            f"/{service}/{method}": MethodCalls(handler)
            for service, handlers in services.items()
            for method, handler in handlers.items()
        }

    def items(self) -> Iterator[tuple[str, str, MethodCalls]]:
        """Yields service, method and calls of each method that was called."""
        for name, calls in self._calls.items():
            if calls.started:
                _, service, method = name.split("/")
                yield service, method, calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Counts a call of a known method."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        calls = self._calls.get(method)
        return handler if calls is None else calls.counting(handler)


def _code_of(context: Context, otherwise: str) -> str:
    """Returns the name of the status that a handler has set; `otherwise` if it has set none."""
    code: Any = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _CODES.get(number, otherwise) if number else otherwise
