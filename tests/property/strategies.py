"""What the wire can carry, as hypothesis strategies, and what it means to come back the same."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, settings

from rlightning.types import (
    ActionSource,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from rlightning.v1 import tensor_pb2
from rlightning.wire import Batch


def examples(count: int) -> settings:
    """The same examples in every run; RLIGHTNING_FUZZ_EXAMPLES=100000 looks for new ones."""
    more = int(os.environ.get("RLIGHTNING_FUZZ_EXAMPLES", "0"))
    return settings(
        max_examples=more or count,
        derandomize=not more,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# Arrays and values.

NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
DTYPES = st.sampled_from(["?", *NUMBERS, *(f">{name}" for name in NUMBERS)]).map(np.dtype)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def arrays(draw: st.DrawFn, shape: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> np.ndarray:
    """Arrays of every dtype and memory layout."""
    array = draw(hnp.arrays(draw(DTYPES), shape, fill=st.nothing()))
    for _ in range(draw(st.integers(0, 2))):
        layout = draw(st.sampled_from(["transposed", "reversed", "strided", "read-only"]))
        if layout == "transposed":
            array = array.T
        elif layout == "reversed":
            array = array[::-1] if array.ndim else array
        elif layout == "strided":
            array = np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
        else:
            array = array.copy()
            array.flags.writeable = False
    return array


@st.composite
def object_arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of objects and text, as in the infos of a vector env."""
    items = draw(
        st.one_of(
            st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers(-9, 9)), max_size=6),
            st.lists(st.text(max_size=4), min_size=1, max_size=6),
        )
    )
    if items and all(isinstance(item, str) for item in items) and draw(st.booleans()):
        return np.array(items)
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(-1, 1) if draw(st.booleans()) else array


INTS = st.integers(-(2**63), 2**63 - 1)
KEYS = st.text(max_size=4)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTS,
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=6),
)
LEAVES = st.one_of(SCALARS, arrays(), object_arrays())


def nested(leaves: st.SearchStrategy[Any], max_leaves: int = 8) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
        ),
        max_leaves=max_leaves,
    )


VALUES = nested(LEAVES)
MAPS = st.dictionaries(KEYS, nested(LEAVES, 3), max_size=3)
# An extra that is named like a field is refused.
EXTRAS = st.dictionaries(
    KEYS.filter(lambda name: name not in EnvRet.fields()), nested(LEAVES, 3), max_size=3
)


# Types.


@st.composite
def env_rets(draw: st.DrawFn) -> EnvRet:
    rows = draw(st.integers(1, 5))
    info = draw(MAPS)
    if draw(st.booleans()):
        ended = draw(st.sets(st.integers(0, rows - 1), min_size=1))
        info["final_rows"] = np.array(sorted(ended), np.int32)
        info["final_observation"] = draw(arrays())
        if draw(st.booleans()):
            info["final_info"] = draw(MAPS)
    per_row = hnp.arrays(np.int64, rows)
    reward, flag = (
        st.one_of(kind, arrays(st.just((rows,)))) for kind in (st.floats(), st.booleans())
    )
    source = st.sampled_from([int(item) for item in ActionSource])
    return draw(st.sampled_from([EnvRet, MultiAgentEnvRet]))(
        draw(st.text(max_size=8)),
        draw(VALUES),
        draw(reward),
        draw(flag),
        draw(flag),
        info,
        draw(EXTRAS),
        draw(INTS),
        executed_action=draw(st.one_of(st.none(), VALUES)),
        action_source=draw(st.one_of(st.none(), hnp.arrays(np.int8, rows, elements=source))),
        answered_seq=draw(INTS),
        chunk_index=draw(st.integers(0, 9)),
        ts_observed_ns=draw(INTS),
        episode_id=draw(st.one_of(st.none(), per_row)),
        step=draw(st.one_of(st.none(), per_row)),
        rows=draw(st.sampled_from([None, np.arange(2, rows + 2, dtype=np.int32)])),
    )


@st.composite
def policy_responses(draw: st.DrawFn) -> PolicyResponse:
    outputs = draw(
        st.dictionaries(st.sampled_from(["action", "log_prob", "value", "état", ""]), VALUES)
    )
    kind = draw(st.sampled_from([PolicyResponse, MultiAgentPolicyResponse]))
    response = kind(draw(st.text(max_size=8)), **outputs)
    if draw(st.booleans()):
        response.policy_version = draw(INTS)
    if draw(st.booleans()):
        response.ts_policy_sent_ns = draw(st.integers(1, 2**63 - 1))
    return response


BATCHES = st.builds(Batch, INTS, MAPS, MAPS)


# Spaces.


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = draw(
        st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "u1", "u4", "?"]).map(np.dtype)
    )
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    elements = {"f": st.floats(-1000, 1000, width=16), "b": st.booleans()}.get(dtype.kind)
    one, other = (
        draw(hnp.arrays(dtype, shape, elements=elements, fill=st.nothing())) for _ in range(2)
    )
    low, high = np.array(np.minimum(one, other)), np.array(np.maximum(one, other))
    if dtype.kind in "fi":  # some without a bound; gymnasium takes that as floats
        low, high = low.astype(np.float64), high.astype(np.float64)
        low[draw(hnp.arrays(bool, shape))] = -np.inf
        high[draw(hnp.arrays(bool, shape))] = np.inf
        if dtype.kind == "f":
            low, high = low.astype(dtype), high.astype(dtype)
    return spaces.Box(low, high, shape, dtype.type)


