from __future__ import annotations

import numpy as np
import pytest

from rlightning import wire
from rlightning.errors import CodecError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.v1 import buffer_service_pb2, env_ret_pb2, policy_service_pb2, tensor_pb2
from rlightning.wire import (
    CHUNK_BYTES,
    Batch,
    ChunkJoiner,
    Limits,
    Reader,
    Writer,
    decode_batch,
    encode_batch,
    encode_value,
    fill_env_ret,
    fill_policy_response,
    fill_tensor,
    fill_value,
    read_env_ret,
    read_value,
    split_batch,
)
from rlightning.wire.extract import extract, plan_of
from rlightning.wire.splice import MARKER

PLAIN = 2**62
IMAGE = np.arange(64 * 1024, dtype=np.uint8)


def insert_request(splice_bytes, items=3):
    w = Writer(splice_bytes=splice_bytes)
    message = buffer_service_pb2.InsertRequest()
    message.insert.seq = 5
    for number in range(items):
        item = message.insert.items.add()
        fill_policy_response(item.response, PolicyResponse("e", action=IMAGE[number:]), w)
        fill_env_ret(
            item.env_ret,
            EnvRet("e", {"a": IMAGE[::2], "small": np.zeros(2), "b": (IMAGE,)}, ts_env_sent_ns=1),
            w,
        )
    message.timing.sent_ns = 9
    return message, w


def test_large_tensors_make_the_bytes_of_plain_protobuf():
    message, w = insert_request(16 * 1024)
    plain, _ = insert_request(PLAIN)
    data = w.finish(message)
    assert data == plain.SerializeToString()
    r = Reader(buffer_service_pb2.InsertRequest, data)
    assert (r.message.insert.seq, r.message.timing.sent_ns) == (5, 9)
    for item in r.message.insert.items:
        observation = read_env_ret(item.env_ret, r).observation
        assert observation["a"].tobytes() == IMAGE[::2].tobytes()
        assert observation["b"][0].tobytes() == IMAGE.tobytes()


def test_a_message_is_spliced_from_16_kib_on():
    for size in (16 * 1024 - 1, 16 * 1024):
        w = Writer()
        message = tensor_pb2.Tensor()
        fill_tensor(message, np.zeros(size, np.uint8), w)
        assert (len(message.data) < size) == (size == 16 * 1024)


def test_nothing_of_the_marker_reaches_the_wire():
    message, w = insert_request(1)
    assert MARKER in message.SerializeToString()
    assert MARKER not in w.finish(message)


def test_a_message_filled_by_two_writers_is_refused():
    message, w = insert_request(1)
    fill_tensor(message.insert.items[0].env_ret.observation.tensor_value, IMAGE, Writer())
    for writer in (w, Writer()):
        with pytest.raises(CodecError, match="not filled by this writer alone"):
            writer.finish(message)


def test_a_part_that_was_dropped_or_doubled_is_refused():
    message, w = insert_request(1)
    del message.insert.items[0]
    with pytest.raises(CodecError, match="not filled by this writer alone"):
        w.finish(message)
    message, w = insert_request(1)
    message.insert.items.append(message.insert.items[0])
    with pytest.raises(CodecError, match="not filled by this writer alone"):
        w.finish(message)


def test_more_than_two_gib_are_refused_before_they_are_joined():
    w = Writer()
    message = tensor_pb2.Tensor()
    fill_tensor(message, np.broadcast_to(np.uint8(0), (8,)), w)
    half = np.zeros(2**30, np.uint8)  # never touched, so it takes no memory
    batch = Batch(1, {"a": half, "b": half}, {})
    with pytest.raises(CodecError, match="protobuf can read 2147483647"):
        encode_batch(batch)


def test_a_placeholder_of_a_peer_is_data():
    forged = MARKER + b"\0\0\0\0"  # even if a peer could guess it
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_UINT8, shape=[20], data=forged)
    data = message.SerializeToString()
    r = Reader(tensor_pb2.Tensor, data)
    assert wire.read_tensor(r.message, r).tobytes() == forged


def test_a_message_above_the_cap_is_refused_with_both_sizes():
    data = encode_value(np.zeros(1000, np.uint8))
    with pytest.raises(CodecError, match=rf"a message of {len(data)} bytes; at most 1000"):
        wire.decode_value(data, Limits(max_bytes=1000))
    wire.decode_value(data, Limits(max_bytes=len(data)))


