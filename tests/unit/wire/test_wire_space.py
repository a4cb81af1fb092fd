from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from gymnasium import Space as BaseSpace
from gymnasium import spaces

from rlightning.errors import CodecError
from rlightning.types import EnvMeta
from rlightning.v1 import space_pb2
from rlightning.v1.tensor_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_COMPLEX64,
    DTYPE_FLOAT32,
    DTYPE_INT8,
    DTYPE_INT64,
    DTYPE_UINT8,
    Tensor,
)
from rlightning.wire import (
    Limits,
    decode_env_meta,
    decode_space,
    encode_env_meta,
    encode_space,
)
from rlightning.wire.frame import Writer
from rlightning.wire.tensor import fill_tensor


def round_trip(space):
    return decode_space(encode_space(space))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3, 4)),
        spaces.Box(np.array([-1.0, -0.0]), np.array([0.0, 1.0]), dtype=np.float64),
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(0, 1, (), np.float16),
        spaces.Box(0, 1, (0, 2)),
        spaces.Box(0, 1, (2,), np.bool_),
        spaces.Discrete(5),
        spaces.Discrete(5, start=-2),
        spaces.Discrete(5, dtype=np.uint8),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 3]),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, -1]]),
        spaces.MultiDiscrete([2, 3], dtype=np.int8),
        spaces.Text(5, min_length=0, charset="zyx☃"),
        spaces.Text(5),
        spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Dict())]),
        spaces.Tuple([]),
        spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]),
        spaces.Sequence(spaces.Text(3)),
        spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
        spaces.Graph(spaces.Box(0, 1, (3,)), spaces.Discrete(3)),
        spaces.Graph(spaces.Discrete(3), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Text(3)]),
    ],
    ids=str,
)
def test_every_space_comes_back(space):
    back = round_trip(space)
    assert type(back) is type(space)
    assert back == space
    assert str(back) == str(space)
    assert back.dtype == space.dtype


def test_the_order_of_a_dict_space_is_kept():
    assert list(
        round_trip(spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(2))]))
    ) == [
        "b",
        "a",
    ]


def test_seeds_are_not_sent():
    space = spaces.Discrete(1000)
    space.seed(3)
    assert encode_space(space) == encode_space(spaces.Discrete(1000))


@pytest.mark.parametrize(
    "box",
    [
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(np.array([-np.inf, 0]), np.array([5, np.inf]), dtype=np.float64),
        spaces.Box(np.array([-np.inf, 0]), np.array([5, np.inf]), dtype=np.int32),
        spaces.Box(-np.inf, 7, (2,), np.int64),
        spaces.Box(-3, np.inf, (), np.int64),
        spaces.Box(-(2**63), 2**63 - 2, (2,), np.int64),
        spaces.Box(0, 2**64 - 2, (2,), np.uint64),
    ],
    ids=str,
)
def test_infinite_and_extreme_bounds_come_back(box):
    back = round_trip(box)
    for name in ("low", "high", "bounded_below", "bounded_above"):
        np.testing.assert_array_equal(getattr(back, name), getattr(box, name))
    assert back.low.dtype == box.low.dtype


def test_an_infinite_bound_beside_a_huge_integer_is_refused():
    box = spaces.Box(np.array([2**62 + 1, 0]), np.array([2**62 + 1, 5]), dtype=np.int64)
    box.bounded_above = np.array([True, False])
    with pytest.raises(CodecError, match=r"^high: .*2\*\*53"):
        encode_space(box)


def test_equal_bounds_are_sent_once():
    assert len(encode_space(spaces.Box(0, 255, (84, 84, 4), np.uint8))) < 50


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-np.inf, np.inf)])
def test_a_huge_box_with_equal_bounds_keeps_them_once(dtype, low, high):
    if dtype is np.uint8:
        low, high = 0, 255
    box = spaces.Box(low, high, (300, 300), dtype)
    data = encode_space(box)
    tracemalloc.start()
    back = decode_space(data)
    assert tracemalloc.get_traced_memory()[1] < 20_000
    tracemalloc.stop()
    assert back == box
    assert back.contains(back.sample())
    assert back.is_bounded() == box.is_bounded()
    assert encode_space(back) == data


def test_a_class_derived_from_a_space_is_sent_as_that_space():
    class Joint(spaces.Box):
        pass

    assert type(round_trip(Joint(-1, 1, (2,)))) is spaces.Box


def test_declared_sizes_come_back():
    space = spaces.Sequence(spaces.Discrete(2))
    space.max_bytes = 4096
    assert round_trip(space).max_bytes == 4096
    assert not hasattr(round_trip(spaces.Discrete(2)), "max_bytes")


class Unknown(BaseSpace):
    pass


def with_max_bytes(value):
    space = spaces.Discrete(2)
    space.max_bytes = value
    return space


