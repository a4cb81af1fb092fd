"""Arrays to and from `Tensor`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from rlightning.errors import CodecError
from rlightning.utils.conversions import BFloat16Array, array_of
from rlightning.v1 import tensor_pb2
from rlightning.wire.frame import Reader, Writer
from rlightning.wire.shared import SharedMemory

MAX_AXES = 32

# Product of the other axes of an array without elements: its shape alone must not keep anybody busy
# who goes through its rows.
_MAX_EMPTY = 2**24
_BFLOAT16 = tensor_pb2.DTYPE_BFLOAT16
_BOOL = tensor_pb2.DTYPE_BOOL

# What is on the wire is little-endian everywhere; on such a machine these are the native dtypes.
_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DTYPE_BOOL: np.dtype("?"),
    tensor_pb2.DTYPE_INT8: np.dtype("i1"),
    tensor_pb2.DTYPE_INT16: np.dtype("<i2"),
    tensor_pb2.DTYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DTYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DTYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DTYPE_UINT32: np.dtype("<u4"),
    tensor_pb2.DTYPE_UINT64: np.dtype("<u8"),
    tensor_pb2.DTYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DTYPE_FLOAT64: np.dtype("<f8"),
    tensor_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.DTYPE_COMPLEX64: np.dtype("<c8"),
    tensor_pb2.DTYPE_COMPLEX128: np.dtype("<c16"),
}
_CODES: dict[np.dtype[Any], Any] = {
    dtype: code for code, dtype in _DTYPES.items() if code != _BFLOAT16
}


def code_of(dtype: np.dtype[Any]) -> tensor_pb2.Dtype:
    """Returns the wire's name of a numpy dtype of either byte order.

    Raises:
        CodecError: The wire has none.
    """
    code: tensor_pb2.Dtype | None = _CODES.get(dtype)
    if code is None:
        code = _CODES.get(dtype.newbyteorder("<"))
        if code is None:
            raise CodecError(f"the wire has no dtype {dtype}")
    return code


def dtype_of(code: int) -> np.dtype[Any]:
    """Returns the numpy dtype of a dtype on the wire.

    Raises:
        CodecError: There is no such dtype, or it is bfloat16, which numpy does not have.
    """
    dtype = _DTYPES.get(code)
    if dtype is None or code == _BFLOAT16:
        raise CodecError(f"unknown dtype {code}")
    return dtype


def fill_tensor(pb: tensor_pb2.Tensor, array: Any, w: Writer) -> None:
    """Writes an array, a numpy scalar or a torch tensor into an empty `Tensor`.

    A large array is not copied until `w.finish`, unless it is not contiguous, not little-endian or
    not on the CPU, or goes to shared memory.

    Args:
        pb: The message to fill.
        array: Of any shape up to 32 axes and any dtype that the wire has; torch tensors are
            detached. A `BFloat16Array` is sent as bfloat16.
        w: The writer of the whole message.

    Raises:
        CodecError: The dtype or the kind of array cannot be sent.
    """
    code = _CODES.get(array.dtype) if type(array) is np.ndarray else None
    if code is None:
        array, code = _sendable(array)
    pb.dtype = code
    shape = array.shape
    if shape:
        if len(shape) > MAX_AXES:
            raise CodecError(f"{len(shape)} axes; at most {MAX_AXES} can be sent")
        pb.shape.extend(shape)
    if array.nbytes < w.splice_bytes:
        pb.data = array.tobytes()
    elif w.memory is not None and (offset := w.memory.put(array)) is not None:
        pb.shared_offset = offset
    else:
        pb.data = w.attach(np.ascontiguousarray(array))


def _sendable(value: Any) -> tuple[npt.NDArray[Any], tensor_pb2.Dtype]:
    """Returns a plain little-endian array and its code for whatever numpy or torch holds."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            value = array_of(value)
        except (TypeError, RuntimeError) as error:
            raise CodecError(f"cannot send a tensor of {value.dtype}: {error}") from error
    if isinstance(value, BFloat16Array) and value.dtype == np.uint16:
        return value.astype("<u2", copy=False).view(np.ndarray), _BFLOAT16
    if isinstance(value, np.ma.MaskedArray):
        raise CodecError("a masked array would lose its mask; send data and mask by name")
    array = np.asarray(value)
    code = code_of(array.dtype)
    return array.astype(_DTYPES[code], copy=False), code


