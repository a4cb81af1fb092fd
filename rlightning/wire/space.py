"""Gymnasium spaces to and from `Space`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlightning.errors import CodecError
from rlightning.v1 import space_pb2
from rlightning.wire.box_bounds import bound_to_send, read_bound
from rlightning.wire.fields import set_int, set_text
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.splice import Buffer
from rlightning.wire.tensor import check_shape, code_of, dtype_of, fill_tensor, read_tensor

Space = gym.Space[Any]

# A box of more elements than this, with one bound for all of them, keeps that one alone.
_BROADCAST_ELEMENTS = 1024
# What a space takes, whatever it is.
_SPACE_BYTES = 2048
# What gymnasium keeps for each character of a text space, in two tables of Python objects.
_CHARACTER_BYTES = 256

# What gymnasium raises for arguments that make no space.
_INVALID = (TypeError, ValueError, AssertionError, OverflowError, gym.error.Error)


def encode_space(space: Space) -> bytes:
    """Returns a space encoded as a `Space`; see `fill_space`."""
    w = Writer()
    pb = space_pb2.Space()
    fill_space(pb, space, w)
    return w.finish(pb)


def decode_space(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Space:
    """Returns the space of an encoded `Space`; see `read_space`."""
    r = Reader(space_pb2.Space, data, limits=limits)
    return read_space(r.message, r)


def fill_space(pb: space_pb2.Space, space: Space, w: Writer) -> None:
    """Writes a gymnasium space into an empty `Space`.

    The state of the space's generator is not sent. An attribute `max_bytes` of the space, if it has
    one, says how large an encoded value of it may be; sessions ask for it where the space itself
    sets no bound (text, sequences, graphs).

    Args:
        pb: The message to fill.
        space: Any space of gymnasium, or of a class derived from one.
        w: The writer of the whole message.

    Raises:
        CodecError: The space, or one in it, cannot be sent; the path says which.
    """
    _fill(pb, space, w, w.limits.max_depth)


def read_space(pb: space_pb2.Space, r: Reader[Any]) -> Space:
    """Reads a gymnasium space.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        A new space that equals the one that was sent; its generator is not seeded.

    Raises:
        CodecError: The message makes no space or passes a limit; the path says where.
    """
    return _read(pb, r, r.limits.max_depth)


# Writing.


def _fill(pb: space_pb2.Space, space: Space, w: Writer, levels: int) -> None:
    if levels < 1:
        raise CodecError(f"nested deeper than {w.limits.max_depth} levels")
    w.take_leaves(1)
    for kind, filler in _FILLERS:
        if isinstance(space, kind):
            filler(pb, space, w, levels)
            break
    else:
        raise CodecError(f"the wire has no space {type(space).__module__}.{type(space).__name__}")
    set_int(pb, "max_bytes", getattr(space, "max_bytes", 0))


def _fill_box(pb: space_pb2.Space, space: spaces.Box[Any], w: Writer, levels: int) -> None:
    box = pb.box
    box.dtype = code_of(space.dtype)
    box.shape.extend(space.shape)
    for name, bound, bounded, infinity in (
        ("low", space.low, space.bounded_below, -np.inf),
        ("high", space.high, space.bounded_above, np.inf),
    ):
        try:
            fill_tensor(getattr(box, name), bound_to_send(bound, bounded, infinity), w)
        except CodecError as error:
            under(error, name)
            raise


def _fill_discrete(
    pb: space_pb2.Space, space: spaces.Discrete[Any], w: Writer, levels: int
) -> None:
    try:
        pb.discrete.n = int(space.n)
        pb.discrete.start = int(space.start)
    except ValueError:
        raise CodecError(f"{space} does not fit in 64 bits") from None
    pb.discrete.dtype = code_of(np.dtype(space.dtype))


def _fill_multi_binary(
    pb: space_pb2.Space, space: spaces.MultiBinary, w: Writer, levels: int
) -> None:
    pb.multi_binary.flat = isinstance(space.n, int)
    pb.multi_binary.shape.extend(space.shape)


def _fill_multi_discrete(
    pb: space_pb2.Space, space: spaces.MultiDiscrete[Any], w: Writer, levels: int
) -> None:
    pb.multi_discrete.dtype = code_of(space.dtype)
    fill_tensor(pb.multi_discrete.nvec, space.nvec, w)
    fill_tensor(pb.multi_discrete.start, space.start, w)


def _fill_text(pb: space_pb2.Space, space: spaces.Text, w: Writer, levels: int) -> None:
    try:
        pb.text.min_length = space.min_length
        pb.text.max_length = space.max_length
    except ValueError:
        raise CodecError("a length that does not fit in 64 bits") from None
    set_text(pb.text, "charset", "".join(space.character_list))


def fill_dict(pb: space_pb2.DictSpace, named: Mapping[str, Space], w: Writer, levels: int) -> None:
    """Writes spaces by name into an empty `DictSpace`, with `levels` levels of nesting for them."""
    pb.SetInParent()
    for key, space in named.items():
        if not isinstance(key, str):
            raise CodecError(f"a key that is no text: {key!r:.60}")
        entry = pb.entries.add()
        try:
            set_text(entry, "key", key)
            _fill(entry.space, space, w, levels)
        except CodecError as error:
            under(error, key)
            raise


def _fill_all(pb: Any, inner: Sequence[Space], w: Writer, levels: int) -> None:
    pb.SetInParent()
    for index, space in enumerate(inner):
        try:
            _fill(pb.spaces.add(), space, w, levels)
        except CodecError as error:
            under(error, index)
            raise


def _fill_sequence(pb: space_pb2.Space, space: spaces.Sequence, w: Writer, levels: int) -> None:
    pb.sequence.stack = space.stack
    _fill(pb.sequence.feature_space, space.feature_space, w, levels - 1)


def _fill_graph(pb: space_pb2.Space, space: spaces.Graph, w: Writer, levels: int) -> None:
    _fill(pb.graph.node_space, space.node_space, w, levels - 1)
    if space.edge_space is not None:
        _fill(pb.graph.edge_space, space.edge_space, w, levels - 1)


_FILLERS: tuple[tuple[type[Space], Callable[[space_pb2.Space, Any, Writer, int], None]], ...] = (
    (spaces.Box, _fill_box),
    (spaces.Discrete, _fill_discrete),
    (spaces.Dict, lambda pb, space, w, levels: fill_dict(pb.dict, space.spaces, w, levels - 1)),
    (spaces.MultiDiscrete, _fill_multi_discrete),
    (spaces.MultiBinary, _fill_multi_binary),
    (spaces.Text, _fill_text),
    (spaces.Tuple, lambda pb, space, w, levels: _fill_all(pb.tuple, space.spaces, w, levels - 1)),
    (spaces.Sequence, _fill_sequence),
    (spaces.Graph, _fill_graph),
    (spaces.OneOf, lambda pb, space, w, levels: _fill_all(pb.one_of, space.spaces, w, levels - 1)),
)


# Reading.


def _read(pb: space_pb2.Space, r: Reader[Any], levels: int) -> Space:
    if levels < 1:
        raise CodecError(f"nested deeper than {r.limits.max_depth} levels")
    r.take_leaves(1)
    r.take_kept(_SPACE_BYTES)
    kind = pb.WhichOneof("kind")
    if kind is None:
        raise CodecError("no space")
    try:
        space = _READERS[kind](getattr(pb, kind), r, levels)
    except CodecError:
        raise
    except _INVALID as error:
        raise CodecError(f"no valid {kind} space: {error}") from error
    if pb.max_bytes < 0:
        raise CodecError(f"negative max_bytes {pb.max_bytes}")
    if pb.max_bytes:
        space.max_bytes = pb.max_bytes  # type: ignore[attr-defined]
    return space


def _take_shape(axes: Sequence[int], itemsize: int, r: Reader[Any]) -> tuple[int, ...]:
    """Returns the shape that came, after counting one value of it."""
    shape = check_shape(axes[:])
    size = itemsize
    for axis in shape:
        size *= axis
    r.take_bytes(size)
    return shape


def _read_box(pb: space_pb2.BoxSpace, r: Reader[Any], levels: int) -> Space:
    dtype = dtype_of(pb.dtype)
    shape = _take_shape(pb.shape, dtype.itemsize, r)
    low, below = read_bound(pb.low, "low", dtype, shape, -np.inf, r)
    high, above = read_bound(pb.high, "high", dtype, shape, np.inf, r)
    # A few bytes may declare a box as large as a message: gymnasium would keep four arrays of it.
    small = low.ndim == high.ndim == 0 and math.prod(shape) > _BROADCAST_ELEMENTS
    full = (1,) * len(shape) if small else shape
    r.take_kept(2 * (dtype.itemsize + 1) * math.prod(full))  # each bound, and where it is finite
    low, high, below, above = (np.full(full, part) for part in (low, high, below, above))
    box: spaces.Box[Any] = spaces.Box(low, high, full, dtype.type)
    if dtype.kind == "i":
        # Given the integers that stand for infinity, the constructor takes them for bounds.
        box.bounded_below = below
        box.bounded_above = above
    if small:
        box._shape = shape
        for name in ("low", "high", "bounded_below", "bounded_above"):
            setattr(box, name, np.broadcast_to(getattr(box, name), shape))
    return box


def _read_discrete(pb: space_pb2.DiscreteSpace, r: Reader[Any], levels: int) -> Space:
    dtype = _integer_dtype(pb.dtype)
    info = np.iinfo(dtype)
    if not (1 <= pb.n <= info.max and info.min <= pb.start <= info.max):
        raise CodecError(f"n {pb.n} and start {pb.start} are no choices of {dtype.name}")
    if dtype == np.int64:  # the only one that older releases of gymnasium know
        return spaces.Discrete(pb.n, start=pb.start)
    return spaces.Discrete(pb.n, start=pb.start, dtype=dtype.type)


def _integer_dtype(code: int) -> np.dtype[Any]:
    dtype = dtype_of(code)
    if dtype.kind not in "iu":
        raise CodecError(f"expected an integer dtype, got {dtype.name}")
    return dtype


def _read_multi_binary(pb: space_pb2.MultiBinarySpace, r: Reader[Any], levels: int) -> Space:
    shape = _take_shape(pb.shape, 1, r)
    if not pb.flat:
        return spaces.MultiBinary(shape)
    if len(shape) != 1:
        raise CodecError(f"a flat space has one axis, got {list(shape)}")
    return spaces.MultiBinary(shape[0])


def _read_multi_discrete(pb: space_pb2.MultiDiscreteSpace, r: Reader[Any], levels: int) -> Space:
    dtype = _integer_dtype(pb.dtype)
    arrays = {}
    for name, part in (("nvec", pb.nvec), ("start", pb.start)):
        try:
            arrays[name] = read_tensor(part, r)
            r.take_kept(arrays[name].nbytes)
            if part.dtype != pb.dtype:
                raise CodecError(f"expected {dtype.name}, got {dtype_of(part.dtype).name}")
        except CodecError as error:
            under(error, name)
            raise
    return spaces.MultiDiscrete(arrays["nvec"], dtype=dtype.type, start=arrays["start"])


def _read_text(pb: space_pb2.TextSpace, r: Reader[Any], levels: int) -> Space:
    r.take_kept(_CHARACTER_BYTES * len(pb.charset))
    if len(set(pb.charset)) != len(pb.charset):
        raise CodecError("a character comes twice in the charset")
    return spaces.Text(pb.max_length, min_length=pb.min_length, charset=pb.charset)


def read_dict(pb: space_pb2.DictSpace, r: Reader[Any], levels: int) -> dict[str, Space]:
    """Reads spaces by name, with `levels` levels of nesting for them."""
    result: dict[str, Space] = {}
    for entry in pb.entries:
        key = entry.key
        try:
            if key in result:
                raise CodecError("the key comes twice")
            r.take_kept(4 * len(key))
            result[key] = _read(entry.space, r, levels)
        except CodecError as error:
            under(error, key)
            raise
    return result


def _read_all(pb: Any, r: Reader[Any], levels: int) -> list[Space]:
    result = []
    for index, item in enumerate(pb.spaces):
        try:
            result.append(_read(item, r, levels))
        except CodecError as error:
            under(error, index)
            raise
    return result


def _read_batched(pb: space_pb2.Space, r: Reader[Any], levels: int) -> Space:
    """Reads a space of which gymnasium makes a batched copy, and counts that copy too."""
    before = r.used()
    space = _read(pb, r, levels)
    leaves, size, kept = (now - then for now, then in zip(r.used(), before, strict=True))
    r.take_leaves(leaves)
    r.take_bytes(size)
    r.take_kept(kept)
    return space


def _read_sequence(pb: space_pb2.SequenceSpace, r: Reader[Any], levels: int) -> Space:
    read = _read_batched if pb.stack else _read
    return spaces.Sequence(read(pb.feature_space, r, levels - 1), stack=pb.stack)


def _read_graph(pb: space_pb2.GraphSpace, r: Reader[Any], levels: int) -> Space:
    node = _read_batched(pb.node_space, r, levels - 1)
    edge = _read_batched(pb.edge_space, r, levels - 1) if pb.HasField("edge_space") else None
    return spaces.Graph(node, edge)


_READERS: dict[str, Callable[[Any, Reader[Any], int], Space]] = {
    "box": _read_box,
    "discrete": _read_discrete,
    "multi_binary": _read_multi_binary,
    "multi_discrete": _read_multi_discrete,
    "text": _read_text,
    # An OrderedDict, since gymnasium sorts the keys of a plain one.
    "dict": lambda pb, r, levels: spaces.Dict(OrderedDict(read_dict(pb, r, levels - 1))),
    "tuple": lambda pb, r, levels: spaces.Tuple(_read_all(pb, r, levels - 1)),
    "sequence": _read_sequence,
    "graph": _read_graph,
    "one_of": lambda pb, r, levels: spaces.OneOf(_read_all(pb, r, levels - 1)),
}
