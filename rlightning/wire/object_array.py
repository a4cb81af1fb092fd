"""Arrays of objects and of text as maps that hold only their elements that are not empty.

Vector envs of gymnasium give infos that are no numbers as arrays of objects: mostly None, with a
value for the few rows that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError
from rlightning.wire.frame import Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.tensor import check_shape

ARRAY_KEY = "__array__"
"""A map with this key is such an array; its value is the kind: `O`, `U12` (text), `S12` (bytes)."""

_KEYS = {ARRAY_KEY, "shape", "rows", "values"}
_TEXT_TYPES: dict[str, type[str] | type[bytes]] = {"U": str, "S": bytes}
_CHARACTER_BYTES = {"U": 4, "S": 1}


def parts_of(array: npt.NDArray[Any], w: Writer) -> dict[str, Any]:
    """Returns the map that stands for an array of objects or text.

    `shape` is int64 [axes], `rows` are the positions in the flattened array, int64 ascending, and
    `values` what is there; elsewhere is None, or empty text.

    Raises:
        CodecError: It has more elements than a message may have values.
    """
    flat = array.ravel().tolist()
    w.take_leaves(len(flat))
    kind: str = array.dtype.kind
    if kind == "O":
        rows = [row for row, item in enumerate(flat) if item is not None]
    else:
        rows = [row for row, item in enumerate(flat) if item]
        kind += str(_width(array.dtype))
    return {
        ARRAY_KEY: kind,
        "shape": np.array(array.shape, np.int64),
        "rows": np.array(rows, np.int64),
        "values": [flat[row] for row in rows],
    }


def array_of_parts(parts: Mapping[str, Any], r: Reader[Any]) -> npt.NDArray[Any]:
    """Returns the read-only array that a map stands for.

    Numpy scalars in it are numpy scalars again.

    Raises:
        CodecError: The map stands for no array, or for one with too many elements.
    """
    if parts.keys() != _KEYS:
        raise CodecError(f"an array of objects has the keys {sorted(_KEYS)}")
    dtype = _dtype_of(parts[ARRAY_KEY])
    shape = check_shape(_positions(parts["shape"], "shape").tolist())
    count = 1
    for axis in shape:
        count *= axis
    r.take_leaves(count)
    r.take_bytes(count * dtype.itemsize)
    rows = _positions(parts["rows"], "rows")
    if len(rows) and (rows[0] < 0 or rows[-1] >= count or (rows[1:] <= rows[:-1]).any()):
        raise under(CodecError(f"expected ascending positions below {count}"), "rows")
    values = parts["values"]
    if not isinstance(values, list) or len(values) != len(rows):
        raise under(CodecError(f"expected a list of {len(rows)}"), "values")
    array = np.zeros(count, dtype) if dtype.kind != "O" else np.full(count, None, dtype)
    for index, (row, value) in enumerate(zip(rows.tolist(), values, strict=True)):
        if dtype.kind != "O" and not (
            isinstance(value, _TEXT_TYPES[dtype.kind]) and len(value) <= _width(dtype)
        ):
            raise under(under(CodecError(f"no element of an array of {dtype}"), index), "values")
        # Assigned as an array without axes, numpy would store a Python number.
        array[row] = value[()] if isinstance(value, np.ndarray) and not value.ndim else value
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _positions(value: Any, name: str) -> npt.NDArray[np.int64]:
    if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.ndim != 1:
        raise under(CodecError("expected a tensor of int64 with one axis"), name)
    # In shared memory it could change once it has been checked.
    positions: npt.NDArray[np.int64] = value.copy()
    return positions


def _dtype_of(kind: Any) -> np.dtype[Any]:
    if kind == "O":
        return np.dtype(object)
    if isinstance(kind, str) and kind[:1] in _CHARACTER_BYTES:
        width = kind[1:]
        if width.isascii() and width.isdecimal() and len(width) <= 8:
            # numpy makes room for one character at least
            return np.dtype(f"{kind[0]}{max(1, int(width))}")
    raise under(CodecError(f"unknown kind of array {kind!r:.60}"), ARRAY_KEY)


def _width(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // _CHARACTER_BYTES[dtype.kind]
