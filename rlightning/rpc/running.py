"""Runs a service: listeners, health, start, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from rlightning.errors import ConfigError, UnavailableError
from rlightning.rpc import link
from rlightning.rpc.auth import (
    ANY,
    TokenInterceptor,
    TokenTable,
    check_listener,
    is_loopback,
    refusal,
    server_credentials,
)
from rlightning.rpc.binding import check_bindable
from rlightning.rpc.calls import CallCounts
from rlightning.rpc.handlers import (
    GenericHandler,
    Handler,
    MethodHandler,
    ServerInterceptor,
)
from rlightning.rpc.health import SERVICE_NAME as HEALTH
from rlightning.rpc.health import Health
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.options import server_options
from rlightning.rpc.registry import SessionRegistry
from rlightning.rpc.service import Service
from rlightning.rpc.session import SessionMethod
from rlightning.utils.config.rpc import ListenConfig, RpcConfig
from rlightning.utils.waiting import wait_within

logger = logging.getLogger(__name__)

# A call that comes while the service starts waits this long before it is told to come back.
_GATE_S = 5.0
# What gRPC may use to end calls that are still open after the drain.
_STOP_S = 0.5
# What each step of a stop gets even after the end of the grace.
_LEAST_S = 0.1


async def serve(
    service: Service,
    *,
    listen: Sequence[ListenConfig] = (ListenConfig(),),
    rpc: RpcConfig | None = None,
    reflection: bool = False,
) -> RunningServer:
    """Binds the listeners and begins to start the service.

    Health answers from now on, and is SERVING once `service.start` has returned.

    Args:
        service: What to run.
        listen: Where to listen.
        rpc: Limits and times; default: those of `RpcConfig`.
        reflection: Let clients ask which RPCs there are.

    Raises:
        ConfigError: A listener is not allowed, its port is taken, or a file it names is unusable.
    """
    server = RunningServer(service, rpc or RpcConfig(), reflection=reflection)
    try:
        for one in listen:
            await server.listen(one)
    except BaseException:
        await server.stop(grace_s=0)
        raise
    server.begin()
    return server


class RunningServer:
    """A service with its listeners; `serve` makes it."""

    def __init__(self, service: Service, rpc: RpcConfig, *, reflection: bool) -> None:
        self._service = service
        self._rpc = rpc
        self._reflection = reflection
        self._health = Health([service.name])
        if (use_health := getattr(service, "use_health", None)) is not None:
            use_health(self._health)
        self._methods = dict(service.handlers())
        self._calls = CallCounts(
            {
                service.name: self._methods,
                HEALTH: self._health.handlers(),
                link.SERVICE: link.handlers(),
            }
        )
        self._started = asyncio.Event()
        self._start: asyncio.Task[None] | None = None
        self._servers: list[grpc.aio.Server] = []
        self._addresses: list[str] = []
        self._stopped: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> list[str]:
        """What was bound, one for each listener, with the real ports."""
        return list(self._addresses)

    @property
    def address(self) -> str:
        """What the first listener was bound to."""
        return self._addresses[0]

    @property
    def health(self) -> Health:
        """The health service."""
        return self._health

    async def listen(self, listen: ListenConfig) -> None:
        """Binds one listener; each has a gRPC server of its own, with its own tokens.

        Raises:
            ConfigError: As `serve`.
        """
        await check_bindable(listen.address)
        check_listener(listen)
        credentials = server_credentials(listen)
        interceptors: list[Any] = [
            self._calls,
            _Gate(self._started, f"/{self._service.name}/", _early_methods(self._service)),
        ]
        if listen.tokens is not None:
            scopes = {
                f"/{self._service.name}/{method}": scope
                for method, scope in self._service.scopes.items()
            }
            scopes |= {f"/{link.SERVICE}/{method}": ANY for method in link.handlers()}
            interceptors.insert(1, TokenInterceptor(TokenTable.load(listen.tokens), scopes))
        elif not is_loopback(listen.address) and not (listen.tls and listen.tls.client_ca_file):
            logger.warning("%s takes calls from anyone who reaches it: no tokens", listen.address)
        server = grpc.aio.server(interceptors=interceptors, options=server_options(self._rpc))
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(self._service.name, self._methods),
                grpc.method_handlers_generic_handler(HEALTH, self._health.handlers()),
                grpc.method_handlers_generic_handler(link.SERVICE, link.handlers()),
            )
        )
        if self._reflection:
            _add_reflection(server, self._service.name)
        server.add_generic_rpc_handlers((_Unserved(self._service.name),))
        try:
            if credentials is None:
                port = server.add_insecure_port(listen.address)
            else:
                port = server.add_secure_port(listen.address, credentials)
        except (RuntimeError, ValueError) as error:
            await server.stop(None)
            raise ConfigError(f"cannot listen on {listen.address}: {error}") from error
        await server.start()
        self._servers.append(server)
        host = listen.address.rpartition(":")[0]
        self._addresses.append(
            listen.address if listen.address.startswith("unix") else f"{host}:{port}"
        )

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of the calls until now."""
        metrics.calls(self._calls)
        for name, method in self._methods.items():
            if isinstance(method, SessionMethod):
                metrics.messages(self._service.name, name, method.registry.messages)

    def begin(self) -> None:
        """Begins to start the service."""
        self._start = asyncio.create_task(self._start_service())

    async def ready(self) -> None:
        """Returns when the service is SERVING.

        Raises:
            Exception: What `service.start` raised.
            UnavailableError: The server was stopped before.
        """
        if self._start is not None:
            await asyncio.wait({self._start})
            if not self._start.cancelled():
                return self._start.result()
        raise UnavailableError("stopped before it was ready")

    async def _start_service(self) -> None:
        begun = time.monotonic()
        await self._service.start()
        self._started.set()
        self._health.set_ready(True)
        logger.info("%s is SERVING after %.2f s", self._service.name, time.monotonic() - begun)

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Drains and stops; returns within about `grace_s` seconds. Safe to repeat.

        Health is NOT_SERVING first, then clients with a session are told, then what is in flight is
        finished, then their streams end with UNAVAILABLE, and at last the port closes.
        """
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop(time.monotonic() + grace_s))
        await asyncio.shield(self._stopped)

    async def _stop(self, deadline: float) -> None:
        def left() -> float:
            return max(_LEAST_S, deadline - time.monotonic() - _STOP_S)

        self._health.set_ready(False)
        registries = [
            method.registry
            for method in self._methods.values()
            if isinstance(method, SessionMethod)
        ]
        was_started = self._started.is_set()
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait({self._start}, timeout=left())
        if was_started:
            await self._bounded(self._tell(registries, left()), left(), "telling the clients")
            await self._bounded(self._service.drain(left()), left(), "drain")
        self._health.close()
        await self._bounded(self._end_streams(registries), left(), "ending the streams")
        if self._start is not None:
            await self._bounded(self._service.close(), left() + _STOP_S / 2, "close")
        # Only calls outside of sessions can be open now, such as a stream of weights.
        grace = max(0.05, min(_STOP_S, deadline - time.monotonic()))
        await asyncio.gather(*(server.stop(grace) for server in self._servers))

    async def _tell(self, registries: Sequence[SessionRegistry], deadline_s: float) -> None:
        await asyncio.gather(
            *(registry.drain(deadline_s, "the server is shutting down") for registry in registries)
        )

    async def _end_streams(self, registries: Sequence[SessionRegistry]) -> None:
        await asyncio.gather(
            *(registry.close("the server is shutting down") for registry in registries)
        )

    async def _bounded(self, work: Awaitable[None], timeout_s: float, what: str) -> None:
        """Awaits one step of the stop; the next one comes whatever becomes of it."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            logger.error("%s: %s took more than %.1f s", self._service.name, what, timeout_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=_STOP_S / 2)
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: %s raised", self._service.name, what, exc_info=error)


