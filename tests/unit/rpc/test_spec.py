from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rlightning.errors import InvalidRequestError, PreconditionError
from rlightning.rpc.spec import (
    check_spec,
    diff_spec,
    needed_bytes,
    session_cap,
    shared_bytes,
    space_bytes,
)
from rlightning.types import EnvMeta
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import space_pb2
from rlightning.wire import Limits, Reader, Writer, encode_space, fill_env_meta

RPC = RpcConfig()
BOX = spaces.Box(-1, 1, (3, 4), np.float32)


def space_message(space) -> space_pb2.Space:
    return Reader(space_pb2.Space, encode_space(space)).message


def meta_message(meta: EnvMeta) -> space_pb2.EnvMeta:
    message, writer = space_pb2.EnvMeta(), Writer()
    fill_env_meta(message, meta, writer)
    return Reader(space_pb2.EnvMeta, writer.finish(message)).message


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (BOX, 48),
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), 84 * 84 * 4),
        (spaces.Discrete(5), 8),
        (spaces.MultiBinary((2, 3)), 6),
        (spaces.MultiDiscrete([3, 4]), 16),
        (spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}), 56),
        (spaces.Tuple([BOX, BOX]), 96),
        (spaces.OneOf([BOX, spaces.Discrete(2)]), 56),
    ],
)
def test_the_size_of_a_value_follows_from_its_space(space, size):
    assert space_bytes(space_message(space)) == size


def bounded(space, max_bytes):
    space.max_bytes = max_bytes
    return space


@pytest.mark.parametrize("space", [spaces.Text(10), spaces.Sequence(BOX), spaces.Graph(BOX, None)])
def test_max_bytes_bounds_what_the_space_does_not(space):
    assert space_bytes(space_message(bounded(space, 1000))) == 1000
    within = spaces.Dict({"a": bounded(space, 1000), "b": BOX})
    assert space_bytes(space_message(within)) == 1048


@pytest.mark.parametrize(
    ("observation", "action", "where"),
    [
        (spaces.Text(10), BOX, "observation_space: a Text"),
        (
            spaces.Dict({"a": BOX, "b": spaces.Tuple([BOX, spaces.Sequence(BOX)])}),
            BOX,
            "observation_space['b'][1]: a Sequence",
        ),
        (BOX, spaces.OneOf([BOX, spaces.Graph(BOX, None)]), "action_space[1]: a Graph"),
        ({"left": BOX, "right": spaces.Text(3)}, {"left": BOX}, "observation_space['right']: a Te"),
        ({"left": BOX}, {"left": spaces.Dict({"say": spaces.Text(3)})}, "['left']['say']: a Text"),
    ],
)
def test_a_space_without_a_bound_is_refused_with_its_path_and_the_key(observation, action, where):
    spec = meta_message(EnvMeta("env", action, observation, 2))
    with pytest.raises(InvalidRequestError) as raised:
        session_cap(spec, RPC)
    assert where in str(raised.value)
    assert "max_bytes" in str(raised.value)


def test_the_cap_is_two_observations_and_an_action_per_row_and_the_rest():
    meta = EnvMeta("env", spaces.Discrete(2), BOX, 64)
    assert session_cap(meta_message(meta), RPC) == 64 * (2 * 48 + 8) + RPC.info_budget_bytes


def test_the_cap_counts_every_agent():
    meta = EnvMeta(
        "env", {"a": spaces.Discrete(2), "b": spaces.Discrete(2)}, {"a": BOX, "b": BOX}, 2
    )
    assert session_cap(meta_message(meta), RPC) == 2 * (2 * 96 + 16) + RPC.info_budget_bytes


def test_two_observations_of_64_mb_fit_the_default():
    picture = spaces.Box(0, 255, (64, 2**20), np.uint8)
    meta = EnvMeta("env", spaces.Discrete(2), picture, 1)
    assert needed_bytes(meta, RpcConfig()) < RpcConfig().max_message_bytes
    assert Limits().max_bytes == RpcConfig().max_message_bytes


def test_the_cap_never_passes_the_transport_and_needs_spaces():
    message = meta_message(EnvMeta("env", spaces.Discrete(2), BOX, 10**6))
    message.observation_space.box.shape[:] = [10**15]
    assert session_cap(message, RPC) == RPC.max_message_bytes
    assert session_cap(space_pb2.EnvMeta(), RPC) == RPC.max_message_bytes


