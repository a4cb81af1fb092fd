"""Arrays of which somebody wants the rows as they were, while others write on.

Who writes into an array that may be frozen says so first, with `before_write`. What was not read
yet is then copied, a chunk at a time. Without a frozen array this costs a look at an empty dict.
Everything here happens in one thread, but for what others do with a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rlightning.buffer.utils.layout import Array

CHUNK_BYTES = 2**20
"""What is copied at once: a fraction of a millisecond."""


class Frozen:
    """The first rows of an array, as they are when this is made.

    `chunks` has to be read to its end, or `release` called: until then, writers copy for it.

    Args:
        array: The array; it must be C-contiguous.
        rows: How many rows of it are wanted.

    Attributes:
        array: The array.
        rows: How many rows of it are wanted.
        kept_bytes: Memory of what writers had to copy, in bytes.
    """

    def __init__(self, array: Array, rows: int) -> None:
        self.array = array
        self.rows = min(rows, len(array))
        self.kept_bytes = 0
        self._step = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
        self._kept: dict[int, Array] = {}
        self._next = 0
        self._waiting = set(range(self.chunk_count))
        if self._waiting:
            _frozen.setdefault(id(array), []).append(self)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return (self.rows, *self.array.shape[1:])

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self._step)

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes."""
        return int(self.array[: self.rows].nbytes)

    @property
    def chunk_bytes(self) -> int:
        """Size of each chunk but the last, in bytes."""
        return int(self.array[: self._step].nbytes)

    def chunks(self, nbytes: int) -> Iterator[list[tuple[int, Array]]]:
        """Yields number and rows of all chunks, so many bytes of them at a time, or one.

        Those come first that writers had to copy. The others are the rows themselves: what somebody
        writes into before the next are asked for comes once more, as it was. Who writes mostly goes
        on behind what was written last, so that is read next.
        """
        count = max(1, nbytes // max(1, self.chunk_bytes))
        while self._kept or self._waiting:
            some = list(islice(self.kept(), count)) or [
                (number, self._rows_of(number)) for number in self._upcoming(count)
            ]
            yield some
            for number, _ in some:
                self._let_go(number)

    def _upcoming(self, count: int) -> list[int]:
        """Returns the next chunks that nobody has read, at most so many."""
        numbers: list[int] = []
        while len(numbers) < min(count, len(self._waiting)):
            if self._next in self._waiting:
                numbers.append(self._next)
            self._next = (self._next + 1) % self.chunk_count
        return numbers

    def kept(self) -> Iterator[tuple[int, Array]]:
        """Yields number and rows of the chunks that writers had to copy; each once."""
        while self._kept:
            number, chunk = self._kept.popitem()
            self.kept_bytes -= chunk.nbytes
            yield number, chunk

    def release(self) -> None:
        """Lets writers write as ever."""
        self._waiting.clear()
        self._kept.clear()
        self._unlist()

    def keep(self, rows: Any) -> None:
        """Copies what will be overwritten.

        Args:
            rows: An index of the first axis, or a tuple that begins with one; () for all.
        """
        if isinstance(rows, tuple):
            rows = rows[0] if rows else slice(None)
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self.array))
            numbers = range(start // self._step, -(-stop // self._step))
        else:
            numbers = np.unique(np.atleast_1d(rows) // self._step).tolist()
        for number in numbers:
            if number in self._waiting:
                chunk = self._kept[number] = self._rows_of(number).copy()
                self.kept_bytes += chunk.nbytes
                self._next = (number + 1) % self.chunk_count
                self._let_go(number)

    def _rows_of(self, number: int) -> Array:
        start = number * self._step
        rows: Array = self.array[start : min(start + self._step, self.rows)]
        return rows

    def _let_go(self, number: int) -> None:
        self._waiting.discard(number)
        if not self._waiting:
            self._unlist()

    def _unlist(self) -> None:
        listed = _frozen.get(id(self.array), [])
        if self in listed:
            listed.remove(self)
        if not listed:
            _frozen.pop(id(self.array), None)


class FrozenBlobs:
    """Pieces of bytes one after the other, as a `Frozen` array of bytes; nobody changes a piece.

    Args:
        blobs: The pieces.

    Attributes:
        nbytes: Size of all of them.
        chunk_bytes: Size of each chunk but the last, in bytes.
        kept_bytes: 0, since no writer has to copy for it.
    """

    dtype = np.dtype(np.uint8)
    kept_bytes = 0

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self.nbytes = sum(map(len, blobs))
        self.chunk_bytes = CHUNK_BYTES
        self._blobs = blobs

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (self.nbytes,)

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    def chunks(self, nbytes: int) -> Iterator[list[tuple[int, Array]]]:
        """Yields number and bytes of each chunk, one at a time."""
        for chunk in self._chunks():
            yield [chunk]

    def _chunks(self) -> Iterator[tuple[int, Array]]:
        number, waiting = 0, bytearray()
        for blob in self._blobs:
            waiting += blob
            while len(waiting) >= self.chunk_bytes:
                yield number, np.frombuffer(bytes(waiting[: self.chunk_bytes]), np.uint8)
                del waiting[: self.chunk_bytes]
                number += 1
        if waiting:
            yield number, np.frombuffer(bytes(waiting), np.uint8)

    def kept(self) -> Iterator[tuple[int, Array]]:
        """Yields nothing, as of `Frozen`."""
        return iter(())

    def release(self) -> None:
        """Lets go of the pieces."""
        self._blobs = ()


def before_write(arrays: Sequence[Array], rows: Any) -> None:
    """Says that rows of arrays will be written.

    Args:
        arrays: The arrays.
        rows: As of `Frozen.keep`.
    """
    if _frozen:
        for array in arrays:
            for frozen in _frozen.get(id(array), ()):
                frozen.keep(rows)


_frozen: dict[int, list[Frozen]] = {}
