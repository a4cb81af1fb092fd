"""Writing and reading one gRPC message: the state that its tensors and limits share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, EncodeError, Message

from rlightning.errors import CodecError, MessageTooLargeError
from rlightning.wire import extract, splice
from rlightning.wire.shared import SharedMemory
from rlightning.wire.splice import Buffer

SPLICE_BYTES = 16 * 1024
"""From this size on, protobuf does not copy the data of a tensor; below, that is no faster."""

# A message without its large tensors is looked through before upb may expand it, from this size on.
_CHECK_BYTES = 256 * 1024
# A tensor in a map is seven: entry, key, value, tensor and its three; the envelope adds some.
_FIELDS_PER_LEAF = 16
# What an element of a repeated number takes in memory: in upb, and in the array made of it.
_NUMBER_BYTES = 16

_MessageT = TypeVar("_MessageT", bound=Message)


@dataclass(frozen=True)
class Limits:
    """What a message may ask of its reader; checked before anything is allocated for it."""

    max_bytes: int = 160 * 2**20  # as `rpc.max_message_bytes`
    """Size of the encoded message, and of one value of all the spaces in it."""
    max_depth: int = 32
    """Levels of nesting of a value or a space; one that holds nothing has one. At most 32."""
    max_leaves: int = 10_000
    """Values in all nestings of the message together, containers included."""
    max_kept_bytes: int = 4 * 2**20
    """Memory of the spaces in the message, and of their names: it is kept as long as a session."""
    max_rows: int = 2**20
    """Rows that an env may declare; who stores them keeps some numbers for each from then on."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_depth <= 32:  # deeper maps would pass protobuf's own limit
            raise ValueError(f"max_depth must be from 1 to 32, got {self.max_depth}")


DEFAULT_LIMITS = Limits()
"""What one message may ask for unless its reader says otherwise."""