def read_tensor(pb: tensor_pb2.Tensor, r: Reader[Any]) -> npt.NDArray[Any]:
    """Reads an array.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        Read-only array of shape `pb.shape`, a `BFloat16Array` for bfloat16; a view over the bytes
        that came, or over shared memory, if it is large. Copy it before writing to it.

    Raises:
        CodecError: Unknown dtype, more than 32 axes, a negative or too large axis, data whose
            length does not match the shape, a place that is not in shared memory, or a truth value
            that is neither 0 nor 1.
    """
    code = pb.dtype
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise CodecError(f"unknown dtype {code}")
    shape = pb.shape[:]
    if len(shape) > MAX_AXES:
        raise CodecError(f"{len(shape)} axes; at most {MAX_AXES} are allowed")
    if pb.HasField("shared_offset"):
        return _read_shared(pb, dtype, shape, r)
    data = pb.data
    span = r.resolve(data) if r.ranges else None
    length = len(data) if span is None else span[1]
    expected = dtype.itemsize
    for axis in shape:
        if axis <= 0:
            check_shape(shape)
        expected *= axis
    if length != expected:
        raise CodecError(f"{length} bytes of data; shape {shape} of {dtype.name} needs {expected}")
    array: npt.NDArray[Any]
    if span is None:
        if code == _BOOL and data.translate(None, b"\x00\x01"):
            raise CodecError("a truth value that is neither 0 nor 1")
        array = np.ndarray(shape, dtype, data)
    else:
        array = r.view(dtype, shape, span[0])
        if code == _BOOL and array.view(np.uint8).max() > 1:
            raise CodecError("a truth value that is neither 0 nor 1")
    return array.view(BFloat16Array) if code == _BFLOAT16 else array


def _read_shared(
    pb: tensor_pb2.Tensor, dtype: np.dtype[Any], shape: Sequence[int], r: Reader[Any]
) -> npt.NDArray[Any]:
    """Reads an array that lies in shared memory, whose bytes may change at any time."""
    nbytes = math.prod(check_shape(shape)) * dtype.itemsize
    if pb.data or not nbytes or pb.dtype == _BOOL:
        raise CodecError("expected numbers, either in data or in shared memory")
    array = r.shared_view(dtype, shape, pb.shared_offset, nbytes)
    return array.view(BFloat16Array) if pb.dtype == _BFLOAT16 else array


def take_out(message: Message, memory: SharedMemory, w: Writer) -> None:
    """Puts the tensors of a message that lie in shared memory into it.

    Args:
        message: As it was filled; encode it with `w.finish` before anything is freed.
        memory: Where they lie.
        w: An unused writer.
    """
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in value if field.is_repeated else (value,):
            if not isinstance(part, tensor_pb2.Tensor):
                take_out(part, memory, w)
            elif part.HasField("shared_offset"):
                nbytes = math.prod(part.shape) * _DTYPES[part.dtype].itemsize
                part.data = w.attach(memory.view(part.shared_offset, nbytes))
                part.ClearField("shared_offset")


def check_shape(axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape that came.

    Raises:
        CodecError: It has more than 32 axes, a negative one, or too many elements for memory.
    """
    if len(axes) > MAX_AXES:
        raise CodecError(f"{len(axes)} axes; at most {MAX_AXES} are allowed")
    size = 16
    for axis in axes:
        if axis < 0:
            raise CodecError(f"negative axis in shape {axes}")
        size *= axis or 1  # numpy too leaves empty axes out of this check
    if size > (16 * _MAX_EMPTY if 0 in axes else sys.maxsize):
        raise CodecError(f"shape {axes} is too large")
    return tuple(axes)