SMALL = st.integers(1, 4)
INTEGERS = st.sampled_from(["i1", "i4", "i8", "u1", "u8"]).map(np.dtype)
DISCRETE = st.builds(
    lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype.type),
    st.integers(1, 100),
    st.integers(0, 20),
    INTEGERS,
)
MULTI_DISCRETE = st.builds(
    lambda nvec, dtype: spaces.MultiDiscrete(nvec, dtype=dtype.type, start=nvec[::-1]),
    hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=3), elements=st.integers(1, 9)),
    INTEGERS,
)
MULTI_BINARY = st.one_of(SMALL, st.lists(SMALL, min_size=1, max_size=3)).map(spaces.MultiBinary)
TEXT = st.builds(
    lambda low, more, charset: spaces.Text(low + more, min_length=low, charset=charset),
    SMALL,
    SMALL,
    st.text(min_size=1, max_size=5),
)
GRAPHS = st.builds(
    spaces.Graph, st.one_of(boxes(), DISCRETE), st.one_of(st.none(), boxes(), DISCRETE)
)
FLAT = st.one_of(boxes(), DISCRETE, MULTI_DISCRETE, MULTI_BINARY)
SPACES = st.recursive(
    st.one_of(FLAT, TEXT, GRAPHS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(spaces.Tuple),
        st.lists(inner, min_size=1, max_size=3).map(spaces.OneOf),
        st.lists(st.tuples(KEYS, inner), max_size=3, unique_by=lambda item: item[0]).map(
            spaces.Dict
        ),
        inner.map(spaces.Sequence),
        FLAT.map(lambda space: spaces.Sequence(space, stack=True)),
    ),
    max_leaves=5,
)
BY_AGENT = st.dictionaries(KEYS, SPACES, max_size=2)
ENV_METAS = st.builds(
    EnvMeta,
    st.one_of(st.none(), st.text(min_size=1, max_size=5)),
    st.one_of(st.none(), SPACES, BY_AGENT),
    st.one_of(st.none(), SPACES, BY_AGENT),
    st.one_of(st.none(), st.integers(1, 2**20)),
)


# What comes back.


def assert_same(back: Any, sent: Any) -> None:
    """Asserts that a value came back as it was sent: types, dtypes, shapes, order and bits."""
    if isinstance(sent, (EnvRet, PolicyResponse)):
        assert type(back) is type(sent)
        assert_same(dict(vars(back)), dict(vars(sent)))
    elif isinstance(sent, dict):
        assert type(back) is dict
        assert back.keys() == sent.keys()
        for key, item in sent.items():
            assert_same(back[key], item)
    elif isinstance(sent, (list, tuple)):
        assert type(back) is type(sent)
        assert len(back) == len(sent)
        for one, other in zip(back, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, np.ndarray):
        assert isinstance(back, np.ndarray)
        assert back.shape == sent.shape
        native = sent.dtype.newbyteorder("=")
        assert back.dtype == native
        if native.kind in "OU":
            assert back.tolist() == sent.tolist()
        else:
            assert back.tobytes() == sent.astype(native).tobytes()
    elif isinstance(sent, float):
        assert type(back) is float
        assert np.float64(back).tobytes() == np.float64(sent).tobytes() or back != back != sent
    else:
        assert type(back) is type(sent)
        assert back == sent


def assert_same_space(back: Any, sent: Any) -> None:
    """Asserts that two spaces are equal also where `==` does not look."""
    assert type(back) is type(sent)
    if sent is None:
        return
    if isinstance(sent, dict):
        assert list(back) == list(sent)
        for key, space in sent.items():
            assert_same_space(back[key], space)
        return
    assert isinstance(sent, gym.Space)
    assert back == sent
    assert back.dtype == sent.dtype
    assert back.shape == sent.shape
    if isinstance(sent, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            assert_same(np.asarray(getattr(back, name)), np.asarray(getattr(sent, name)))
    elif isinstance(sent, spaces.Text):
        assert back.character_list == sent.character_list
    elif isinstance(sent, spaces.MultiBinary):
        assert type(back.n) is type(sent.n)
    elif isinstance(sent, spaces.Dict):
        assert_same_space(back.spaces, sent.spaces)
    elif isinstance(sent, (spaces.Tuple, spaces.OneOf)):
        assert_same_space(dict(enumerate(back.spaces)), dict(enumerate(sent.spaces)))
    elif isinstance(sent, spaces.Sequence):
        assert_same_space(back.feature_space, sent.feature_space)
    elif isinstance(sent, spaces.Graph):
        assert_same_space(back.node_space, sent.node_space)
        assert_same_space(back.edge_space, sent.edge_space)


# Plain protobuf, written without anything of `rlightning.wire`.

CODES = {
    np.dtype(name): getattr(tensor_pb2, f"DTYPE_{np.dtype(name).name.upper()}")
    for name in ("?", *NUMBERS)
}


def plain_value(value: Any) -> tensor_pb2.Value:
    """The message of a value as a client of any language would make it."""
    pb = tensor_pb2.Value()
    if value is None:
        pb.null_value.SetInParent()
    elif isinstance(value, bool):
        pb.bool_value = value
    elif isinstance(value, int):
        pb.int_value = value
    elif isinstance(value, float):
        pb.float_value = value
    elif isinstance(value, str):
        pb.string_value = value
    elif isinstance(value, bytes):
        pb.bytes_value = value
    elif isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        pb.tensor_value.dtype = CODES[value.dtype.newbyteorder("=")]
        pb.tensor_value.shape.extend(value.shape)
        pb.tensor_value.data = little.tobytes()
    elif isinstance(value, dict):
        pb.map_value.SetInParent()
        for key, item in value.items():
            pb.map_value.entries.add(key=key, value=plain_value(item))
    else:
        items = pb.list_value if isinstance(value, list) else pb.tuple_value
        items.SetInParent()
        items.values.extend(plain_value(item) for item in value)
    return pb