class _Budget:
    """Counts what one message has used of its limits."""

    __slots__ = ("_bytes_left", "_kept_left", "_leaves_left", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._leaves_left = limits.max_leaves
        self._bytes_left = limits.max_bytes
        self._kept_left = limits.max_kept_bytes

    def take_leaves(self, count: int) -> None:
        """Counts values before they are made.

        Raises:
            CodecError: The message has too many.
        """
        self._leaves_left -= count
        if self._leaves_left < 0:
            raise CodecError(f"more than {self.limits.max_leaves} values in one message")

    def take_bytes(self, count: int) -> None:
        """Counts memory that a few bytes of the message ask for, such as the bounds of a box.

        Raises:
            CodecError: It asks for too much.
        """
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise CodecError(f"needs more than {self.limits.max_bytes} bytes")

    def take_kept(self, count: int) -> None:
        """Counts memory of spaces, before they are made.

        Raises:
            CodecError: They need too much.
        """
        self._kept_left -= count
        if self._kept_left < 0:
            raise CodecError(f"spaces that need more than {self.limits.max_kept_bytes} bytes")

    def used(self) -> tuple[int, int, int]:
        """Returns leaves, bytes and kept bytes taken so far."""
        return (
            self.limits.max_leaves - self._leaves_left,
            self.limits.max_bytes - self._bytes_left,
            self.limits.max_kept_bytes - self._kept_left,
        )


class Writer(_Budget):
    """Collects the large tensors of one message while it is filled, and encodes it.

    One writer fills one message, once. The arrays given to it must not change before `finish`,
    and the message must be encoded with `finish` alone: large tensors are not in it yet.

    ```python
    w = Writer()
    m = ActRequest()
    fill_env_ret(m.step.env_ret, env_ret, w)
    data = w.finish(m)
    ```

    Args:
        limits: Depth and number of leaves to keep to, as the reader will.
        splice_bytes: How large the data of a tensor must be for protobuf not to copy it.
        memory: What is shared with the reader: large tensors go there, as far as there is room.
    """

    __slots__ = ("_buffers", "memory", "splice_bytes")

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        *,
        splice_bytes: int = SPLICE_BYTES,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(limits)
        self.splice_bytes = splice_bytes
        self.memory = memory
        self._buffers: list[npt.NDArray[Any]] = []

    def attach(self, array: npt.NDArray[Any]) -> bytes:
        """Keeps a C-contiguous array until `finish`; returns what stands for it in the message."""
        self._buffers.append(array)
        return splice.placeholder(len(self._buffers) - 1)

    def finish(self, message: Message) -> bytes:
        """Encodes the message that was filled with this writer.

        Returns:
            The bytes that protobuf would have made; each large tensor was copied once.

        Raises:
            CodecError: As `pieces`.
        """
        return b"".join(self.pieces(message))  # which copies nothing of a single piece

    def pieces(self, message: Message) -> list[Any]:
        """Encodes the message that was filled with this writer, without copying large tensors.

        Returns:
            What `finish` returns, in pieces to be joined before any of the tensors changes.

        Raises:
            CodecError: Another writer filled a part of it, a part was dropped or doubled, or the
                message exceeds 2 GiB.
        """
        try:
            small = message.SerializeToString()
        except EncodeError as error:
            raise CodecError(f"cannot encode {message.DESCRIPTOR.name}: {error}") from error
        if self._buffers or splice.MARKER in small:
            return splice.insert(small, self._buffers)
        return [small]


class Reader(_Budget, Generic[_MessageT]):
    """Decodes one message; its tensors are views over the bytes that came.

    ```python
    r = Reader(ActRequest, data)
    env_ret = read_env_ret(r.message.step.env_ret, r)
    ```

    Args:
        message_type: What the bytes should be.
        data: The encoded message; must not change while arrays read from it live.
        limits: What it may ask for.
        splice_bytes: How large the data of a tensor must be for protobuf not to copy it.
        memory: What is shared with the writer. Arrays in it are views, too, and change with it.
        max_total_bytes: How large the message and its arrays in `memory` may be in all, in bytes;
            None for as much as `limits` has for each.

    Attributes:
        message: The decoded message. Tensors in it must be read with `read_tensor` and this reader.
        ranges: (offset, length) of the tensors that protobuf did not copy.
        shared_bytes: Size of the tensors that were read from `memory` so far.
        copies_shared: Whether arrays in it are copies; set before they are read.

    Raises:
        CodecError: The message is too large, or the bytes are no such message.
    """

    __slots__ = (
        "_data",
        "_max_total",
        "_memory",
        "copies_shared",
        "message",
        "ranges",
        "shared_bytes",
    )

    def __init__(
        self,
        message_type: type[_MessageT],
        data: Buffer,
        *,
        limits: Limits = DEFAULT_LIMITS,
        splice_bytes: int = SPLICE_BYTES,
        memory: memoryview | None = None,
        max_total_bytes: int | None = None,
    ) -> None:
        super().__init__(limits)
        self._memory = memory
        self._max_total = max_total_bytes
        self.shared_bytes = 0
        self.copies_shared = False
        size = len(data)
        if size > limits.max_bytes:
            raise CodecError(f"a message of {size} bytes; at most {limits.max_bytes} are allowed")
        self._data = data
        self.ranges: list[tuple[int, int]] = []
        rest = data
        if size >= splice_bytes:
            plan = extract.plan_of(message_type.DESCRIPTOR)
            max_fields = _FIELDS_PER_LEAF * limits.max_leaves
            rest, self.ranges = extract.extract(
                data, plan, splice_bytes=splice_bytes, max_fields=max_fields
            )
            if len(rest) >= _CHECK_BYTES:
                max_numbers = limits.max_bytes // _NUMBER_BYTES
                extract.check_expansion(rest, plan, max_fields=max_fields, max_numbers=max_numbers)
        try:
            self.message: _MessageT = message_type.FromString(rest)  # type: ignore[arg-type]
        except DecodeError as error:
            name = message_type.DESCRIPTOR.name
            raise CodecError(f"no valid {name}: {error}") from error

    @property
    def data(self) -> Buffer:
        """The encoded message."""
        return self._data

    @property
    def nbytes(self) -> int:
        """Size of the encoded message and of what was read from shared memory."""
        return len(self._data) + self.shared_bytes

    def resolve(self, data: bytes) -> tuple[int, int] | None:
        """Returns (offset, length) of what large `data` stands for; None if it is itself."""
        index = splice.index_of(data)
        return self.ranges[index] if index is not None and index < len(self.ranges) else None

    def content(self, data: bytes) -> Buffer:
        """Returns what the bytes of a chunk are, or stand for: a view over the message."""
        found = self.resolve(data) if self.ranges else None
        if found is None:
            return data
        offset, length = found
        return memoryview(self._data)[offset : offset + length]

    def view(self, dtype: np.dtype[Any], shape: Sequence[int], offset: int) -> npt.NDArray[Any]:
        """Returns a read-only array over the bytes of the message."""
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, self._data, offset)
        array.flags.writeable = False
        return array

    def shared_view(
        self, dtype: np.dtype[Any], shape: Sequence[int], offset: int, nbytes: int
    ) -> npt.NDArray[Any]:
        """Returns a read-only array over shared memory, or a copy.

        Raises:
            CodecError: None is shared, or it ends before the array does.
            MessageTooLargeError: The message and its arrays are larger in all than it may be.
        """
        memory = self._memory
        if memory is None:
            raise CodecError("refers to shared memory, and none was agreed on")
        if offset < 0 or offset + nbytes > len(memory):
            raise CodecError(
                f"bytes {offset} to {offset + nbytes} of shared memory, which has {len(memory)}"
            )
        total = self.nbytes + nbytes
        if self._max_total is not None and total > self._max_total:
            raise MessageTooLargeError(
                f"the message has {total} bytes with what lies in shared memory; this session's "
                f"cap is {self._max_total}: correct the spec, or raise rpc.info_budget_bytes of "
                "the server"
            )
        self.take_bytes(nbytes)
        self.shared_bytes += nbytes
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
        if self.copies_shared:
            array = array.copy()
        array.flags.writeable = False
        return array


