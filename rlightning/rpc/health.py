"""The standard health service, `grpc.health.v1`, and a probe for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rlightning.errors import NotFoundError, RemoteError
from rlightning.rpc import status
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.handlers import Context, Handler, MethodHandler
from rlightning.rpc.replicas import auth_of_replica, find_replicas
from rlightning.utils.config.rpc import ClientAuthConfig, RpcConfig

SERVICE_NAME = "grpc.health.v1.Health"
OVERALL = ""
LIVENESS = "liveness"
READINESS = "readiness"

_LAST_WORD_S = 0.2


class ServingStatus(IntEnum):
    """`grpc.health.v1.HealthCheckResponse.ServingStatus`."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@lru_cache(maxsize=1)
def _messages() -> dict[str, Any]:
    """Returns the messages of `grpc/health/v1/health.proto` by name.

    Built here, so that neither probe nor server needs grpcio-health-checking; in a pool of their
    own, so that it may be installed all the same.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto

    def add(parent: Any, name: str, *fields: tuple[str, int, str | None, bool]) -> Any:
        message = parent.add(name=name)
        for number, (label, kind, type_name, repeated) in enumerate(fields, 1):
            message.field.add(
                name=label,
                number=number,
                type=kind,
                type_name=type_name,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            )
        return message

    package = ".grpc.health.v1"
    add(file.message_type, "HealthCheckRequest", ("service", field.TYPE_STRING, None, False))
    response = add(
        file.message_type,
        "HealthCheckResponse",
        ("status", field.TYPE_ENUM, f"{package}.HealthCheckResponse.ServingStatus", False),
    )
    serving = response.enum_type.add(name="ServingStatus")
    for value in ServingStatus:
        serving.value.add(name=value.name, number=value)
    add(file.message_type, "HealthListRequest")
    entry = f"{package}.HealthListResponse.StatusesEntry"
    listing = add(
        file.message_type, "HealthListResponse", ("statuses", field.TYPE_MESSAGE, entry, True)
    )
    add(
        listing.nested_type,
        "StatusesEntry",
        ("key", field.TYPE_STRING, None, False),
        ("value", field.TYPE_MESSAGE, f"{package}.HealthCheckResponse", False),
    ).options.map_entry = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"grpc.health.v1.{message.name}")
        )
        for message in file.message_type
    }


class Health:
    """Says what a server is ready for.

    `""`, `readiness` and the services share one answer, NOT_SERVING until `set_ready(True)`;
    `liveness` is SERVING for as long as the event loop answers at all, unless `set_alive(False)`
    says that something else of the process is stuck.

    Args:
        services: Full names of the services.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = (OVERALL, READINESS, LIVENESS, *services)
        self._ready = False
        self._alive = True
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether readiness is SERVING."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Sets readiness and tells who watches."""
        self._ready = ready
        self._wake()

    def set_alive(self, alive: bool) -> None:
        """Sets liveness and tells who watches."""
        self._alive = alive
        self._wake()

    def close(self) -> None:
        """Ends the streams of those who watch; each would use up the whole grace of a stop."""
        self._closed = True
        self._wake()

    def status_of(self, service: str) -> ServingStatus | None:
        """Returns the status of a name; None if there is no such name."""
        if service not in self._names:
            return None
        serving = self._alive if service == LIVENESS else self._ready
        return ServingStatus.SERVING if serving else ServingStatus.NOT_SERVING

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers of Check, List and Watch."""
        kinds: dict[str, tuple[str, Callable[..., Any]]] = {
            "Check": ("unary_unary", self._check),
            "List": ("unary_unary", self._list),
            "Watch": ("unary_stream", self._watch),
        }
        return {name: MethodHandler(*kind) for name, kind in kinds.items()}

    async def _check(self, data: bytes, context: Context) -> bytes:
        service = _messages()["HealthCheckRequest"].FromString(data).service
        found = self.status_of(service)
        if found is None:
            await status.abort(context, NotFoundError(f"no service {service!r} here"))
        return _encode(found)

    async def _list(self, data: bytes, context: Context) -> bytes:
        response = _messages()["HealthListResponse"]()
        for name in self._names:
            response.statuses[name].status = self.status_of(name)
        encoded: bytes = response.SerializeToString()
        return encoded

    async def _watch(self, data: bytes, context: Context) -> None:
        service = _messages()["HealthCheckRequest"].FromString(data).service
        last: ServingStatus | None = None
        while True:
            changed = self._changed
            now = self.status_of(service) or ServingStatus.SERVICE_UNKNOWN
            if now is not last:
                await context.write(_encode(now))
                last = now
            if self._closed:
                # Clients may drop a message that they have not read when the status comes; for sure
                # if it is an error, after which they would watch again as after this.
                await asyncio.sleep(_LAST_WORD_S)
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _encode(serving: ServingStatus) -> bytes:
    encoded: bytes = _messages()["HealthCheckResponse"](status=serving).SerializeToString()
    return encoded


async def check(
    address: str,
    service: str = OVERALL,
    *,
    timeout_s: float = 2.0,
    auth: ClientAuthConfig | None = None,
) -> ServingStatus:
    """Asks a server for its health.

    Args:
        address: Where it listens.
        service: A service's full name, `readiness`, `liveness`, or empty for the whole server.
        timeout_s: Seconds to wait.
        auth: For a server with TLS.

    Raises:
        RemoteError: It did not answer, or does not know the name.
        ConfigError: A file that `auth` names cannot be read.
    """
    async with connect(address, rpc=RpcConfig(), auth=auth) as channel:
        request = _messages()["HealthCheckRequest"](service=service).SerializeToString()
        data = await _ask(channel, "Check", request, timeout_s)
        return ServingStatus(_messages()["HealthCheckResponse"].FromString(data).status)


async def list_statuses(channel: Channel, *, timeout_s: float = 2.0) -> dict[str, ServingStatus]:
    """Asks a server for every name that it knows, and its health.

    Args:
        channel: To the server.
        timeout_s: Seconds to wait.

    Raises:
        RemoteError: It did not answer, or has no such method.
    """
    data = await _ask(channel, "List", b"", timeout_s)
    statuses = _messages()["HealthListResponse"].FromString(data).statuses
    return {name: ServingStatus(response.status) for name, response in statuses.items()}


async def _ask(channel: Channel, name: str, request: bytes, timeout_s: float) -> bytes:
    method = f"/{SERVICE_NAME}/{name}"
    call = channel.unary_unary(method)(request, timeout=timeout_s)
    try:
        with channel.call_errors(method):
            data: bytes = await call
    finally:
        call.cancel()
    return data


async def check_replicas(
    address: str,
    service: str = OVERALL,
    *,
    timeout_s: float = 2.0,
    auth: ClientAuthConfig | None = None,
) -> dict[str, ServingStatus | RemoteError]:
    """Asks all servers that an address stands for, see `find_replicas`, for their health.

    Arguments are those of `check`, which may take as long again to find the servers.

    Returns:
        The answer of each by its own address, or why there is none.

    Raises:
        UnavailableError: There is no such name.
        ConfigError: A file that `auth` names cannot be read.
    """
    replicas = await find_replicas(address, timeout_s=timeout_s)
    answers = await asyncio.gather(
        *(
            check(
                replica,
                service,
                timeout_s=timeout_s,
                auth=auth_of_replica(auth, address, replica),
            )
            for replica in replicas
        ),
        return_exceptions=True,
    )
    found: dict[str, ServingStatus | RemoteError] = {}
    for replica, answer in zip(replicas, answers, strict=True):
        if not isinstance(answer, (ServingStatus, RemoteError)):
            raise answer
        found[replica] = answer
    return found


def check_health(
    address: str,
    service: str = OVERALL,
    timeout_s: float = 2.0,
    auth: ClientAuthConfig | None = None,
) -> bool:
    """Tells whether a server is SERVING; blocks for at most `timeout_s` seconds.

    Arguments are those of `check`. A server that does not answer is not serving. Not for use inside
    an event loop, nor beside one in another thread for long: each call makes a loop of its own.

    Raises:
        ConfigError: A file that `auth` names cannot be read.
    """
    try:
        serving = asyncio.run(check(address, service, timeout_s=timeout_s, auth=auth))
    except RemoteError:
        return False
    return serving is ServingStatus.SERVING