@pytest.mark.parametrize("max_depth", [0, 33])
def test_a_depth_that_protobuf_cannot_read_is_refused(max_depth):
    with pytest.raises(ValueError, match="max_depth"):
        Limits(max_depth=max_depth)


def test_the_deepest_values_fit_in_the_deepest_envelope():
    deep = np.zeros(1)
    for _ in range(31):
        deep = {"k": deep}
    w = Writer()
    message = buffer_service_pb2.InsertRequest()
    fill_env_ret(message.insert.items.add().env_ret, EnvRet("e", deep), w)
    r = Reader(buffer_service_pb2.InsertRequest, w.finish(message))
    assert read_env_ret(r.message.insert.items[0].env_ret, r).observation.keys() == {"k"}


# Bytes that no encoder of ours writes, but that protobuf takes.


def large(field, payload):
    return bytes([field << 3 | 2]) + varint(len(payload)) + payload


def varint(value, padded=0):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    if not padded:
        return out + bytes([value])
    return out + bytes([value | 0x80]) + b"\x80" * (padded - 1) + b"\0"


DATA = bytes(20_000)
ONES = b"\1" * 20_000
DTYPE = bytes([1 << 3, tensor_pb2.DTYPE_UINT8])
SHAPE = b"\x12" + varint(len(varint(20_000))) + varint(20_000)


@pytest.mark.parametrize(
    "tensor",
    [
        DTYPE + SHAPE + large(3, ONES) + large(3, DATA),  # the last one counts
        large(3, DATA) + SHAPE + DTYPE,  # in any order
        DTYPE + b"\x10" + varint(20_000) + large(3, DATA),  # an unpacked shape
        DTYPE + SHAPE + large(3, DATA) + large(15, ONES),  # an unknown field
        DTYPE + SHAPE + large(3, DATA) + b"\x7d\0\0\0\0" + b"\x79" + bytes(8),
        DTYPE + SHAPE + large(3, DATA) + b"\x7b\x08\x01\x7c",  # an unknown group
        DTYPE + SHAPE + b"\x1a" + varint(20_000, padded=1) + DATA,
        b"\x88\0" + DTYPE[1:] + SHAPE + large(3, DATA),  # a tag written longer
    ],
)
def test_unusual_bytes_are_read_as_protobuf_reads_them(tensor):
    expected = tensor_pb2.Tensor.FromString(tensor)
    r = Reader(tensor_pb2.Tensor, tensor)
    array = wire.read_tensor(r.message, r)
    assert array.tobytes() == expected.data == DATA


def test_repeated_parts_of_a_message_are_merged_as_protobuf_merges_them():
    first = large(7, DTYPE + large(3, DATA))
    second = large(7, SHAPE + large(15, ONES))
    r = Reader(tensor_pb2.Value, first + second)
    assert read_value(r.message, r).tobytes() == DATA


@pytest.mark.parametrize(
    "data",
    [
        large(3, DATA)[:-1],
        large(3, DATA) + b"\x1a",
        large(3, DATA) + b"\x1a\x05abc",
        large(3, DATA) + b"\xff" * 11,
        large(3, DATA) + b"\x0f",
        large(3, DATA) + b"\x7d\0",
        large(3, DATA) + b"\x00\x00",
    ],
)
def test_bytes_cut_short_or_wrong_are_refused(data):
    with pytest.raises(CodecError, match="no valid Tensor"):
        Reader(tensor_pb2.Tensor, data)


def test_a_field_longer_than_its_message_is_refused():
    inner = DTYPE + SHAPE + b"\x1a" + varint(30_000) + DATA
    with pytest.raises(CodecError, match="no valid Value"):
        Reader(tensor_pb2.Value, large(7, inner) + bytes(20_000))


def test_only_tensors_are_taken_out():
    text = encode_value({"text": "x" * 20_000, "raw": bytes(20_000), "image": IMAGE})
    rest, ranges = extract(
        text, plan_of(tensor_pb2.Value.DESCRIPTOR), splice_bytes=16 * 1024, max_fields=100
    )
    assert len(ranges) == 1
    assert 40_000 < len(rest) < 41_000


def test_messages_without_tensors_are_never_walked():
    plan = plan_of(policy_service_pb2.PullWeightsResponse.DESCRIPTOR)
    assert plan.large == {}
    assert plan_of(policy_service_pb2.ActRequest.DESCRIPTOR).large
    chunk = policy_service_pb2.PullWeightsResponse(chunk=bytes(2**20))
    assert (
        Reader(policy_service_pb2.PullWeightsResponse, chunk.SerializeToString()).message == chunk
    )


