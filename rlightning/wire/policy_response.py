"""PolicyResponse to and from its message."""

from __future__ import annotations

from typing import Any

from rlightning.errors import CodecError
from rlightning.types.policy_response import MultiAgentPolicyResponse, PolicyResponse
from rlightning.v1 import policy_response_pb2
from rlightning.wire.fields import set_int, set_text
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.splice import Buffer
from rlightning.wire.value import fill_value, read_mapping

# An output of such a name would hide a method or the metadata of the response.
_TAKEN = frozenset(dir(PolicyResponse)) | {"env_id", "policy_version", "ts_policy_sent_ns", "seq"}


def encode_policy_response(response: PolicyResponse) -> bytes:
    """Returns the encoded message of a PolicyResponse; see `fill_policy_response`."""
    w = Writer()
    pb = policy_response_pb2.PolicyResponse()
    fill_policy_response(pb, response, w)
    return w.finish(pb)


def decode_policy_response(
    data: Buffer,
    limits: Limits = DEFAULT_LIMITS,
) -> PolicyResponse:
    """Returns the PolicyResponse of an encoded message; see `read_policy_response`."""
    r = Reader(policy_response_pb2.PolicyResponse, data, limits=limits)
    return read_policy_response(r.message, r)


def fill_policy_response(
    pb: policy_response_pb2.PolicyResponse, response: PolicyResponse, w: Writer
) -> None:
    """Writes a PolicyResponse into its empty message.

    Args:
        pb: The message to fill.
        response: What to send; nothing of it may change before `w.finish`. Its `seq` is not part of
            the message: it travels beside it.
        w: The writer of the whole message.

    Raises:
        CodecError: Something in it cannot be sent; the path says where.
    """
    set_text(pb, "env_id", response.env_id)
    outputs = response.to_dict()
    if not _TAKEN.isdisjoint(outputs):
        raise _taken(outputs)
    try:
        fill_value(pb.data, outputs, w)
    except CodecError as error:
        under(error, "data")
        raise
    stamps = response.__dict__
    if stamps.get("policy_version") is not None:
        set_int(pb, "policy_version", stamps["policy_version"])
    if stamps.get("ts_policy_sent_ns") is not None:
        set_int(pb, "ts_policy_sent_ns", stamps["ts_policy_sent_ns"])
    if isinstance(response, MultiAgentPolicyResponse):
        pb.multi_agent = True


def read_policy_response(pb: policy_response_pb2.PolicyResponse, r: Reader[Any]) -> PolicyResponse:
    """Reads a PolicyResponse.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        The PolicyResponse, or a MultiAgentPolicyResponse; arrays in it are read-only, see
        `read_tensor`. `policy_version` and `ts_policy_sent_ns` are set if they came.

    Raises:
        CodecError: Something in it is not valid or passes a limit; the path says where.
    """
    outputs = read_mapping(pb.data, "data", r)
    if not _TAKEN.isdisjoint(outputs):
        raise _taken(outputs)
    kind = MultiAgentPolicyResponse if pb.multi_agent else PolicyResponse
    response = kind(pb.env_id, **outputs)
    if pb.HasField("policy_version"):
        response.policy_version = pb.policy_version
    if pb.ts_policy_sent_ns:
        response.ts_policy_sent_ns = pb.ts_policy_sent_ns
    return response


def _taken(outputs: dict[str, Any]) -> CodecError:
    names = sorted(_TAKEN & outputs.keys())
    return CodecError(f"no output of a policy may be called {names}", path="data")
