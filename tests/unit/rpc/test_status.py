from __future__ import annotations

import grpc
import pytest

from rlightning import errors
from rlightning.rpc import status
from rlightning.v1.session_pb2 import ErrorStatus

Code = grpc.StatusCode
METHOD = "/rlightning.v1.PolicyService/Act"

REMOTE = [
    (errors.UnavailableError, Code.UNAVAILABLE),
    (errors.DeadlineExceededError, Code.DEADLINE_EXCEEDED),
    (errors.UnauthenticatedError, Code.UNAUTHENTICATED),
    (errors.PermissionDeniedError, Code.PERMISSION_DENIED),
    (errors.AlreadyExistsError, Code.ALREADY_EXISTS),
    (errors.NotFoundError, Code.NOT_FOUND),
    (errors.PreconditionError, Code.FAILED_PRECONDITION),
    (errors.InvalidRequestError, Code.INVALID_ARGUMENT),
    (errors.ResourceExhaustedError, Code.RESOURCE_EXHAUSTED),
]


@pytest.mark.parametrize(("kind", "code"), REMOTE)
def test_a_remote_error_travels_as_itself(kind, code):
    told = status.status_of(kind("what", reason="WHY"))
    assert told == (code, "what", "WHY")
    back = status.from_error_status(status.to_error_status(kind("what", reason="WHY")), peer="p")
    assert type(back) is kind
    assert (str(back), back.reason, back.peer) == ("p: what", "WHY", "p")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.CodecError("bad", path="a.b"), Code.INVALID_ARGUMENT, "CODEC"),
        (errors.MessageTooLargeError("bad"), Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
        (errors.ConfigError("bad"), Code.FAILED_PRECONDITION, "CONFIG"),
        (errors.ResetNeededError("bad"), Code.FAILED_PRECONDITION, "RESET_NEEDED"),
        (errors.ObservationError("bad"), Code.INTERNAL, "OBSERVATION"),
        (errors.EnvError("bad"), Code.INTERNAL, "ENV"),
        (errors.BatcherOverloadedError("bad"), Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (errors.PolicyError("bad"), Code.INTERNAL, "POLICY"),
        (errors.BufferEmptyError("bad"), Code.FAILED_PRECONDITION, "BUFFER_EMPTY"),
        (errors.ReplayError("bad"), Code.FAILED_PRECONDITION, "REPLAY"),
        (errors.ClusterError("bad"), Code.INTERNAL, "CLUSTER"),
        (errors.RemoteError("bad"), Code.INTERNAL, ""),
    ],
)
def test_a_local_error_says_what_happened(error, code, reason):
    told = status.status_of(error)
    assert told.code is code
    assert told.message == str(error)
    assert told.reason == reason


def test_every_error_of_the_library_has_a_status():
    def leaves(kind):
        yield kind
        for derived in kind.__subclasses__():
            yield from leaves(derived)

    mapped = {kind for kind, _, _ in status._TO_STATUS}
    ours = {kind for kind in leaves(errors.RLightningError) if kind.__module__ == errors.__name__}
    assert ours - mapped == {errors.RLightningError}


def test_an_unknown_error_tells_nothing_and_is_logged(caplog):
    told = status.status_of(KeyError("/secret"))
    assert told.code is Code.INTERNAL
    assert "secret" not in told.message
    assert "KeyError" in caplog.text


def test_a_status_without_a_class_keeps_its_name():
    error = status.from_error_status(ErrorStatus(code=13, message="oh"))
    assert type(error) is errors.RemoteError
    assert str(error) == "INTERNAL: oh"
    assert str(status.from_error_status(ErrorStatus(code=99, message="oh"))) == "UNKNOWN: oh"


def rpc_error(code: grpc.StatusCode, details: str, *trailing: tuple[str, str]):
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


def test_the_end_of_a_call_carries_peer_and_reason():
    with pytest.raises(errors.PreconditionError) as raised, status.remote_errors(peer="host:1"):
        raise rpc_error(Code.FAILED_PRECONDITION, "no", (status.REASON_KEY, "STATE_LOST"))
    assert (str(raised.value), raised.value.reason) == ("host:1: no", "STATE_LOST")


def test_a_refused_connection_is_said_in_few_words():
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
        "Failed to connect to remote host: connect: Connection refused (111)"
    )
    error = status.from_rpc_error(rpc_error(Code.UNAVAILABLE, details), peer="host:1")
    assert str(error) == "host:1: cannot connect: connection refused"


def test_a_call_that_ended_during_a_write_may_be_tried_again():
    error = status.from_rpc_error(rpc_error(Code.INTERNAL, "Internal error from Core"))
    assert isinstance(error, errors.UnavailableError)


@pytest.mark.parametrize("verb", ["Sent", "Received"])
def test_a_message_that_grpc_finds_too_large_names_the_key(verb):
    details = f"CLIENT: {verb} message larger than max (123 vs. 100)"
    error = status.from_rpc_error(rpc_error(Code.RESOURCE_EXHAUSTED, details), method=METHOD)
    for word in ("123", "100", "services.policy.rpc.max_message_bytes"):
        assert word in str(error)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (METHOD, "services.policy.rpc.x"),
        ("/rlightning.v1.EnvService/Attach", "services.env.rpc.x"),
        ("/rlightning.v1.BufferService/Insert", "services.buffer.rpc.x"),
        ("", "services.<service>.rpc.x"),
    ],
)
def test_keys_are_those_of_the_config(method, key):
    assert status.config_key(method, "x") == key