# Bytes that would take far more memory than they are.


def test_millions_of_tiny_values_are_refused_before_protobuf_expands_them():
    data = large(8, b"\x0a\x00" * 20_000_000)  # a list of values of two bytes each
    with pytest.raises(CodecError, match=r"more than 160000 fields"):
        Reader(tensor_pb2.Value, data)


def test_millions_of_row_numbers_are_refused_before_protobuf_expands_them():
    data = large(15, bytes(2_000_000))
    with pytest.raises(CodecError, match="more than 250000 numbers"):
        Reader(env_ret_pb2.EnvRet, data, limits=Limits(max_bytes=4_000_000))
    Reader(env_ret_pb2.EnvRet, data)


def test_tiny_values_in_parts_too_small_to_walk_are_counted_too():
    part = large(8, b"\x0a\x00" * 8000)  # 16,000 bytes
    data = large(8, large(1, part) * 30)
    with pytest.raises(CodecError, match="more than 160000 fields"):
        Reader(tensor_pb2.Value, data)


@pytest.mark.parametrize("tail", [b"\x0a", b"\xff" * 11])
def test_malformed_bytes_are_refused_before_protobuf_sees_them(tail):
    with pytest.raises(CodecError, match="no valid message: cut short"):
        Reader(tensor_pb2.Value, large(5, b"x" * 300_000) + tail)


def test_many_tensors_below_the_size_of_splicing_pass():
    value = {str(number): np.zeros(15 * 1024, np.uint8) for number in range(100)}
    assert wire.decode_value(encode_value(value)).keys() == value.keys()


# Parts of a large message.


@pytest.mark.parametrize(
    "size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]
)
def test_parts_are_joined_again(size):
    data = np.random.default_rng(size).bytes(size)
    parts = list(split_batch(data))
    assert len(parts) == -(-size // CHUNK_BYTES)
    assert all(len(part) <= CHUNK_BYTES for _, part in parts)
    joiner = ChunkJoiner(size, max_bytes=size)
    results = [joiner.add(offset, bytes(part)) for offset, part in parts]
    assert results[-1] == data
    assert results[:-1] == [None] * (len(parts) - 1)


def test_a_batch_is_read_from_its_joined_parts():
    batch = Batch(1, {"x": np.arange(1_000_000)}, {})
    encoded = encode_batch(batch)
    joiner = ChunkJoiner(len(encoded), max_bytes=2**24)
    for offset, part in split_batch(encoded, chunk_bytes=100_000):
        whole = joiner.add(offset, bytes(part))
    back = decode_batch(whole)
    np.testing.assert_array_equal(back.columns["x"], batch.columns["x"])
    assert not back.columns["x"].flags.writeable


def test_empty_data_is_one_empty_part():
    assert [(offset, bytes(part)) for offset, part in split_batch(b"")] == [(0, b"")]
    assert ChunkJoiner(0, max_bytes=0).add(0, b"") == b""


def test_parts_must_come_in_order_and_end_where_announced():
    joiner = ChunkJoiner(4, max_bytes=4)
    assert joiner.add(0, b"ab") is None
    for offset, data in ((0, b"ab"), (3, b"d"), (2, b"cde")):
        with pytest.raises(CodecError, match=r"where 2\.\.4 is missing"):
            joiner.add(offset, data)
    assert joiner.add(2, b"cd") == b"abcd"


@pytest.mark.parametrize("total", [-1, 11])
def test_a_total_beyond_the_cap_is_refused_before_anything_is_allocated(total):
    with pytest.raises(CodecError, match="at most 10 are allowed"):
        ChunkJoiner(total, max_bytes=10)


def test_every_public_name_exists_and_is_listed_once():
    assert len(set(wire.__all__)) == len(wire.__all__)
    assert all(hasattr(wire, name) for name in wire.__all__)
    for kind in ("value", "space", "env_meta", "env_ret", "policy_response", "batch"):
        assert {f"{verb}_{kind}" for verb in ("encode", "decode", "fill", "read")} <= {
            *wire.__all__
        }


def test_filling_needs_no_limits_of_its_own():
    w = Writer()
    message = tensor_pb2.Value()
    fill_value(message, {"a": 1}, w)
    assert w.finish(message) == message.SerializeToString()
