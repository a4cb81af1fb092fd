"""The env that a client declares: is it the expected one, and how large are its messages?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlightning.errors import InvalidRequestError, PreconditionError
from rlightning.types import EnvMeta
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import space_pb2, tensor_pb2
from rlightning.wire import encode_env_meta
from rlightning.wire.shared import MIN_BYTES

_ITEM_BYTES = {
    tensor_pb2.DTYPE_INT16: 2,
    tensor_pb2.DTYPE_UINT16: 2,
    tensor_pb2.DTYPE_FLOAT16: 2,
    tensor_pb2.DTYPE_BFLOAT16: 2,
    tensor_pb2.DTYPE_INT32: 4,
    tensor_pb2.DTYPE_UINT32: 4,
    tensor_pb2.DTYPE_FLOAT32: 4,
    tensor_pb2.DTYPE_INT64: 8,
    tensor_pb2.DTYPE_UINT64: 8,
    tensor_pb2.DTYPE_FLOAT64: 8,
    tensor_pb2.DTYPE_COMPLEX64: 8,
    tensor_pb2.DTYPE_COMPLEX128: 16,
}
# What shared memory has besides the tensors: they begin at cache lines.
_SLACK_BYTES = 4096
# Kinds of spaces that leave the size of a value open, as gymnasium calls them. (A text has a number
# of characters at most, but that is seldom meant as a limit.)
_UNBOUNDED = {"text": "Text", "sequence": "Sequence", "graph": "Graph"}


def session_cap(spec: space_pb2.EnvMeta, rpc: RpcConfig) -> int:
    """Returns the largest message in bytes that a session with this spec needs to send.

    Two observations per row, since an episode's last one travels beside the next one's first, one
    action per row, and `info_budget_bytes` for the rest. A spec without spaces gets the transport
    cap.

    Raises:
        InvalidRequestError: A text, sequence or graph space says no `max_bytes`; the message names
            its path.
    """
    observations, actions = 0, 0
    if spec.HasField("observation_space"):
        observations += space_bytes(spec.observation_space, "observation_space")
    for entry in spec.agent_observation_spaces.entries:
        observations += space_bytes(entry.space, f"observation_space[{entry.key!r}]")
    if spec.HasField("action_space"):
        actions += space_bytes(spec.action_space, "action_space")
    for entry in spec.agent_action_spaces.entries:
        actions += space_bytes(entry.space, f"action_space[{entry.key!r}]")
    if not (spec.HasField("observation_space") or spec.agent_observation_spaces.entries):
        return rpc.max_message_bytes
    rows = max(1, spec.num_envs)
    return min(rows * (2 * observations + actions) + rpc.info_budget_bytes, rpc.max_message_bytes)


def needed_bytes(meta: EnvMeta, rpc: RpcConfig) -> int:
    """Returns the largest message in bytes that an env needs, whatever the transport lets through.

    Raises:
        InvalidRequestError: As `session_cap`.
    """
    spec = space_pb2.EnvMeta.FromString(encode_env_meta(meta))
    boundless = rpc.model_copy(update={"max_message_bytes": 2**62})
    return session_cap(spec, boundless)


def shared_bytes(meta: EnvMeta, rpc: RpcConfig, *, window_bytes: int = 0) -> int:
    """Returns how much shared memory a session of an env has a use for, in bytes.

    There is room for the largest message (or two with one observation per row) beside
    `window_bytes` of others, within `shared_memory_bytes`, and for no more than one message may
    have. 0 if no tensor of the spaces is large enough to lie there, or nothing says how large they
    are.
    """
    if meta.observation_space is None:
        return 0
    try:
        largest = needed_bytes(meta, rpc) - rpc.info_budget_bytes
    except InvalidRequestError:  # as the server will say
        return 0
    wanted = window_bytes + largest + _SLACK_BYTES
    room = min(wanted, rpc.shared_memory_bytes, rpc.max_message_bytes)
    return room if min(largest // 2, room) >= MIN_BYTES else 0


def space_bytes(space: space_pb2.Space, path: str = "space") -> int:
    """Returns the size in bytes of the largest value of a space: its `max_bytes` where that is set.

    Args:
        space: The space.
        path: Where it is in the spec, for the error.

    Raises:
        InvalidRequestError: It, or one in it, is a text, a sequence or a graph without `max_bytes`:
            nothing else says how large a value may be.
    """
    if space.max_bytes > 0:
        return space.max_bytes
    kind = space.WhichOneof("kind")
    if kind == "box":
        return _elements(space.box.shape) * _ITEM_BYTES.get(space.box.dtype, 1)
    if kind == "discrete":
        return 8
    if kind == "multi_binary":
        return _elements(space.multi_binary.shape)
    if kind == "multi_discrete":
        dtype = space.multi_discrete.dtype
        return _elements(space.multi_discrete.nvec.shape) * _ITEM_BYTES.get(dtype, 1)
    if kind == "dict":
        entries = space.dict.entries
        return sum(space_bytes(entry.space, f"{path}[{entry.key!r}]") for entry in entries)
    if kind == "tuple":
        return sum(_all_bytes(space.tuple.spaces, path))
    if kind == "one_of":
        return 8 + max(_all_bytes(space.one_of.spaces, path), default=0)
    if kind in _UNBOUNDED:
        raise InvalidRequestError(
            f"{path}: a {_UNBOUNDED[kind]} space needs max_bytes, the largest size in bytes of an "
            "encoded value: set the attribute max_bytes of the space"
        )
    return 0


def _all_bytes(parts: Iterable[space_pb2.Space], path: str) -> Iterator[int]:
    return (space_bytes(part, f"{path}[{index}]") for index, part in enumerate(parts))


def _elements(shape: Any) -> int:
    return math.prod(max(0, length) for length in shape)


def check_spec(expected: EnvMeta, got: EnvMeta) -> None:
    """Checks that a client's env is the one that a server was made for.

    Compares the spaces and the number of rows; what `expected` leaves open, and the env id, may be
    anything.

    Raises:
        PreconditionError: They differ; the message names each field with both values.
    """
    differences = list(diff_spec(expected, got))
    if differences:
        raise PreconditionError("the env differs: " + "; ".join(differences), reason="SPEC")


def diff_spec(expected: EnvMeta, got: EnvMeta) -> Iterator[str]:
    """Yields one line `field: expected X, got Y` for each field in which two envs differ."""
    for name in ("observation_space", "action_space"):
        want = getattr(expected, name)
        if want is not None:
            yield from _diff(name, want, getattr(got, name))
    if expected.num_envs is not None and expected.num_envs != got.num_envs:
        yield _line("num_envs", expected.num_envs, got.num_envs)


def _diff(path: str, expected: Any, got: Any) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(got, Mapping):  # also spaces.Dict
        theirs = set(got)  # `key in space` would ask whether the space contains the key as a value
        for key in expected:
            if key in theirs:
                yield from _diff(f"{path}[{key!r}]", expected[key], got[key])
            else:
                yield f"{path}[{key!r}]: missing"
        extra = theirs.difference(expected)
        yield from (f"{path}[{key!r}]: not expected" for key in got if key in extra)
    elif type(expected) is not type(got):
        yield _line(path, _kind(expected), _kind(got))
    elif isinstance(expected, spaces.Tuple | spaces.OneOf):
        if len(expected.spaces) != len(got.spaces):
            yield _line(f"{path}.length", len(expected.spaces), len(got.spaces))
        for index, pair in enumerate(zip(expected.spaces, got.spaces, strict=False)):
            yield from _diff(f"{path}[{index}]", *pair)
    elif isinstance(expected, spaces.Sequence):
        yield from _diff(f"{path}.feature_space", expected.feature_space, got.feature_space)
        if expected.stack != got.stack:
            yield _line(f"{path}.stack", expected.stack, got.stack)
    elif isinstance(expected, spaces.Graph):
        yield from _diff(f"{path}.node_space", expected.node_space, got.node_space)
        yield from _diff(f"{path}.edge_space", expected.edge_space, got.edge_space)
    elif not _equal(expected, got):
        yield from _diff_leaf(path, expected, got)


def _equal(one: Any, other: Any) -> bool:
    """Compares two spaces of a kind; gymnasium takes seconds for large boxes that are equal."""
    if (
        isinstance(one, spaces.Box)
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and np.array_equal(one.low, other.low)
        and np.array_equal(one.high, other.high)
    ):
        return True
    return bool(one == other)


_LEAF_FIELDS = (
    "shape",
    "dtype",
    "low",
    "high",
    "n",
    "nvec",
    "start",
    "min_length",
    "max_length",
    "characters",
)


def _diff_leaf(path: str, expected: Any, got: Any) -> Iterator[str]:
    found = False
    for name in _LEAF_FIELDS:
        want, have = getattr(expected, name, None), getattr(got, name, None)
        if not np.array_equal(np.asarray(want), np.asarray(have)):
            found = True
            yield _line(f"{path}.{name}", want, have)
            if name == "shape":  # everything else follows from that
                return
    if not found:
        yield _line(path, expected, got)


def _kind(space: Any) -> str:
    return "none" if space is None else type(space).__name__


def _line(path: str, expected: Any, got: Any) -> str:
    return f"{path}: expected {_short(expected)}, got {_short(got)}"


def _short(value: Any) -> str:
    """Returns a value in few characters: long arrays by their range."""
    if isinstance(value, np.ndarray) and value.size > 8:
        return f"{value.dtype} from {value.min()} to {value.max()}"
    text = " ".join(str(value).split()) if isinstance(value, np.ndarray | gym.Space) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."