CHUNK_BYTES = 2**20 - 4096
"""Size of a part of a large message: with its envelope it stays below 1 MiB."""


def split_batch(data: Buffer, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, memoryview]]:
    """Cuts an encoded batch, or any other bytes, into parts.

    Args:
        data: What to cut, such as an encoded batch or a safetensors file; not copied.
        chunk_bytes: Size of each part but the last.

    Yields:
        (offset, part); one empty part for empty data.
    """
    view = memoryview(data)
    for offset in range(0, max(len(view), 1), chunk_bytes):
        yield offset, view[offset : offset + chunk_bytes]


def split_pieces(
    pieces: Sequence[Any], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, list[memoryview]]]:
    """Cuts bytes that come in pieces into parts, as `split_batch` does.

    Args:
        pieces: C-contiguous buffers of any kind, as `batch_pieces` returns; not copied.
        chunk_bytes: Size of each part but the last.

    Yields:
        (offset, pieces of the part); one empty part if there is nothing.
    """
    part: list[memoryview] = []
    offset, room = 0, chunk_bytes
    for piece in pieces:
        view = np.frombuffer(piece, np.uint8).data if len(piece) else memoryview(b"")
        while len(view) > room:
            yield offset, [*part, view[:room]]
            view, offset, part, room = view[room:], offset + chunk_bytes, [], chunk_bytes
        part.append(view)
        room -= len(view)
    if part or not offset:
        yield offset, part


class ChunkJoiner:
    """Joins the parts of a large message, which must come in order.

    Args:
        total_bytes: Size of the whole, as its sender announced it.
        max_bytes: How large it may be.

    Raises:
        CodecError: It is larger, or negative.
    """

    __slots__ = ("_filled", "_whole")

    def __init__(self, total_bytes: int, *, max_bytes: int) -> None:
        if not 0 <= total_bytes <= max_bytes:
            raise CodecError(f"{total_bytes} bytes announced; at most {max_bytes} are allowed")
        # Unlike a bytearray, it is not filled with zeros first.
        self._whole = np.empty(total_bytes, np.uint8).data
        self._filled = 0

    def add(self, offset: int, data: Buffer) -> memoryview | None:
        """Adds the next part.

        Returns:
            The whole once it is complete, else None.

        Raises:
            CodecError: The part does not begin where the last one ended, or passes the end.
        """
        end = offset + len(data)
        if offset != self._filled or end > len(self._whole):
            raise CodecError(
                f"part {offset}..{end} where {self._filled}..{len(self._whole)} is missing"
            )
        self._whole[offset:end] = data
        self._filled = end
        return self._whole if end == len(self._whole) else None
