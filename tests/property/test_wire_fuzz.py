"""Whatever bytes come: the splicing reader and plain protobuf agree, and nothing but CodecError escapes.

The examples are the same in every run. `RLIGHTNING_FUZZ_EXAMPLES=100000 pytest tests/property` looks
for new ones.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from strategies import (
    BATCHES,
    ENV_METAS,
    VALUES,
    assert_same,
    env_rets,
    examples,
    policy_responses,
)

from rlightning import wire
from rlightning.errors import CodecError
from rlightning.types import EnvMeta
from rlightning.v1 import (
    buffer_service_pb2,
    policy_service_pb2,
    space_pb2,
    tensor_pb2,
)
from rlightning.wire import Limits, Reader, Writer
from rlightning.wire.shared import SharedMemory, open_shared

LIMITS = Limits(max_bytes=2**16, max_leaves=200, max_depth=8)


@st.composite
def insert_requests(draw):
    w = Writer()
    message = buffer_service_pb2.InsertRequest()
    for _ in range(draw(st.integers(0, 2))):
        item = message.insert.items.add()
        wire.fill_env_ret(item.env_ret, draw(env_rets()), w)
        wire.fill_policy_response(item.response, draw(policy_responses()), w)
    return w.finish(message)


@st.composite
def act_requests(draw):
    w = Writer()
    message = policy_service_pb2.ActRequest()
    if draw(st.booleans()):
        wire.fill_env_ret(message.step.env_ret, draw(env_rets()), w)
        wire.fill_value(message.step.state, draw(VALUES), w)
    else:
        wire.fill_env_meta(message.hello.session.spec, draw(ENV_METAS), w)
    return w.finish(message)


def read_insert(pb, r):
    return [
        [wire.read_env_ret(item.env_ret, r), wire.read_policy_response(item.response, r)]
        for item in pb.insert.items
    ]


def read_act(pb, r):
    if pb.WhichOneof("body") == "hello":
        return [pb.hello.session.client_id, wire.read_env_meta(pb.hello.session.spec, r)]
    return [pb.step.seq, wire.read_env_ret(pb.step.env_ret, r), wire.read_value(pb.step.state, r)]


KINDS = {
    "value": (tensor_pb2.Value, wire.read_value, VALUES.map(wire.encode_value)),
    "env_meta": (space_pb2.EnvMeta, wire.read_env_meta, ENV_METAS.map(wire.encode_env_meta)),
    "batch": (buffer_service_pb2.Batch, wire.read_batch, BATCHES.map(wire.encode_batch)),
    "act": (policy_service_pb2.ActRequest, read_act, act_requests()),
    "insert": (buffer_service_pb2.InsertRequest, read_insert, insert_requests()),
}


@st.composite
def mutations(draw, data: bytes) -> bytes:
    """Bytes changed, dropped, put in, repeated and moved."""
    out = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(out)))
        until = min(len(out), at + draw(st.integers(1, 12)))
        how = draw(st.sampled_from(["flip", "drop", "put", "repeat", "move", "pad", "cut"]))
        if how == "flip" and at < len(out):
            out[at] = draw(st.integers(0, 255))
        elif how == "drop":
            del out[at:until]
        elif how == "put":
            out[at:at] = draw(st.binary(max_size=8))
        elif how == "repeat":
            out += bytes(out[at:until] if draw(st.booleans()) else out)
        elif how == "move":
            part = out[at:until]
            del out[at:until]
            out += part
        elif how == "pad" and at < len(out) and out[at] < 0x80:
            out[at : at + 1] = bytes([out[at] | 0x80, 0])  # the same number, written longer
        elif how == "cut":
            del out[at:]
    return bytes(out)


def attempt(message_type, read_item, data, splice_bytes):
    """Returns what was read and None, or None and why nothing was."""
    try:
        r = Reader(message_type, data, limits=LIMITS, splice_bytes=splice_bytes)
        return read_item(r.message, r), None
    except CodecError as error:
        return None, error


def assert_agree(message_type, read_item, data):
    plain, refused = attempt(message_type, read_item, data, 2**62)
    for splice_bytes in (1, 5, 30):
        fast, fast_refused = attempt(message_type, read_item, data, splice_bytes)
        if refused is None:
            assert fast_refused is None
            compare(fast, plain)
        else:
            assert fast_refused is not None
            assert fast_refused.path == refused.path


def compare(fast, plain):
    if isinstance(plain, list):
        assert len(fast) == len(plain)
        for one, other in zip(fast, plain, strict=True):
            compare(one, other)
    elif isinstance(plain, EnvMeta):
        assert fast == plain
    else:
        assert_same(fast, plain)


@pytest.mark.parametrize("kind", KINDS)
@examples(200)
@given(data=st.data())
def test_mutated_messages_are_read_alike_or_refused_alike(kind, data):
    message_type, read_item, encoded = KINDS[kind]
    assert_agree(message_type, read_item, data.draw(mutations(data.draw(encoded))))


@pytest.mark.parametrize("kind", KINDS)
@examples(200)
@given(data=st.binary(max_size=64))
def test_arbitrary_bytes_are_read_alike_or_refused_alike(kind, data):
    message_type, read_item, _ = KINDS[kind]
    assert_agree(message_type, read_item, data)


@examples(100)
@given(data=st.data())
def test_mutated_references_to_shared_memory_are_read_within_it_or_refused(data):
    memory = SharedMemory(4096, min_bytes=1)
    there = open_shared(memory.offer, max_bytes=4096)
    w, message = Writer(splice_bytes=1, memory=memory), policy_service_pb2.ActRequest()
    wire.fill_env_ret(message.step.env_ret, data.draw(env_rets()), w)
    mutated = data.draw(mutations(w.finish(message)))
    memory.withdraw()
    try:
        r = Reader(policy_service_pb2.ActRequest, mutated, limits=LIMITS, memory=there)
        assert_bounded(wire.read_env_ret(r.message.step.env_ret, r).observation, there)
    except CodecError:
        pass


def assert_bounded(value, there):
    """Touches every byte; arrays over shared memory end within it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            assert_bounded(item, there)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        whole = np.frombuffer(there, np.uint8)
        if np.may_share_memory(value, whole):
            assert end_of(value) <= end_of(whole)
        value.tobytes()


def end_of(array):
    return array.__array_interface__["data"][0] + array.nbytes
