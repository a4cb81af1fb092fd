"""Large tensors into encoded messages without protobuf copying them.

upb copies a `bytes` field twice on the way out and once on the way in. Here, a large `Tensor.data`
is instead a short placeholder while a message is in upb's hands: `insert` puts the real bytes where
the placeholders are after encoding, `extract` (in the module of that name) takes them out before
decoding. What is on the wire is ordinary protobuf either way, and upb alone decides what is valid.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from rlightning.errors import CodecError

Buffer: TypeAlias = bytes | bytearray | memoryview

# Nobody outside of this process can know it, so no peer can send a placeholder of its own.
MARKER = os.urandom(16)
PLACEHOLDER_BYTES = len(MARKER) + 4

# protobuf refuses to read more than this.
MAX_MESSAGE_BYTES = 2**31 - 1


def placeholder(index: int) -> bytes:
    """Returns the bytes that stand for large buffer number `index`."""
    return MARKER + index.to_bytes(4, "little")


def index_of(data: bytes) -> int | None:
    """Returns the buffer number if `data` is a placeholder."""
    if len(data) == PLACEHOLDER_BYTES and data.startswith(MARKER):
        return int.from_bytes(data[len(MARKER) :], "little")
    return None


def insert(small: bytes, buffers: Sequence[Any]) -> list[Any]:
    """Puts large buffers where their placeholders are in an encoded message.

    Args:
        small: The message as upb encoded it.
        buffers: C-contiguous buffers by number; each is used exactly once.

    Returns:
        The pieces of the encoded message as upb would have made it with the buffers in place.

    Raises:
        CodecError: The placeholders are not those of `buffers`, or the message exceeds 2 GiB.
    """
    found: list[int] = []
    position = small.find(MARKER)
    while position >= 0:
        found.append(position)
        position = small.find(MARKER, position + PLACEHOLDER_BYTES)
    numbers = {index_of(small[at : at + PLACEHOLDER_BYTES]) for at in found}
    if len(found) != len(buffers) or numbers != set(range(len(buffers))):
        raise CodecError("the message was not filled by this writer alone, each part once")
    out: list[Any] = []
    size = _Inserter(small, found, buffers, out).level(0, len(small))
    if size > MAX_MESSAGE_BYTES:
        raise CodecError(f"a message of {size} bytes; protobuf can read {MAX_MESSAGE_BYTES}")
    return out


class _Inserter:
    """Walks down to each placeholder, skipping every field that holds none."""

    def __init__(
        self, small: bytes, found: list[int], buffers: Sequence[Any], out: list[Any]
    ) -> None:
        self._small = small
        self._found = found
        self._next = 0
        self._buffers = buffers
        self._out = out

    def level(self, pos: int, end: int) -> int:
        """Emits the fields between two positions; returns their new length."""
        small, found, out = self._small, self._found, self._out
        copied = pos
        size = 0
        while self._next < len(found) and (target := found[self._next]) < end:
            tag_end, pos, field_end = _field_around(small, pos, target)
            out.append(small[copied:tag_end])
            size += tag_end - copied
            header = len(out)
            out.append(b"")
            if pos == target:
                number = index_of(small[pos:field_end])
                buffer = self._buffers[number or 0]
                out.append(buffer)
                length = memoryview(buffer).nbytes
                self._next += 1
            else:
                length = self.level(pos, field_end)
            out[header] = varint(length)
            size += len(out[header]) + length
            copied = pos = field_end
        out.append(small[copied:end])
        return size + end - copied


def _field_around(small: bytes, pos: int, target: int) -> tuple[int, int, int]:
    """Returns end of tag, start and end of content of the field that holds position `target`."""
    while True:
        tag, pos = read_varint(small, pos)
        kind = tag & 7
        if kind == 2:
            tag_end = pos
            length, pos = read_varint(small, pos)
            if pos <= target < pos + length:
                return tag_end, pos, pos + length
            pos += length
        elif kind == 0:
            _, pos = read_varint(small, pos)
        else:
            pos += 8 if kind == 1 else 4


class NotPlainError(Exception):
    """The bytes are not what an encoder writes; upb must say whether they are valid."""


def read_varint(data: Buffer, pos: int) -> tuple[int, int]:
    """Returns a varint and the position after it.

    Raises:
        NotPlainError: It is longer than 64 bits can be.
        IndexError: The data ends within it.
    """
    value = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
        if shift > 63:
            raise NotPlainError


def varint(value: int) -> bytes:
    """Returns a number of 0 or more as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