@pytest.mark.parametrize(
    ("space", "path", "message"),
    [
        (Unknown(), "", "the wire has no space .*Unknown"),
        (spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), Unknown()])), "a[1]", "no space"),
        (spaces.Dict({1: spaces.Discrete(2)}), "", "a key that is no text: 1"),
        (spaces.Discrete(2**63, dtype=np.uint64), "", "does not fit in 64 bits"),
        (spaces.Text(2**63), "", "does not fit in 64 bits"),
        (with_max_bytes("many"), "max_bytes", "expected an integer"),
    ],
)
def test_what_is_no_space_of_the_wire_is_refused(space, path, message):
    with pytest.raises(CodecError, match=message) as caught:
        encode_space(space)
    assert caught.value.path == path


def tensor(array, dtype=None):
    message = Tensor()
    fill_tensor(message, np.asarray(array), Writer())
    if dtype is not None:
        message.dtype = dtype
    return message


def box(low, high, shape, dtype):
    return space_pb2.Space(box={"low": low, "high": high, "shape": shape, "dtype": dtype})


F0, F1 = tensor(np.float32(0)), tensor(np.float32(1))
I0 = tensor(np.int8(0))


def discrete(**fields):
    return space_pb2.Space(discrete=fields)


TWO = discrete(n=2, dtype=DTYPE_INT64)


@pytest.mark.parametrize(
    ("message", "path", "error"),
    [
        (space_pb2.Space(), "", "no space"),
        (space_pb2.Space(discrete={"n": 2, "dtype": DTYPE_INT64}, max_bytes=-1), "", "negative"),
        (box(F0, F1, [2], 77), "", "unknown dtype 77"),
        (box(F0, F1, [-2], DTYPE_FLOAT32), "", "negative axis"),
        (box(F0, F1, [2**40], DTYPE_FLOAT32), "", "needs more than 167772160 bytes"),
        (box(F0, F1, [2**40, 2**40], DTYPE_FLOAT32), "", "too large"),
        (box(F0, tensor(np.float64(1)), [2], DTYPE_FLOAT32), "high", "expected float32"),
        (box(F0, tensor(np.ones(3, "f4")), [2], DTYPE_FLOAT32), "high", r"expected shape \[2\]"),
        (box(F0, tensor(np.float32(np.nan)), [2], DTYPE_FLOAT32), "high", "no number"),
        (box(Tensor(), F1, [2], DTYPE_FLOAT32), "low", "unknown dtype"),
        (box(F1, F0, [2], DTYPE_FLOAT32), "", "no valid box space"),
        (box(F0, F1, [1] * 33, DTYPE_FLOAT32), "", "33 axes"),
        (box(tensor(np.float64(-1e3)), I0, [2], DTYPE_INT8), "low", "no int8"),
        (box(tensor(np.float64(0.5)), I0, [2], DTYPE_INT8), "low", "no int8"),
        (box(tensor(np.float64(np.inf)), I0, [2], DTYPE_INT8), "low", "no int8"),
        (box(I0, tensor(2.0**63), [], DTYPE_INT64), "low", "expected int64, got int8"),
        (box(tensor(0), tensor(2.0**63), [], DTYPE_INT64), "high", "no int64"),
        (box(tensor(1j), tensor(1j), [], DTYPE_COMPLEX64), "low", "expected complex64"),
        (
            box(tensor(np.complex64(0)), tensor(np.complex64(1)), [], DTYPE_COMPLEX64),
            "",
            "no valid box space",
        ),
        (box(F0, F1, [2], DTYPE_BFLOAT16), "", "unknown dtype"),
        (discrete(n=0, dtype=DTYPE_INT64), "", "no choices of int64"),
        (discrete(n=300, dtype=DTYPE_UINT8), "", "no choices of uint8"),
        (discrete(n=3, start=-1, dtype=DTYPE_UINT8), "", "no choices of uint8"),
        (discrete(n=3, dtype=DTYPE_FLOAT32), "", "expected an integer dtype"),
        (space_pb2.Space(multi_binary={"shape": [0]}), "", "no valid multi_binary space"),
        (space_pb2.Space(multi_binary={"shape": [2, 2], "flat": True}), "", "one axis"),
        (space_pb2.Space(multi_binary={"shape": [2**50]}), "", "needs more than"),
        (
            space_pb2.Space(
                multi_discrete={"nvec": tensor([2]), "start": I0, "dtype": DTYPE_INT64}
            ),
            "start",
            "expected int64, got int8",
        ),
        (
            space_pb2.Space(
                multi_discrete={"nvec": tensor([0]), "start": tensor([0]), "dtype": DTYPE_INT64}
            ),
            "",
            "no valid multi_discrete",
        ),
        (
            space_pb2.Space(text={"min_length": 2, "max_length": 1, "charset": "a"}),
            "",
            "no valid text space",
        ),
        (space_pb2.Space(text={"max_length": 1, "charset": "aba"}), "", "comes twice"),
        (
            space_pb2.Space(
                dict={"entries": [{"key": "a", "space": TWO}, {"key": "a", "space": TWO}]}
            ),
            "a",
            "comes twice",
        ),
        (space_pb2.Space(dict={"entries": [{"key": "a"}]}), "a", "no space"),
        (space_pb2.Space(tuple={"spaces": [TWO, space_pb2.Space()]}), "[1]", "no space"),
        (space_pb2.Space(sequence={}), "", "no space"),
        (space_pb2.Space(one_of={}), "", "no valid one_of space"),
    ],
)
def test_messages_that_make_no_space_are_refused(message, path, error):
    with pytest.raises(CodecError, match=error) as caught:
        decode_space(message.SerializeToString())
    assert caught.value.path == path


