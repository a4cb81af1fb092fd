"""The only place where errors become gRPC statuses, and statuses become errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio

from rlightning import errors
from rlightning.v1.session_pb2 import ErrorStatus

logger = logging.getLogger(__name__)

# A message may quote keys that the peer chose; gRPC drops a call whose trailer is too large.
_MAX_MESSAGE = 2000

REASON_KEY = "rlightning-reason"
"""Trailing metadata key of the upper-case word that tells programs what happened."""

Code = grpc.StatusCode


class Status(NamedTuple):
    """What a peer is told about an error."""

    code: grpc.StatusCode
    message: str
    reason: str


# First match wins, so derived classes come before their bases.
_TO_STATUS: tuple[tuple[type[errors.RLightningError], grpc.StatusCode, str], ...] = (
    (errors.UnavailableError, Code.UNAVAILABLE, ""),
    (errors.DeadlineExceededError, Code.DEADLINE_EXCEEDED, ""),
    (errors.UnauthenticatedError, Code.UNAUTHENTICATED, ""),
    (errors.PermissionDeniedError, Code.PERMISSION_DENIED, ""),
    (errors.AlreadyExistsError, Code.ALREADY_EXISTS, ""),
    (errors.NotFoundError, Code.NOT_FOUND, ""),
    (errors.PreconditionError, Code.FAILED_PRECONDITION, ""),
    (errors.InvalidRequestError, Code.INVALID_ARGUMENT, ""),
    (errors.ResourceExhaustedError, Code.RESOURCE_EXHAUSTED, ""),
    (errors.RemoteError, Code.INTERNAL, ""),
    (errors.ConfigError, Code.FAILED_PRECONDITION, "CONFIG"),
    (errors.MessageTooLargeError, Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    (errors.CodecError, Code.INVALID_ARGUMENT, "CODEC"),
    (errors.ResetNeededError, Code.FAILED_PRECONDITION, "RESET_NEEDED"),
    (errors.ObservationError, Code.INTERNAL, "OBSERVATION"),
    (errors.EnvError, Code.INTERNAL, "ENV"),
    (errors.BatcherOverloadedError, Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (errors.PolicyError, Code.INTERNAL, "POLICY"),
    (errors.BufferEmptyError, Code.FAILED_PRECONDITION, "BUFFER_EMPTY"),
    (errors.InvalidRowError, Code.INVALID_ARGUMENT, "ROW"),
    (errors.StorageFullError, Code.RESOURCE_EXHAUSTED, "FULL"),
    (errors.ReplayError, Code.FAILED_PRECONDITION, "REPLAY"),
    (errors.ClusterError, Code.INTERNAL, "CLUSTER"),
)

_FROM_CODE: dict[grpc.StatusCode, type[errors.RemoteError]] = {
    Code.UNAVAILABLE: errors.UnavailableError,
    Code.CANCELLED: errors.UnavailableError,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    Code.UNAUTHENTICATED: errors.UnauthenticatedError,
    Code.PERMISSION_DENIED: errors.PermissionDeniedError,
    Code.ALREADY_EXISTS: errors.AlreadyExistsError,
    Code.NOT_FOUND: errors.NotFoundError,
    Code.FAILED_PRECONDITION: errors.PreconditionError,
    Code.INVALID_ARGUMENT: errors.InvalidRequestError,
    Code.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
}
_BY_NUMBER = {code.value[0]: code for code in Code}

DISK_FULL = "DISK_FULL"
"""Reason of a ResourceExhaustedError of a server that takes nothing until its disk has room."""

NO_DATA_DIR = "NO_DATA_DIR"
"""Reason of a PreconditionError of a server that keeps nothing on a disk."""

UNKNOWN_ENV = "UNKNOWN_ENV"
"""Reason of a PreconditionError of a buffer server that has no data of an env."""

# What gRPC itself says when a message passes the transport cap, and when nobody listens.
_TOO_LARGE = re.compile(r"(?:Sent|Received) message larger than max \((\d+) vs\. (\d+)\)")
_CONNECT = re.compile(r"Failed to connect to remote host: (?:connect: )?([^;]+?)(?: \(\d+\))?\.?$")
# What it says for a write that fails, in place of the status that ended the call.
_BROKEN_WRITE = "Internal error from Core"


def status_of(error: Exception) -> Status:
    """Returns what a peer is told about `error`.

    An error that is not of this library becomes INTERNAL without its text, which may name paths or
    values that are none of the peer's business; it is logged here with its traceback.
    """
    for kind, code, reason in _TO_STATUS:
        if isinstance(error, kind):
            own = error.reason if isinstance(error, errors.RemoteError) else ""
            text = str(error)
            if len(text) > _MAX_MESSAGE:
                text = f"{text[: _MAX_MESSAGE - 3]}..."
            return Status(code, text, own or reason)
    logger.error("unexpected %s while serving a call", type(error).__name__, exc_info=error)
    return Status(Code.INTERNAL, "internal error; the server's log has the details", "")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """Ends a call with the status of `error`; raises what gRPC raises for that."""
    status = status_of(error)
    trailing = ((REASON_KEY, status.reason),) if status.reason else ()
    await context.abort(status.code, status.message, trailing)


def to_error_status(error: Exception) -> ErrorStatus:
    """Returns the message that tells of `error` inside a stream that lives on."""
    status = status_of(error)
    return ErrorStatus(code=status.code.value[0], message=status.message, reason=status.reason)


def from_error_status(message: ErrorStatus, *, peer: str = "") -> errors.RemoteError:
    """Returns the error that an `ErrorStatus` of `peer` tells of."""
    code = _BY_NUMBER.get(message.code, Code.UNKNOWN)
    return from_code(code, message.message, peer=peer, reason=message.reason)


def from_code(
    code: grpc.StatusCode, message: str, *, peer: str = "", reason: str = ""
) -> errors.RemoteError:
    """Returns the error for a status of `peer`."""
    kind = _FROM_CODE.get(code)
    if kind is None:
        return errors.RemoteError(f"{code.name}: {message}", peer=peer, reason=reason)
    return kind(message, peer=peer, reason=reason)


def from_rpc_error(
    error: grpc.aio.AioRpcError, *, peer: str = "", method: str = ""
) -> errors.RemoteError:
    """Returns the error for the status that ended a call.

    Args:
        error: What gRPC raised.
        peer: Address that was dialled.
        method: Full name of the method, `/package.Service/Method`.
    """
    code: grpc.StatusCode = error.code()
    details: str = error.details() or code.name.lower().replace("_", " ")
    reason = ""
    trailing: Any = error.trailing_metadata()
    for key, value in trailing or ():
        if key == REASON_KEY:
            reason = str(value)
    if code is Code.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(details)):
        details = too_large(int(sizes[1]), int(sizes[2]), method)
    elif code is Code.INTERNAL and details == _BROKEN_WRITE:
        # The peer ended the call in the middle of a write, and its status is lost.
        code, details = Code.UNAVAILABLE, "the call ended while a message was being sent"
    elif code is Code.UNIMPLEMENTED and method:
        service, _, name = method.strip("/").partition("/")
        details = f"expected {service} with {name}; {details}"
    elif code is Code.UNAVAILABLE and (cause := _CONNECT.search(details)):
        details = f"cannot connect: {cause[1].lower()}"
    return from_code(code, details, peer=peer, reason=reason)


def is_passing(error: Exception) -> bool:
    """Tells whether a session can go on after a stream of it ended with this, later."""
    full = isinstance(error, errors.ResourceExhaustedError) and error.reason == DISK_FULL
    return full or isinstance(error, errors.UnavailableError)


@contextmanager
def remote_errors(*, peer: str = "", method: str = "") -> Iterator[None]:
    """Turns the status that ends a call inside this block into an error of this library.

    Raises:
        RemoteError: A call failed; its class tells how.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer=peer, method=method) from error


def config_key(method: str, name: str) -> str:
    """Returns the key that sets a limit of a method, such as `services.policy.rpc.max_sessions`."""
    service = method.strip("/").partition("/")[0].rpartition(".")[2]
    return f"services.{service.removesuffix('Service').lower() or '<service>'}.rpc.{name}"


def too_large(size: int, cap: int, method: str, *, session: bool = False) -> str:
    """Says that a message passes a cap, and which key to change.

    Args:
        size: Size of the message in bytes.
        cap: The cap in bytes.
        method: Full name of the method.
        session: The cap is that of the session, from its spec, rather than that of the transport.
    """
    if session:
        key = config_key(method, "info_budget_bytes")
        return (
            f"a message of {size} bytes passes the session's cap of {cap} bytes, which is what the "
            f"declared spaces need plus {key}: correct the spec, or raise {key} on the server"
        )
    key = config_key(method, "max_message_bytes")
    return f"a message of {size} bytes passes the cap of {cap} bytes: raise {key} on both sides"
