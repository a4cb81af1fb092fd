"""Nested values to and from `Value`: what observations, actions and infos are made of."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError
from rlightning.v1 import tensor_pb2
from rlightning.wire.fields import not_unicode
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.object_array import ARRAY_KEY, array_of_parts, parts_of
from rlightning.wire.paths import under
from rlightning.wire.splice import Buffer
from rlightning.wire.tensor import fill_tensor, read_tensor


def encode_value(value: Any, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Returns a value encoded as a `Value`; see `fill_value`."""
    w = Writer(limits)
    pb = tensor_pb2.Value()
    fill_value(pb, value, w)
    return w.finish(pb)


def decode_value(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Returns the value of an encoded `Value`; see `read_value`."""
    r = Reader(tensor_pb2.Value, data, limits=limits)
    return read_value(r.message, r)


def fill_value(pb: tensor_pb2.Value, value: Any, w: Writer) -> None:
    """Writes a nested value into an empty `Value`.

    None, bool, int, float, str, bytes, arrays, numpy scalars (as tensors without axes), torch
    tensors and whatever gives an array of itself; in dicts with string keys, lists, tuples. A deque
    becomes a list and a namedtuple a tuple. Arrays of objects and of text are sent sparsely,
    without the elements that are None or empty.

    Args:
        pb: The message to fill.
        value: What to send.
        w: The writer of the whole message.

    Raises:
        CodecError: Something in it cannot be sent; the path says where.
    """
    _fill(pb, value, w, w.limits.max_depth)


def read_value(pb: tensor_pb2.Value, r: Reader[Any]) -> Any:
    """Reads a nested value.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        The value; arrays in it are read-only, see `read_tensor`.

    Raises:
        CodecError: Something in it is not valid or passes a limit; the path says where.
    """
    return _read(pb, r, r.limits.max_depth)


def read_mapping(pb: tensor_pb2.Value, name: str, r: Reader[Any]) -> dict[str, Any]:
    """Reads a field that must be a map.

    Raises:
        CodecError: It is something else, or not valid; the path begins with `name`.
    """
    try:
        value = read_value(pb, r)
        if not isinstance(value, dict):
            raise CodecError(f"expected a map, got a {type(value).__name__}")
    except CodecError as error:
        under(error, name)
        raise
    return value


# Writing. `levels` counts down the levels of nesting that are left.


def _fill(pb: tensor_pb2.Value, value: Any, w: Writer, levels: int) -> None:
    filler = _FILLERS.get(type(value))
    if filler is None:
        filler, value = _filler_of(value)
    filler(pb, value, w, levels)


def _fill_null(pb: tensor_pb2.Value, value: None, w: Writer, levels: int) -> None:
    pb.null_value.SetInParent()


def _fill_bool(pb: tensor_pb2.Value, value: bool, w: Writer, levels: int) -> None:
    pb.bool_value = value


def _fill_int(pb: tensor_pb2.Value, value: int, w: Writer, levels: int) -> None:
    try:
        pb.int_value = value
    except ValueError:
        raise CodecError("an integer that does not fit in 64 bits") from None


def _fill_float(pb: tensor_pb2.Value, value: float, w: Writer, levels: int) -> None:
    pb.float_value = value


def _fill_str(pb: tensor_pb2.Value, value: str, w: Writer, levels: int) -> None:
    try:
        pb.string_value = value
    except UnicodeEncodeError as error:
        raise not_unicode(error) from error


def _fill_bytes(pb: tensor_pb2.Value, value: Any, w: Writer, levels: int) -> None:
    pb.bytes_value = bytes(value)


def _fill_tensor(pb: tensor_pb2.Value, value: Any, w: Writer, levels: int) -> None:
    fill_tensor(pb.tensor_value, value, w)


def _fill_array(pb: tensor_pb2.Value, value: npt.NDArray[Any], w: Writer, levels: int) -> None:
    if value.dtype.kind in "OUS":
        _fill_entries(pb.map_value, parts_of(value, w), w, levels)
    else:
        fill_tensor(pb.tensor_value, value, w)


def _fill_map(pb: tensor_pb2.Value, value: Mapping[Any, Any], w: Writer, levels: int) -> None:
    if ARRAY_KEY in value:
        raise CodecError(f"the key {ARRAY_KEY!r} is taken by the wire")
    _fill_entries(pb.map_value, value, w, levels)


def _fill_entries(
    pb: tensor_pb2.ValueMap, value: Mapping[Any, Any], w: Writer, levels: int
) -> None:
    count = len(value)
    if not count:
        pb.SetInParent()
        return
    _descend(w, levels, count)
    entries = pb.entries
    for key, item in value.items():
        if not isinstance(key, str):  # protobuf takes bytes for text too
            raise CodecError(f"a key that is no text: {key!r:.60}")
        entry = entries.add()
        try:
            entry.key = key
            _fill(entry.value, item, w, levels - 1)
        except CodecError as error:
            under(error, key)
            raise
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error


def _fill_list(pb: tensor_pb2.Value, value: Any, w: Writer, levels: int) -> None:
    _fill_items(pb.list_value, value, w, levels)


def _fill_tuple(pb: tensor_pb2.Value, value: Any, w: Writer, levels: int) -> None:
    _fill_items(pb.tuple_value, value, w, levels)


def _fill_items(pb: tensor_pb2.ValueList, value: Any, w: Writer, levels: int) -> None:
    if not value:
        pb.SetInParent()
        return
    _descend(w, levels, len(value))
    values = pb.values
    for index, item in enumerate(value):
        try:
            _fill(values.add(), item, w, levels - 1)
        except CodecError as error:
            under(error, index)
            raise


def _descend(budget: Writer | Reader[Any], levels: int, count: int) -> None:
    """Enters a container of `count` values, one level down."""
    if levels <= 1:
        raise CodecError(f"nested deeper than {budget.limits.max_depth} levels")
    budget.take_leaves(count)


_Filler: TypeAlias = Callable[[tensor_pb2.Value, Any, Writer, int], None]

_FILLERS: dict[type, _Filler] = {
    np.ndarray: _fill_array,
    dict: _fill_map,
    float: _fill_float,
    bool: _fill_bool,
    int: _fill_int,
    str: _fill_str,
    type(None): _fill_null,
    list: _fill_list,
    tuple: _fill_tuple,
    bytes: _fill_bytes,
}
# In this order: a numpy float is a float too, a numpy string is text.
_BASES: tuple[tuple[type | tuple[type, ...], _Filler], ...] = (
    (np.ndarray, _fill_array),
    (str, _fill_str),
    ((bytes, bytearray, memoryview), _fill_bytes),
    (np.generic, _fill_tensor),
    (int, _fill_int),
    (float, _fill_float),
    (Mapping, _fill_map),
    ((list, deque), _fill_list),
    (tuple, _fill_tuple),
)


def _filler_of(value: Any) -> tuple[_Filler, Any]:
    """Returns how to write a value of a type that is not in the table, and as what."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _fill_tensor, value
    for base, filler in _BASES:
        if isinstance(value, base):
            return filler, value
    if hasattr(type(value), "__array__"):
        return _fill_tensor, np.asarray(value)
    raise CodecError(f"cannot send a {type(value).__module__}.{type(value).__qualname__}")


# Reading.


def _read(pb: tensor_pb2.Value, r: Reader[Any], levels: int) -> Any:
    kind = pb.WhichOneof("kind")
    if kind == "tensor_value":  # by far the most frequent
        return read_tensor(pb.tensor_value, r)
    if kind is None:
        raise CodecError("no value")
    return _READERS[kind](pb, r, levels)


def _read_map(pb: tensor_pb2.Value, r: Reader[Any], levels: int) -> Any:
    result: dict[str, Any] = {}
    entries = pb.map_value.entries
    if not entries:
        return result
    _descend(r, levels, len(entries))
    for entry in entries:
        key = entry.key
        try:
            if key in result:
                raise CodecError("the key comes twice")
            result[key] = _read(entry.value, r, levels - 1)
        except CodecError as error:
            under(error, key)
            raise
    return array_of_parts(result, r) if ARRAY_KEY in result else result


def _read_items(pb: tensor_pb2.ValueList, r: Reader[Any], levels: int) -> list[Any]:
    result: list[Any] = []
    values = pb.values
    if values:
        _descend(r, levels, len(values))
        for index, item in enumerate(values):
            try:
                result.append(_read(item, r, levels - 1))
            except CodecError as error:
                under(error, index)
                raise
    return result


_READERS: dict[str, Callable[[tensor_pb2.Value, Reader[Any], int], Any]] = {
    "null_value": lambda pb, r, levels: None,
    "bool_value": lambda pb, r, levels: pb.bool_value,
    "int_value": lambda pb, r, levels: pb.int_value,
    "float_value": lambda pb, r, levels: pb.float_value,
    "string_value": lambda pb, r, levels: pb.string_value,
    "bytes_value": lambda pb, r, levels: pb.bytes_value,
    "list_value": lambda pb, r, levels: _read_items(pb.list_value, r, levels),
    "tuple_value": lambda pb, r, levels: tuple(_read_items(pb.tuple_value, r, levels)),
    "map_value": _read_map,
}
