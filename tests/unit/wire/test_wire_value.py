from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from enum import IntEnum

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlightning.errors import CodecError
from rlightning.v1.tensor_pb2 import Null, Value, ValueList, ValueMap
from rlightning.wire import Limits, decode_value, encode_value

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 3


def round_trip(value):
    return decode_value(encode_value(value))


def nest(levels, wrap, value=1):
    for _ in range(levels - 1):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**63),
        2**63 - 1,
        0.0,
        -1.5,
        float("inf"),
        "",
        "naïve ☃",
        b"",
        b"\0\xff",
        [],
        (),
        {},
        {"": None},
        {"b": [1, (2.0, {"x": None})], "a": ([], ())},
        [True, 1, 1.0],
    ],
)
def test_plain_values_come_back_with_their_types(value):
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)  # tells True from 1 and keeps the order of keys


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        (deque([1, 2]), [1, 2]),
        (Point(1, 2), (1, 2)),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (bytearray(b"x"), b"x"),
        (memoryview(b"xy"), b"xy"),
        (np.str_("text"), "text"),
        (np.bytes_(b"raw"), b"raw"),
        (Colour.RED, 3),
    ],
)
def test_relatives_of_plain_values_come_back_plain(sent, back):
    result = round_trip(sent)
    assert result == back
    assert type(result) is type(back)


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.int8(3), np.bool_(True), np.complex64(1j)])
def test_numpy_scalars_come_back_as_arrays_without_axes(scalar):
    back = round_trip({"x": scalar})["x"]
    assert back.shape == ()
    assert back.dtype == scalar.dtype
    assert back == scalar


def test_a_tensordict_comes_back_as_a_dict_of_arrays():
    back = round_trip(TensorDict({"a": torch.ones(2)}, [2]))
    assert back.keys() == {"a"}
    assert back["a"].tolist() == [1, 1]


