"""Writes the golden messages: `python tests/golden/golden_messages.py`.

Every message that a service sends or takes is there once per form (arm of its oneof), each field of
each part set to a value made from its number; beside them are messages as `rlightning.wire` writes
them. They change only with an ADR on the wire version: clients in the field read these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from gymnasium import spaces

from rlightning import wire
from rlightning.types import (
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from rlightning.utils.conversions import BFloat16Array
from rlightning.v1 import (
    buffer_service_pb2,
    env_ret_pb2,
    env_service_pb2,
    link_service_pb2,
    policy_response_pb2,
    policy_service_pb2,
    space_pb2,
    tensor_pb2,
)

FOLDER = Path(__file__).parent
FILES = (buffer_service_pb2, env_service_pb2, link_service_pb2, policy_service_pb2)
# Deep enough for every field of every message; Value and Space contain themselves.
DEPTH = 7


def message_types() -> list[type[Message]]:
    """Every message that a service sends or takes."""
    return sorted(
        {
            GetMessageClass(kind)
            for file in FILES
            for service in file.DESCRIPTOR.services_by_name.values()
            for method in service.methods
            for kind in (method.input_type, method.output_type)
        },
        key=lambda kind: kind.DESCRIPTOR.name,
    )


def forms(kind: type[Message]) -> Iterator[tuple[str, Message]]:
    """(name, message) for each arm of the first oneof, with all other fields set too."""
    descriptor = kind.DESCRIPTOR
    oneofs = [group for group in descriptor.oneofs if len(group.fields) > 1]
    arms = oneofs[0].fields if oneofs else [None]
    for arm in arms:
        message = kind()
        for field in descriptor.fields:
            group = field.containing_oneof
            if arm is None or group is not oneofs[0] or field is arm:
                set_field(message, field, DEPTH)
        yield f"{descriptor.name}.{arm.name}" if arm else descriptor.name, message


def set_field(message: Message, field: FieldDescriptor, depth: int) -> None:
    """Sets a field to what its number says; messages within are filled down to a depth."""
    if field.message_type is not None:
        if depth:
            sub = getattr(message, field.name)
            sub = sub.add() if field.is_repeated else sub
            sub.SetInParent()
            for inner in pick(field.message_type, field.number):
                set_field(sub, inner, depth - 1)
    elif field.is_repeated:
        getattr(message, field.name).extend([scalar(field, 0), scalar(field, 1)])
    else:
        setattr(message, field.name, scalar(field, 0))


def pick(descriptor: Any, number: int) -> Iterator[FieldDescriptor]:
    """All fields, but one arm of a oneof, which differs from place to place."""
    for field in descriptor.fields:
        group = field.containing_oneof
        if group is None or group.fields[number % len(group.fields)] is field:
            yield field


def scalar(field: FieldDescriptor, more: int) -> Any:
    number = field.number + more
    if field.type == FieldDescriptor.TYPE_BOOL:
        return more == 0
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"{field.name} {number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([0, number, 255])
    if field.type == FieldDescriptor.TYPE_ENUM:
        values = [value.number for value in field.enum_type.values if value.number]
        return values[number % len(values)]
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return -number - 0.5
    return 1000 + number


def codec_messages() -> Iterator[tuple[str, type[Message], bytes, Any]]:
    """(name, message type, what the codec writes, of what) for each kind of the codec."""
    arrays = {
        name: np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
        for name, dtype in {
            **{dtype: dtype for dtype in ("bool", "int8", "int16", "int32", "int64")},
            **{dtype: dtype for dtype in ("uint8", "uint16", "uint32", "uint64")},
            **{dtype: dtype for dtype in ("float16", "float32", "float64")},
            **{dtype: dtype for dtype in ("complex64", "complex128")},
            "big_endian": ">i4",
        }.items()
    }
    value = {
        "null": None,
        "flags": [True, False],
        "int": -(2**63),
        "float": -0.5,
        "text": "naïve",
        "bytes": b"\x00\xff",
        "nested": ({"b": [], "a": ()}, {}),
        "arrays": arrays,
        "bfloat16": np.array([0x3F80, 0xC000], np.uint16).view(BFloat16Array),
        "scalar": np.float32(1.5),
        "empty": np.zeros((0, 3), np.uint8),
        "objects": np.array([None, "won", None], object),
        "words": np.array(["left", "", "right"]),
    }
    yield "codec.Value", tensor_pb2.Value, wire.encode_value(value), value

    env_ret = EnvRet(
        "server/client",
        {"image": np.arange(8, dtype=np.uint8).reshape(2, 2, 2), "task": "push"},
        np.array([1.0, -1.0], np.float32),
        np.array([False, True]),
        np.array([False, False]),
        {
            "lives": np.array([3, 0]),
            "final_rows": np.array([1], np.int32),
            "final_observation": {"image": np.zeros((1, 2, 2), np.uint8)},
            "final_info": {"return": np.array([7.5])},
        },
        {"goal": 2},
        1_700_000_000_000_000_000,
        executed_action=np.array([0, 1]),
        action_source=np.array([1, 2], np.int8),
        answered_seq=41,
        chunk_index=1,
        ts_observed_ns=1_699_999_999_000_000_000,
        episode_id=np.array([4, 6]),
        step=np.array([17, 0]),
        rows=np.array([0, 3], np.int32),
    )
    yield "codec.EnvRet", env_ret_pb2.EnvRet, wire.encode_env_ret(env_ret), env_ret

    agents = MultiAgentEnvRet(
        "game", {"a": [1], "b": [2]}, {"a": 1.0}, {"a": True}, {"a": False}, ts_env_sent_ns=1
    )
    yield "codec.MultiAgentEnvRet", env_ret_pb2.EnvRet, wire.encode_env_ret(agents), agents

    for response in (
        PolicyResponse("server/client", action=np.array([1, 0]), log_prob=np.float32([-0.5, -2])),
        MultiAgentPolicyResponse("game", action={"a": 1, "b": (0.5,)}),
    ):
        response.policy_version = 3
        response.ts_policy_sent_ns = 1_700_000_000_000_000_001
        encoded = wire.encode_policy_response(response)
        kind = type(response).__name__
        yield f"codec.{kind}", policy_response_pb2.PolicyResponse, encoded, response

    batch = wire.Batch(5, {"reward": np.arange(4.0).reshape(2, 2)}, {"env_ids": ["a", "b"]})
    yield "codec.Batch", buffer_service_pb2.Batch, wire.encode_batch(batch), batch

    sequence = spaces.Sequence(spaces.MultiBinary(3))
    sequence.max_bytes = 512  # type: ignore[attr-defined]
    space = spaces.Tuple(
        [
            spaces.Box(np.array([-1, -np.inf]), np.array([np.inf, 1]), dtype=np.float64),
            spaces.Box(-np.inf, 7, (2, 2), np.int32),
            spaces.Discrete(5, start=-2),
            spaces.MultiBinary([2, 3]),
            spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, -1]]),
            spaces.Text(8, min_length=0, charset="zyx"),
            spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Tuple([]))]),
            sequence,
            spaces.Graph(spaces.Box(0, 1, (3,)), spaces.Discrete(3)),
            spaces.OneOf([spaces.Discrete(2), spaces.Text(3, charset="ab")]),
        ]
    )
    yield "codec.Space", space_pb2.Space, wire.encode_space(space), space
    for name, meta in (
        ("EnvMeta", EnvMeta("pole", spaces.Discrete(2), spaces.Box(-1, 1, (4,)), 64)),
        ("MultiAgentEnvMeta", EnvMeta("game", {"a": spaces.Discrete(2)}, {"a": spaces.Dict()})),
    ):
        yield f"codec.{name}", space_pb2.EnvMeta, wire.encode_env_meta(meta), meta


def golden() -> Iterator[tuple[str, type[Message], bytes]]:
    """(name, message type, bytes) of every golden message."""
    for kind in message_types():
        for name, message in forms(kind):
            yield name, kind, message.SerializeToString(deterministic=True)
    for name, kind, data, _ in codec_messages():
        yield name, kind, data


def text_of(kind: type[Message], data: bytes) -> str:
    return text_format.MessageToString(kind.FromString(data))


def main() -> None:
    """Writes all files anew and removes those of messages that are gone."""
    for path in (*FOLDER.glob("*.binpb"), *FOLDER.glob("*.txtpb")):
        path.unlink()
    for name, kind, data in golden():
        (FOLDER / f"{name}.binpb").write_bytes(data)
        (FOLDER / f"{name}.txtpb").write_text(text_of(kind, data), encoding="utf-8")


if __name__ == "__main__":
    main()
