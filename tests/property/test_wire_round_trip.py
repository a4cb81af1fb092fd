"""What goes in comes out, and the bytes are those of plain protobuf."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import (
    BATCHES,
    ENV_METAS,
    SCALARS,
    SPACES,
    VALUES,
    arrays,
    assert_same,
    assert_same_space,
    env_rets,
    examples,
    nested,
    plain_value,
    policy_responses,
)

from rlightning import wire
from rlightning.utils.conversions import BFloat16Array, to_device
from rlightning.v1 import (
    buffer_service_pb2,
    env_ret_pb2,
    policy_response_pb2,
    policy_service_pb2,
    tensor_pb2,
)
from rlightning.wire import Reader, Writer
from rlightning.wire.shared import SharedMemory, open_shared

NEVER = 2**62
# From one byte on, everything is spliced: small messages then exercise what large ones do.
SPLICE = st.sampled_from([1, 8, 21, 64, NEVER])


def write(message_type, fill, item, splice_bytes):
    w = Writer(splice_bytes=splice_bytes)
    message = message_type()
    fill(message, item, w)
    return w.finish(message)


def read(message_type, read_item, data, splice_bytes):
    r = Reader(message_type, data, splice_bytes=splice_bytes)
    return read_item(r.message, r)


KINDS = {
    "value": (tensor_pb2.Value, wire.fill_value, wire.read_value, VALUES),
    "env_ret": (env_ret_pb2.EnvRet, wire.fill_env_ret, wire.read_env_ret, env_rets()),
    "policy_response": (
        policy_response_pb2.PolicyResponse,
        wire.fill_policy_response,
        wire.read_policy_response,
        policy_responses(),
    ),
    "batch": (buffer_service_pb2.Batch, wire.fill_batch, wire.read_batch, BATCHES),
}


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data(), room=st.sampled_from([0, 2, 40]))
def test_round_trip_through_shared_memory_with_room_for_all_some_or_none(kind, data, room):
    message_type, fill, read_item, strategy = KINDS[kind]
    item = data.draw(strategy)
    memory = SharedMemory(64 * (1 + room), min_bytes=1)
    there = open_shared(memory.offer, max_bytes=2**20)
    w, message = Writer(splice_bytes=1, memory=memory), message_type()
    fill(message, item, w)
    encoded = w.finish(message)
    r = Reader(message_type, encoded, memory=there)
    assert_same(read_item(r.message, r), item)
    assert room or not r.shared_bytes


@pytest.mark.parametrize("kind", KINDS)
@examples(120)
@given(data=st.data(), splice_bytes=SPLICE, read_splice_bytes=SPLICE)
def test_round_trip_and_the_bytes_of_plain_protobuf(kind, data, splice_bytes, read_splice_bytes):
    message_type, fill, read_item, strategy = KINDS[kind]
    item = data.draw(strategy)
    encoded = write(message_type, fill, item, splice_bytes)
    plain = message_type()
    fill(plain, item, Writer(splice_bytes=NEVER))
    assert encoded == plain.SerializeToString()
    assert_same(read(message_type, read_item, encoded, read_splice_bytes), item)


@examples(150)
@given(value=nested(st.one_of(SCALARS, arrays())), splice_bytes=SPLICE)
def test_the_bytes_are_those_of_a_client_without_this_codec(value, splice_bytes):
    encoded = write(tensor_pb2.Value, wire.fill_value, value, splice_bytes)
    assert encoded == plain_value(value).SerializeToString()


@examples(100)
@given(env_ret=env_rets(), state=VALUES, splice_bytes=SPLICE, read_splice_bytes=SPLICE)
def test_parts_of_an_envelope_share_one_writer(env_ret, state, splice_bytes, read_splice_bytes):
    w = Writer(splice_bytes=splice_bytes)
    message = policy_service_pb2.ActRequest()
    wire.fill_value(message.step.state, state, w)  # not in the order of the fields
    wire.fill_env_ret(message.step.env_ret, env_ret, w)
    message.step.seq = 7
    r = Reader(policy_service_pb2.ActRequest, w.finish(message), splice_bytes=read_splice_bytes)
    assert r.message.step.seq == 7
    assert_same(wire.read_env_ret(r.message.step.env_ret, r), env_ret)
    assert_same(wire.read_value(r.message.step.state, r), state)


@examples(200)
@given(space=SPACES)
def test_spaces_come_back_exactly(space):
    assert_same_space(wire.decode_space(wire.encode_space(space)), space)


@examples(60)
@given(meta=ENV_METAS)
def test_env_metas_come_back_exactly(meta):
    back = wire.decode_env_meta(wire.encode_env_meta(meta))
    assert (back.env_id, back.num_envs) == (meta.env_id, meta.num_envs)
    assert_same_space(back.action_space, meta.action_space)
    assert_same_space(back.observation_space, meta.observation_space)


TORCH_DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@examples(80)
@given(
    dtype=st.sampled_from(TORCH_DTYPES),
    shape=hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    transposed=st.booleans(),
    splice_bytes=SPLICE,
)
def test_torch_tensors_come_back_as_arrays(dtype, shape, transposed, splice_bytes):
    count = int(np.prod(shape))
    tensor = torch.arange(count).reshape(shape).to(dtype)
    if transposed and tensor.ndim > 1:
        tensor = tensor.transpose(0, 1)
    encoded = write(tensor_pb2.Value, wire.fill_value, {"x": tensor}, splice_bytes)
    back = wire.decode_value(encoded)["x"]
    assert_same(back, tensor.numpy())


@examples(60)
@given(bits=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=0, min_side=0)), splice_bytes=SPLICE)
def test_bfloat16_survives_with_and_without_torch(bits, splice_bytes):
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    for sent in (tensor, bits.view(BFloat16Array)):
        encoded = write(tensor_pb2.Value, wire.fill_value, sent, splice_bytes)
        back = wire.decode_value(encoded)
        assert type(back) is BFloat16Array
        assert back.tobytes() == bits.tobytes()
    assert torch.equal(to_device(back, "cpu").view(torch.int16), tensor.view(torch.int16))