def test_sizes_add_up_over_all_spaces_of_a_message():
    inner = [spaces.Box(0, 1, (1000,), np.uint8)] * 3
    data = encode_space(spaces.Tuple(inner))
    assert decode_space(data, Limits(max_bytes=3000)) == spaces.Tuple(inner)
    with pytest.raises(CodecError, match="needs more than 2999 bytes") as caught:
        decode_space(data, Limits(max_bytes=2999))
    assert caught.value.path == "[2]"


def test_copies_that_gymnasium_makes_are_counted():
    space = spaces.Discrete(2)
    for _ in range(20):  # each level would double the memory
        space = space_pb2.Space(sequence={"stack": True, "feature_space": _message(space)})
    with pytest.raises(CodecError, match="more than 300 values"):
        decode_space(space.SerializeToString(), Limits(max_leaves=300))


def test_tables_that_gymnasium_makes_of_a_charset_are_counted():
    charset = "".join(map(chr, range(0x20, 0x20 + 1000)))
    data = encode_space(spaces.Text(1, charset=charset))
    with pytest.raises(CodecError, match="need more than 200000 bytes"):
        decode_space(data, Limits(max_kept_bytes=200_000))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(np.arange(20_000) % 3, 9.0, (20_000,), np.float32),
        spaces.MultiDiscrete(np.full(20_000, 3)),
        spaces.MultiDiscrete([3] * 20_000, start=list(range(20_000))),
        spaces.Dict({"x" * 60_000: spaces.Discrete(2)}),
        spaces.Tuple([spaces.Discrete(2)] * 200),
        spaces.Sequence(spaces.Box(np.arange(10_000) % 3, 9.0, (10_000,), np.float32), stack=True),
    ],
    ids=["bounds", "nvec", "start", "key", "many", "batched"],
)
def test_what_is_kept_of_a_spec_is_bounded(space):
    data = encode_space(space)
    assert decode_space(data) == space
    with pytest.raises(CodecError, match="spaces that need more than 150000 bytes"):
        decode_space(data, Limits(max_kept_bytes=150_000))


def test_a_large_box_with_one_bound_for_all_keeps_little():
    data = encode_space(spaces.Box(0, 255, (4000, 4000), np.uint8))
    assert decode_space(data, Limits(max_kept_bytes=10_000)).shape == (4000, 4000)


def _message(space):
    if isinstance(space, space_pb2.Space):
        return space
    return space_pb2.Space.FromString(encode_space(space))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda space: spaces.Dict(a=space),
        lambda space: spaces.Tuple([space]),
        lambda space: spaces.Sequence(space),
        lambda space: spaces.OneOf([space]),
    ],
)
def test_nesting_is_bounded_on_both_sides(wrap):
    space = spaces.Discrete(2)
    for _ in range(31):
        space = wrap(space)
    data = encode_space(space)
    assert decode_space(data) == space
    with pytest.raises(CodecError, match="deeper than 31 levels"):
        decode_space(data, Limits(max_depth=31))
    with pytest.raises(CodecError, match="deeper than 32 levels"):
        encode_space(wrap(space))


@pytest.mark.parametrize(
    "meta",
    [
        EnvMeta(),
        EnvMeta("a", spaces.Discrete(2), spaces.Dict(a=spaces.Box(0, 1)), 4),
        EnvMeta("a", {"x": spaces.Discrete(2)}, {"x": spaces.Discrete(3), "y": spaces.Text(3)}),
        EnvMeta("a", {}, spaces.Discrete(2)),
    ],
)
def test_env_metas_come_back(meta):
    assert decode_env_meta(encode_env_meta(meta)) == meta


@pytest.mark.parametrize(
    ("meta", "path"),
    [
        (EnvMeta(5), "env_id"),
        (EnvMeta("a", num_envs=2.5), "num_envs"),
        (EnvMeta("a", action_space=Unknown()), "action_space"),
        (EnvMeta("a", observation_space={"x": Unknown()}), "observation_space.x"),
    ],
)
def test_env_metas_that_cannot_be_sent_are_refused(meta, path):
    with pytest.raises(CodecError) as caught:
        encode_env_meta(meta)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (space_pb2.EnvMeta(num_envs=0), "num_envs"),
        (space_pb2.EnvMeta(num_envs=2**20 + 1), "num_envs"),
        (space_pb2.EnvMeta(action_space=space_pb2.Space()), "action_space"),
        (
            space_pb2.EnvMeta(action_space=TWO, agent_action_spaces=space_pb2.DictSpace()),
            "action_space",
        ),
        (
            space_pb2.EnvMeta(agent_observation_spaces={"entries": [{"key": "x"}]}),
            "observation_space.x",
        ),
    ],
)
def test_env_metas_that_make_none_are_refused(message, path):
    with pytest.raises(CodecError) as caught:
        decode_env_meta(message.SerializeToString())
    assert caught.value.path == path
