"""Bounds of a `gymnasium.spaces.Box`, exactly: also integers without a bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError
from rlightning.v1 import tensor_pb2
from rlightning.wire.frame import Reader
from rlightning.wire.paths import under
from rlightning.wire.tensor import dtype_of, read_tensor

# Integers up to here are floats of 64 bits, exactly.
_EXACT = 2**53


def bound_to_send(
    bound: npt.NDArray[Any], bounded: npt.NDArray[np.bool_], infinity: float
) -> npt.NDArray[Any]:
    """Returns what is sent for one bound: an infinite one of integers as a float."""
    if bound.size > 1 and not any(bound.strides) and not any(bounded.strides):
        origin = (0,) * bound.ndim  # one element stands for all, see `read_space`
        bound, bounded = np.asarray(bound[origin]), np.asarray(bounded[origin])
    if bound.dtype.kind == "i" and not bounded.all():
        exact = (bound >= -_EXACT) & (bound <= _EXACT)
        if not (exact | ~bounded).all():
            raise CodecError("infinite bounds beside integers above 2**53 cannot be sent exactly")
        bound = np.where(bounded, bound.astype(np.float64), infinity)
    if bound.size > 1:
        first = bound.reshape(-1)[0]
        # By bytes, so that 0.0 and -0.0 stay apart.
        if bound.tobytes() == first.tobytes() * bound.size:
            return np.asarray(first)
    return bound


def read_bound(
    pb: tensor_pb2.Tensor,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    infinity: float,
    r: Reader[Any],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Returns a bound, and which elements of it are finite; as they came, or in full."""
    try:
        sent = read_tensor(pb, r)
        if sent.shape not in (shape, ()):
            raise CodecError(f"expected shape {list(shape)} or [], got {list(sent.shape)}")
        sent_dtype = dtype_of(pb.dtype)
        if np.isnan(sent).any():
            raise CodecError("a bound that is no number")
        if sent_dtype == dtype:
            values, bounded = sent, sent != infinity
        elif dtype.kind == "i" and sent_dtype == np.float64:
            values, bounded = _integers(sent, dtype, infinity)
        else:
            raise CodecError(f"expected {dtype.name}, got {sent_dtype.name}")
    except CodecError as error:
        under(error, name)
        raise
    return np.asarray(values, dtype), np.asarray(bounded)


def _integers(
    sent: npt.NDArray[np.float64], dtype: np.dtype[Any], infinity: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Returns the bounds of an integer box that were sent as floats, since some are infinite."""
    info = np.iinfo(dtype)
    bounded = np.asarray(sent != infinity)
    whole = np.where(bounded, sent, 0.0)
    # 2.0**63 is no int64, though it compares equal to its maximum.
    if not ((whole == np.floor(whole)) & (whole >= info.min) & (whole < info.max + 1.0)).all():
        raise CodecError(f"bounds that are no {dtype.name}")
    values = whole.astype(dtype)
    values = np.where(bounded, values, dtype.type(info.min if infinity < 0 else info.max))
    return values, bounded
