"""What users may index stored rows with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, as_array

Index = int | slice | Array
Indices = npt.NDArray[np.intp]


def as_index(item: Any) -> int | Indices:
    """Returns an index, or a sequence, array or tensor of indices, as an int or an array of ints.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return int(item)
    if isinstance(item, (list, tuple, range)):
        item = np.asarray(item, dtype=None if len(item) else np.intp)
    if not hasattr(item, "shape"):
        raise TypeError(f"expected an index or indices, got {type(item).__name__}")
    array = as_array(item, "index")
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise TypeError(f"expected ints, got {array.dtype} of shape {list(array.shape)}")
    return int(array) if array.ndim == 0 else array.astype(np.intp)


def locate(index: Index, size: int, what: str = "transitions") -> int | Indices:
    """Returns where in `size` stored units an index points; negative ones count from the end.

    Raises:
        IndexError: Nothing is stored there.
        TypeError: It is no index.
    """
    if isinstance(index, slice):
        return np.arange(size)[index]
    where = as_index(index)
    low, high = (
        (where, where) if isinstance(where, int) else (where.min(initial=0), where.max(initial=-1))
    )
    if low < -size or high >= size:
        raise IndexError(f"index {low if low < -size else high} of {size} stored {what}")
    if isinstance(where, int):
        return where % size
    return np.where(where < 0, where + size, where)