def test_equal_and_open_specs_pass():
    meta = EnvMeta("one", spaces.Discrete(2), BOX, 4)
    check_spec(meta, EnvMeta("two", spaces.Discrete(2), BOX, 4))
    check_spec(EnvMeta(), meta)


@pytest.mark.parametrize(
    ("expected", "got", "lines"),
    [
        (BOX, spaces.Box(-1, 1, (5,), np.float32), ["o.shape: expected (3, 4), got (5,)"]),
        (BOX, spaces.Box(-1, 1, (3, 4), np.float64), ["o.dtype: expected float32, got float64"]),
        (
            BOX,
            spaces.Box(-1, 2, (3, 4), np.float32),
            ["o.high: expected float32 from 1.0 to 1.0, got float32 from 2.0 to 2.0"],
        ),
        (BOX, None, ["o: expected Box, got none"]),
        (BOX, spaces.Discrete(2), ["o: expected Box, got Discrete"]),
        (spaces.Discrete(2), spaces.Discrete(2, start=1), ["o.start: expected 0, got 1"]),
        (
            spaces.MultiDiscrete([2, 3]),
            spaces.MultiDiscrete([2, 4]),
            ["o.nvec: expected [2 3], got [2 4]"],
        ),
        (
            spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}),
            spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32), "c": spaces.Discrete(2)}),
            [
                "o['a'].shape: expected (3, 4), got (1,)",
                "o['b']: missing",
                "o['c']: not expected",
            ],
        ),
        (
            spaces.Tuple([BOX, spaces.Discrete(2)]),
            spaces.Tuple([BOX, spaces.Discrete(3), BOX]),
            ["o.length: expected 2, got 3", "o[1].n: expected 2, got 3"],
        ),
        (
            spaces.Sequence(BOX, stack=True),
            spaces.Sequence(spaces.Discrete(2)),
            ["o.feature_space: expected Box, got Discrete", "o.stack: expected True, got False"],
        ),
        (
            spaces.Graph(BOX, None),
            spaces.Graph(BOX, spaces.Discrete(2)),
            ["o.edge_space: expected none, got Discrete"],
        ),
        (spaces.Text(5), spaces.Text(6), ["o.max_length: expected 5, got 6"]),
        ({"a": BOX}, {"a": BOX, "b": BOX}, ["o['b']: not expected"]),
    ],
)
def test_each_difference_is_one_line(expected, got, lines):
    found = list(diff_spec(EnvMeta(observation_space=expected), EnvMeta(observation_space=got)))
    assert [line.replace("observation_space", "o") for line in found] == lines


def test_the_error_names_all_differences():
    expected = EnvMeta("env", spaces.Discrete(2), BOX, 4)
    got = EnvMeta("env", spaces.Discrete(3), BOX, 8)
    with pytest.raises(PreconditionError) as raised:
        check_spec(expected, got)
    assert str(raised.value) == (
        "the env differs: action_space.n: expected 2, got 3; num_envs: expected 4, got 8"
    )
    assert raised.value.reason == "SPEC"


def test_shared_memory_has_room_for_the_largest_message_and_none_where_all_are_small() -> None:
    picture = spaces.Box(0, 255, (100, 100, 3), np.uint8)
    rpc = RpcConfig()
    meta = EnvMeta("env", spaces.Discrete(2), picture, 8)
    assert shared_bytes(meta, rpc) == 8 * (2 * 30_000 + 8) + 4096
    assert shared_bytes(meta, rpc, window_bytes=2**20) == shared_bytes(meta, rpc) + 2**20
    for limit, expected in ((0, 0), (10, 0), (2**17, 2**17)):
        assert shared_bytes(meta, RpcConfig(shared_memory_bytes=limit)) == expected
    assert shared_bytes(meta, RpcConfig(max_message_bytes=2**16)) == 2**16
    small = EnvMeta("env", spaces.Discrete(2), spaces.Box(-1, 1, (4,), np.float32), 1000)
    assert shared_bytes(small, rpc) == 0
    for space in (None, spaces.Text(100)):
        assert shared_bytes(EnvMeta("env", spaces.Discrete(2), space, 8), rpc) == 0