class _Gate(ServerInterceptor):
    """Holds calls back until the service has started."""

    def __init__(self, started: asyncio.Event, prefix: str, early: frozenset[str]) -> None:
        self._started = started
        self._prefix = prefix
        self._early = early

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method: str = handler_call_details.method
        if (
            not self._started.is_set()
            and method.startswith(self._prefix)
            and method.removeprefix(self._prefix) not in self._early
        ):
            try:
                await wait_within(self._started.wait(), _GATE_S)
            except asyncio.TimeoutError:
                return refusal(UnavailableError("still starting; retry", reason="STARTING"))
        return await continuation(handler_call_details)


class _Unserved(GenericHandler):
    """Tells who calls a method that is not served here which service this is; the last handler."""

    def __init__(self, service: str) -> None:
        async def refuse(*call: Any) -> None:
            context = call[-1]
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server is {service}")

        self._handler = MethodHandler("stream_stream", refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Returns the refusal, whatever is called."""
        return self._handler


def _early_methods(service: Service) -> frozenset[str]:
    return frozenset(getattr(service, "early_methods", ()))


def _add_reflection(server: grpc.aio.Server, service: str) -> None:
    try:
        from grpc_health.v1 import health_pb2  # noqa: F401 - registers what reflection shows
        from grpc_reflection.v1alpha import reflection
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reflection needs grpcio-reflection: pip install 'rlightning[serve]'"
        ) from error
    names = (service, HEALTH, link.SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