def test_whatever_gives_an_array_of_itself_is_sent_as_one():
    class Frames:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.uint8)

    assert round_trip([Frames()])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, "x", {"deep": [1]}, None], object),
        np.array([[None, 1], [2.5, ""]], object),
        np.array([None, None], object),
        np.array(None, object),
        np.empty((0, 3), object),
        np.array(["go", "", "left"]),
        np.array([b"ab", b""]),
        np.array("text"),
        np.array([["é", "ü"]], "<U5"),
    ],
)
def test_arrays_of_objects_and_text_come_back(array):
    back = round_trip({"x": array})["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()
    assert not back.flags.writeable


def test_numpy_scalars_within_an_array_of_objects_keep_their_dtype():
    back = round_trip(np.array([np.float32(1), None, np.arange(2)], object))
    assert back[0].dtype == np.float32
    assert back[2].tolist() == [0, 1]


def test_an_array_of_objects_is_sent_without_its_empty_elements():
    dense = np.empty(1000, object)
    dense[:] = "x"
    sparse = np.empty(1000, object)
    sparse[7] = "x"
    assert len(encode_value(sparse)) < 200 < len(encode_value(dense))


def test_the_infos_of_a_vector_env_come_back():
    env = gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    env.reset(seed=0)
    try:
        for _ in range(60):
            *_, info = env.step(np.zeros(2, np.int64))
            if info:
                break
    finally:
        env.close()
    back = round_trip(info)
    assert back.keys() == info.keys()
    assert info["_final_obs"].any()
    np.testing.assert_array_equal(back["_final_obs"], info["_final_obs"])
    for one, other in zip(back["final_obs"], info["final_obs"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        (object(), "", "cannot send a builtins.object"),
        ({"a": {1, 2}}, "a", "cannot send a builtins.set"),
        ({"camera": [1, {"x": np.float32}]}, "camera[1].x", "cannot send a builtins.type"),
        ([2**63], "[0]", "does not fit in 64 bits"),
        ((1, -(2**63) - 1), "[1]", "does not fit in 64 bits"),
        ({"a": {1: 2}}, "a", "a key that is no text: 1"),
        ({b"a": 2}, "", "a key that is no text"),
        ({"x": "\ud800"}, "x", "no valid Unicode"),
        ({"x": {"\ud800": 1}}, "x", "no valid Unicode"),
        ({"x": np.array([None, object()], object)}, "x.values[0]", "cannot send"),
        ({"x": {"__array__": 1}}, "x", "taken by the wire"),
        ({"x": np.zeros(1, "M8[s]")}, "x", "no dtype"),
        ({"k" * 1000: object()}, "k" * 60 + "...", "cannot send"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(value, path, message):
    with pytest.raises(CodecError, match=message) as caught:
        encode_value(value)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: " if path else "")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_nesting_is_bounded_on_both_sides(wrap):
    deep = nest(32, wrap)
    data = encode_value(deep)
    assert decode_value(data) == deep
    with pytest.raises(CodecError, match="deeper than 32 levels"):
        encode_value(wrap(deep))
    with pytest.raises(CodecError, match="deeper than 31 levels"):
        decode_value(data, Limits(max_depth=31))


def test_far_deeper_nesting_is_left_to_protobuf_and_refused():
    data = b""
    for _ in range(5000):
        inner = b"\x0a" + varint(len(data)) + data
        data = b"\x42" + varint(len(inner)) + inner
    with pytest.raises(CodecError, match="no valid Value"):
        decode_value(data)


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def test_leaves_are_counted_over_the_whole_message():
    value = {"a": [1] * 50, "b": [2] * 48}  # 2 + 50 + 48
    data = encode_value(value)
    assert decode_value(data, Limits(max_leaves=100)) == value
    with pytest.raises(CodecError, match="more than 99 values") as caught:
        decode_value(data, Limits(max_leaves=99))
    assert caught.value.path == "b"
    with pytest.raises(CodecError, match="more than 10000 values"):
        encode_value([0] * 10_001)


def entries(*pairs):
    message = ValueMap()
    for key, value in pairs:
        message.entries.add(key=key, value=value)
    return Value(map_value=message)


ONE = Value(int_value=1)


@pytest.mark.parametrize(
    ("message", "path", "error"),
    [
        (Value(), "", "no value"),
        (Value(list_value=ValueList(values=[ONE, Value()])), "[1]", "no value"),
        (entries(("a", Value())), "a", "no value"),
        (entries(("a", ONE), ("b", ONE), ("a", ONE)), "a", "comes twice"),
        (
            entries(("a", entries(("x", ONE), ("x", Value(null_value=Null()))))),
            "a.x",
            "comes twice",
        ),
        (Value(tensor_value={"dtype": 50}), "", "unknown dtype"),
    ],
)
def test_bad_values_are_refused_with_their_path(message, path, error):
    with pytest.raises(CodecError, match=error) as caught:
        decode_value(message.SerializeToString())
    assert caught.value.path == path


@pytest.mark.parametrize(
    "data", [b"\x10", b"\xff" * 20, b"\x2a\x02\xc3\x28", b"\x3a\x05\x1a\x09abc"]
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(CodecError, match="no valid Value"):
        decode_value(data)


def array_map(kind="O", shape=(3,), rows=(0, 2), values=(1, 2), **more):
    return {
        "__array__": kind,
        "shape": np.array(shape, np.int64),
        "rows": np.array(rows, np.int64),
        "values": list(values),
        **more,
    }


@pytest.mark.parametrize(
    ("parts", "path", "error"),
    [
        (array_map(more=1), "", "has the keys"),
        (array_map(kind="V8"), "__array__", "unknown kind"),
        (array_map(kind=5), "__array__", "unknown kind"),
        (array_map(kind="U"), "__array__", "unknown kind"),
        (array_map(kind="U999999999"), "__array__", "unknown kind"),
        (array_map(shape=[-1]), "", "negative axis"),
        (array_map(shape=[[3]]), "shape", "expected a tensor of int64"),
        (array_map(shape=[10**12]), "", "more than 10000 values"),
        (array_map(shape=[2**40, 2**40]), "", "too large"),
        (array_map(kind="U9999999", shape=[9000]), "", "needs more than 167772160 bytes"),
        (array_map(rows=[2, 0]), "rows", "ascending positions below 3"),
        (array_map(rows=[1, 1]), "rows", "ascending"),
        (array_map(rows=[-1, 0]), "rows", "ascending"),
        (array_map(rows=[0, 3]), "rows", "below 3"),
        (array_map(rows=[0]), "values", "expected a list of 1"),
        ({**array_map(), "rows": "x"}, "rows", "expected a tensor of int64"),
        ({**array_map(), "values": "xy"}, "values", "expected a list of 2"),
        (array_map(kind="U2", values=["ab", "abc"]), "values[1]", "no element"),
        (array_map(kind="S2", values=[b"ab", "a"]), "values[1]", "no element"),
    ],
)
def test_maps_that_stand_for_no_array_are_refused(parts, path, error):
    message = Value()
    for key, value in parts.items():
        message.map_value.entries.add(key=key, value=Value.FromString(encode_value(value)))
    with pytest.raises(CodecError, match=error) as caught:
        decode_value(message.SerializeToString())
    assert caught.value.path == path
