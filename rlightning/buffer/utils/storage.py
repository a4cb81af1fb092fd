"""Preallocated columns of transitions: a ring, or a box that fills up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Layout, as_array, check_keys, iter_arrays
from rlightning.errors import InvalidRowError, StorageFullError

Index = int | slice | Array

USE_BYTES = 4
"""What is kept of each transition beside its columns, in bytes."""


class Storage:
    """Columns of `capacity` transitions; nested values keep their structure.

    The first push fixes names, dtypes and shapes. Memory is allocated then, and kept by `clear`.
    Not thread-safe.

    Args:
        capacity: Transitions that it holds.
        mode: When it is full, `circular` overwrites the oldest, `fixed` refuses more.

    Attributes:
        capacity: Transitions that it holds at most.
        size: Transitions that it holds.
        pointer: Where the next one is written.
        data_use_counter: How often each slot was read, int32 [capacity]; -1 where it is empty.
        pushed_total: Transitions pushed since the start.
    """

    def __init__(self, capacity: int, mode: Literal["circular", "fixed"] = "circular") -> None:
        self.capacity = capacity
        self.mode = mode
        self.size = 0
        self.pointer = 0
        self.pushed_total = 0
        self.data_use_counter = np.full(capacity, -1, np.int32)
        self._layouts: dict[str, Layout] = {}
        self._arrays: dict[str, list[Array]] = {}

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Memory that it has allocated, in bytes."""
        return self.nbytes_with(self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Size of one transition in bytes; 0 before the first push."""
        return sum(layout.nbytes for layout in self._layouts.values())

    def nbytes_with(self, row_bytes: int) -> int:
        """Returns the memory in bytes that it takes for transitions of so many bytes."""
        return self.capacity * (USE_BYTES + row_bytes)

    def get_size(self) -> int:
        """Returns how many transitions it holds."""
        return self.size

    def push(self, columns: Mapping[str, Any]) -> None:
        """Appends transitions; copies them.

        Args:
            columns: Values by name; each leaf is [n, ...] with one n.

        Raises:
            InvalidRowError: They differ in length, or do not fit what is stored already.
            StorageFullError: Mode `fixed`, and they do not fit; nothing was stored.
        """
        lead = (_count(columns),)
        layouts = {name: Layout.of_value(value, name, lead=1) for name, value in columns.items()}
        flat = {name: layout.flatten(columns[name], lead) for name, layout in layouts.items()}
        self.push_flat(layouts, flat)

    def push_flat(self, layouts: Mapping[str, Layout], columns: Mapping[str, list[Array]]) -> None:
        """Appends transitions that are in the order of their layouts' leaves; see `push`."""
        count = len(next(iter(columns.values()))[0])
        if count == 0:
            return
        self._check(layouts)
        if self.mode == "fixed" and self.size + count > self.capacity:
            raise StorageFullError(
                f"{count} transitions for a storage that holds {self.size} of {self.capacity}"
            )
        columns = _with_policy_action(columns, self._layouts)
        self.pushed_total += count
        skipped = max(0, count - self.capacity)  # the oldest would be overwritten at once
        start = 0 if skipped else self.pointer
        count -= skipped
        until_end = min(count, self.capacity - start)
        for name, mine in self._arrays.items():
            for array, new in zip(mine, columns[name], strict=True):
                array[start : start + until_end] = new[skipped : skipped + until_end]
                array[: count - until_end] = new[skipped + until_end :]
        self.data_use_counter[start : start + until_end] = 0
        self.data_use_counter[: count - until_end] = 0
        self.pointer = (start + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def _check(self, layouts: Mapping[str, Layout]) -> None:
        """Makes the columns fit what comes, or refuses it."""
        if not self._layouts or (
            not self.size and _mismatch(self._layouts, _with_policy_layout(layouts, self._layouts))
        ):
            self._layouts = dict(layouts)
            self._arrays = {n: layout.allocate((self.capacity,)) for n, layout in layouts.items()}
            return
        if "policy_action" in layouts and "policy_action" not in self._layouts:
            # Up to here, the policy's own action was executed everywhere.
            self._layouts["policy_action"] = self._layouts["action"]
            self._arrays["policy_action"] = [array.copy() for array in self._arrays["action"]]
        if said := _mismatch(self._layouts, _with_policy_layout(layouts, self._layouts)):
            raise InvalidRowError(said)

    def read(self, index: Index) -> dict[str, Any]:
        """Returns transitions by slot, copied.

        Args:
            index: An int (leaves without the axis of transitions), a slice or an array of ints;
                negative ones count from the end of what is stored.

        Raises:
            IndexError: Nothing is stored there.
            TypeError: Another kind of index.
        """
        where = locate(index, self.size)
        if isinstance(where, int):
            self.data_use_counter[where] += 1
        else:
            np.add.at(self.data_use_counter, where, 1)
        return {
            name: layout.unflatten([_taken(array, where) for array in self._arrays[name]])
            for name, layout in self._layouts.items()
        }

    def __getitem__(self, index: Index) -> dict[str, Any]:
        return self.read(index)

    def get_data(self) -> dict[str, Any]:
        """Returns all transitions, in the order of their slots; {} before the first push."""
        return self.read(slice(None))

    def clear(self) -> None:
        """Drops all transitions; the memory stays allocated."""
        self.size = self.pointer = 0
        self.data_use_counter.fill(-1)


def as_index(item: Any) -> int | npt.NDArray[np.intp]:
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


def locate(index: Index, size: int) -> int | npt.NDArray[np.intp]:
    """Returns where in `size` stored transitions an index points; negative ones count from the end.

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
        raise IndexError(f"index {low if low < -size else high} of {size} stored transitions")
    if isinstance(where, int):
        return where % size
    return np.where(where < 0, where + size, where)


def _taken(array: Array, where: int | npt.NDArray[np.intp]) -> Array:
    # An int would give a view, which later pushes change.
    return np.array(array[where]) if isinstance(where, int) else array.take(where, axis=0)


def _count(columns: Mapping[str, Any]) -> int:
    for value in iter_arrays(columns):
        shape = np.shape(value)
        if not shape:
            raise InvalidRowError("expected a leading axis of transitions, got one value")
        return int(shape[0])
    raise InvalidRowError("expected columns, got none")


def _with_policy_layout(
    layouts: Mapping[str, Layout], stored: Mapping[str, Layout]
) -> Mapping[str, Layout]:
    if "policy_action" in stored and "policy_action" not in layouts and "action" in layouts:
        return {**layouts, "policy_action": layouts["action"]}
    return layouts


def _with_policy_action(
    columns: Mapping[str, list[Array]], stored: Mapping[str, Layout]
) -> Mapping[str, list[Array]]:
    if "policy_action" in stored and "policy_action" not in columns:
        return {**columns, "policy_action": columns["action"]}
    return columns


def _mismatch(stored: Mapping[str, Layout], new: Mapping[str, Layout]) -> str | None:
    try:
        check_keys(stored, new, "columns")
    except InvalidRowError as error:
        return str(error)
    return next(filter(None, (layout.difference(new[n]) for n, layout in stored.items())), None)
