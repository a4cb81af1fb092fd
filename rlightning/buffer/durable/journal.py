"""The journal: numbered records in files that are written from front to back.

A position counts the bytes of all records since the first. A segment is a file named after its
first position; what is in it lies at `_HEAD.size + (position - first)`. Records begin with

    magic u32 | crc32 u32 | position u64 | settled u64 | length u32 | kind u32

little-endian, then `length` bytes, then zeros up to a multiple of 8. The checksum covers what comes
after it. `settled` is the position up to which everything was known to be written when this record
was: what is wrong before that position is damage, and not the end of what a crash cut off.

Segments that no checkpoint needs are used again, since writing to pages that a file has already is
several times faster than to new ones. What is left in them of before has older positions.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from rlightning.buffer.durable.files import (
    CorruptError,
    SyncError,
    crc32,
    sync,
    sync_folder,
    write_at,
)
from rlightning.errors import ConfigError
from rlightning.utils.failpoints import failpoint, is_armed
from rlightning.utils.memory import in_memory, memory_limit

FORMAT = 1
"""Version of the format of segments and records."""

SEGMENT_BYTES = 32 * 2**20
"""Size that a segment is made with; one larger record makes it larger."""

_HEAD = struct.Struct("<4sIQQII")
_RECORD = struct.Struct("<IIQQII")
_AFTER_CRC = 8
_HEAD_MAGIC = b"RLJS"
_MAGIC = 0x314A4C52
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_ALIGN = 8
_ZEROS = bytes(_ALIGN)
_SUFFIX = ".journal"
_SPARE = "spare-"
_LEAST_SPARES = 4
_SPARE_SHARE = 8  # spares may take this part of the memory, in which they are useful
# What is copied into the page cache in some ten microseconds.
_SHORT_BYTES = 32 * 1024


class Record(NamedTuple):
    """One record.

    Attributes:
        position: Where it begins.
        end: Where the next one does.
        kind: What it means.
        payload: Its bytes.
        settled: Up to where everything was written when this was.
    """

    position: int
    end: int
    kind: int
    payload: memoryview
    settled: int


class Entry(NamedTuple):
    """A record that is to be written.

    Attributes:
        position: Where it begins.
        kind: What it means.
        parts: Its bytes.
    """

    position: int
    kind: int
    parts: Sequence[bytes]

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.position + record_bytes(sum(map(len, self.parts)))


def record_bytes(length: int) -> int:
    """Returns what a record with so many bytes takes in the journal."""
    return _RECORD.size + length + -length % _ALIGN


class Journal:
    """The end of a journal, to write on. Not thread-safe; one thread at a time may use it.

    Args:
        folder: Where its segments are.
        end: Position to write on from; what the last segment has from there on is cut off.
        fresh: Begin a segment in any case: the last one does not reach up to `end`.
        power: Whether what is written must outlive the power, not only the process.

    Attributes:
        end: Position after the last record that was written.
        synced_s: How long the disk took to confirm what `write` wrote last; None if it was not
            asked.
    """

    def __init__(
        self,
        folder: Path,
        end: int,
        *,
        power: bool,
        fresh: bool = False,
    ) -> None:
        self.end = end
        self.synced_s: float | None = None
        self._folder = folder
        self._power = power
        self._fd = -1
        self._flusher = None if power else ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._finished: deque[int] = deque()
        self._first = 0
        self._size = 0
        self._scratch = memoryview(bytearray(_SHORT_BYTES))
        self._in_memory = in_memory(folder)
        starts = segment_starts(folder)
        if starts and not fresh:
            self._open_last(starts[-1])

    def _open_last(self, first: int) -> None:
        self._fd = os.open(_path(self._folder, first), os.O_RDWR)
        self._first = first
        length = _HEAD.size + self.end - first
        # What a crash left behind must not follow what comes now, should that end at its position.
        os.ftruncate(self._fd, length)
        self._size = max(length, SEGMENT_BYTES)
        _allocate(self._fd, self._size)
        _read_in(self._fd)
        if self._power:
            sync(self._fd)

    def write(self, entries: Sequence[Entry]) -> None:
        """Writes records; when it returns, they outlive the process, or the power too.

        Raises:
            OSError: The disk is full or broken. All of them may be written again.
            SyncError: The disk did not confirm them.
        """
        parts: list[bytes | memoryview] = []
        position = begun = self.end
        failpoint("journal.before_write")
        for entry in entries:
            end = entry.end
            if end <= self.end:
                continue  # it was written before the disk was full
            if self._offset(end) > self._size and self._offset(position) > _HEAD.size:
                self._flush(parts, begun)
                parts, begun = [], position
                self._next_segment(position, end - position)
                self.end = position
            elif self._fd < 0:
                self._next_segment(position, end - position)
            parts += _encode(entry, self.end)
            position = end
        self._flush(parts, begun)
        if self._power:
            begun_s = time.monotonic()
            sync(self._fd)
            self.synced_s = time.monotonic() - begun_s
            failpoint("journal.synced")
        self.end = position

    def is_short(self, entries: Sequence[Entry]) -> bool:
        """Tells whether writing records is a short copy into pages that the system holds.

        It then takes less than handing it to another thread, and waits for no disk, unless the
        system holds up whoever writes. A page that the system has dropped would be read first.
        """
        nbytes = entries[-1].end - self.end
        offset = self._offset(self.end)
        return (
            not self._power
            and self._fd >= 0
            and nbytes <= _SHORT_BYTES
            and offset + nbytes <= self._size
            and (self._in_memory or _is_held(self._fd, self._scratch[:nbytes], offset))
        )

    def _flush(self, parts: Sequence[bytes | memoryview], position: int) -> None:
        if not parts:
            return
        offset = self._offset(position)
        if sum(map(len, parts)) <= _SHORT_BYTES:
            parts = [b"".join(parts)]
        if is_armed("journal.half_written"):
            whole = b"".join(parts)
            write_at(self._fd, [whole[: len(whole) // 2]], offset)
            failpoint("journal.half_written")
        write_at(self._fd, parts, offset)
        failpoint("journal.written")

    def _offset(self, position: int) -> int:
        return _HEAD.size + position - self._first

    def _next_segment(self, first: int, least: int) -> None:
        """Goes on in another file; the one before is complete."""
        size = max(SEGMENT_BYTES, _HEAD.size + least)
        path = _path(self._folder, first)
        spare = next(iter(self._folder.glob(_SPARE + "*")), None)
        new = self._folder / f"{_SPARE}{first}" if spare is None else spare
        fd = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _allocate(fd, size)
            _read_in(fd)
            write_at(fd, [_head(first)], 0)
            if self._power:
                if self._fd >= 0:
                    sync(self._fd)
                sync(fd)
            failpoint("journal.segment_made")
            os.replace(new, path)
            if self._power:
                sync_folder(self._folder)
        except BaseException:
            os.close(fd)
            raise
        self._finish_segment()
        self._fd, self._first, self._size = fd, first, os.fstat(fd).st_size
        failpoint("journal.segment_named")

    def _finish_segment(self) -> None:
        """Closes the file once it is on the disk.

        Nothing waits for that, but the system lets nobody write any more who has left too much to
        be written.
        """
        if self._flusher is not None and self._fd >= 0:
            self._finished.append(self._fd)
            self._flusher.submit(self._flush_next)
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _flush_next(self) -> None:
        fd = next(self._take_finished(), None)
        if fd is not None:
            with contextlib.suppress(SyncError):  # it outlives the process all the same
                sync(fd)
            os.close(fd)

    def _take_finished(self) -> Iterator[int]:
        with contextlib.suppress(IndexError):
            while True:
                yield self._finished.popleft()

    def forget(self, position: int) -> None:
        """Lets go of the segments that have nothing from a position on.

        As many as stay are kept as spares, since about as much comes until others can go; but no
        more than memory has room for, beyond which they are read from the disk first.
        """
        starts = segment_starts(self._folder)
        gone = [
            first
            for first, following in pairwise(starts)
            if following <= position and first != self._first
        ]
        spares = [path.stat().st_size for path in self._folder.glob(_SPARE + "*")]
        most = max(_LEAST_SPARES, len(starts) - len(gone))
        room = memory_limit() // _SPARE_SHARE - sum(spares)
        for first in gone:
            path = _path(self._folder, first)
            size = path.stat().st_size
            if len(spares) < most and size <= room:
                os.replace(path, self._folder / f"{_SPARE}{first}")
                spares.append(size)
                room -= size
            else:
                path.unlink()

    def close(self) -> None:
        """Closes the file. Safe to repeat."""
        if self._flusher is not None:
            self._flusher.shutdown(wait=False, cancel_futures=True)
            for fd in self._take_finished():
                os.close(fd)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def segment_starts(folder: Path) -> list[int]:
    """Returns the first positions of the segments in a folder, ascending."""
    return sorted(int(path.stem) for path in folder.glob("*" + _SUFFIX) if path.stem.isdecimal())


class JournalReader:
    """Reads a journal from a position on. What a crash cut off at its end is left out.

    Args:
        folder: Where its segments are.
        position: Where to begin.

    Attributes:
        end: Once it was read: where the last record ends; None if there are no segments.
    """

    def __init__(self, folder: Path, position: int) -> None:
        self.end: int | None = None
        self._folder = folder
        self._position = position

    def __iter__(self) -> Iterator[Record]:
        """Yields the records.

        Raises:
            CorruptError: One is missing or damaged; the message names segment and offset.
        """
        starts = segment_starts(self._folder)
        if starts and starts[0] > self._position:
            raise CorruptError(
                f"{self._folder}: the journal begins at {starts[0]}, and is needed from "
                f"{self._position} on"
            )
        for first, following in zip_longest(starts, starts[1:]):
            if following is None or following > self._position:
                yield from self._read_segment(first, following)

    def _read_segment(self, first: int, following: int | None) -> Iterator[Record]:
        path = _path(self._folder, first)
        with path.open("rb") as file:
            if not _good_head(path, file.read(_HEAD.size), first):
                raise CorruptError(f"{path}: offset 0: no head of a segment that begins at {first}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                at = first
                while following is None or at < following:
                    record = _record(data, _HEAD.size + at - first, at)
                    if record is None:
                        break
                    at = record.end
                    if record.position >= self._position:
                        yield record
                if following is not None and at != following:
                    raise _damage(path, first, at, "a record is damaged or cut")
                if following is None and (later := _settled_later(data, first, at)) is not None:
                    said = f"a record is damaged, and one at {later} was written after it"
                    raise _damage(path, first, at, said)
        self.end = at


def _damage(path: Path, first: int, at: int, what: str) -> CorruptError:
    return CorruptError(f"{path}: offset {_HEAD.size + at - first}: {what}")


def _record(data: mmap.mmap, offset: int, position: int) -> Record | None:
    """Returns the record at an offset; None if there is no whole one of this position."""
    if offset + _RECORD.size > len(data):
        return None
    magic, crc, at, settled, length, kind = _RECORD.unpack_from(data, offset)
    stop = offset + _RECORD.size + length
    if magic != _MAGIC or at != position or stop > len(data):
        return None
    checked = data[offset + _AFTER_CRC : stop]
    if crc32(checked) != crc:
        return None
    payload = memoryview(checked)[_RECORD.size - _AFTER_CRC :]
    return Record(at, at + record_bytes(length), kind, payload, settled)


def _settled_later(data: mmap.mmap, first: int, bad: int) -> int | None:
    """Returns the position of a later record that was written when `bad` was known to be whole."""
    offset = _HEAD.size + bad - first
    # Not to the end, where no record has room: up to CPython 3.11.4 a search looks at one byte more
    # (python/cpython#105235), and the segment may end where the memory does.
    while (offset := data.find(_MAGIC_BYTES, offset + _ALIGN, len(data) - 1)) >= 0:
        record = _record(data, offset, first + offset - _HEAD.size)
        if record is not None and record.settled > bad:
            return record.position
    return None


def _encode(entry: Entry, settled: int) -> list[bytes | memoryview]:
    length = sum(map(len, entry.parts))
    head = _RECORD.pack(_MAGIC, 0, entry.position, settled, length, entry.kind)
    crc = crc32(head[_AFTER_CRC:])
    for part in entry.parts:
        crc = crc32(part, crc)
    head = _RECORD.pack(_MAGIC, crc, entry.position, settled, length, entry.kind)
    return [head, *entry.parts, _ZEROS[: -length % _ALIGN]]


def _head(first: int) -> bytes:
    packed = _HEAD.pack(_HEAD_MAGIC, FORMAT, first, 0, 0, 0)
    return _HEAD.pack(_HEAD_MAGIC, FORMAT, first, 0, crc32(packed), 0)


def _good_head(path: Path, head: bytes, first: int) -> bool:
    if len(head) < _HEAD.size:
        return False
    magic, version, start, _, crc, _ = _HEAD.unpack(head)
    packed = _HEAD.pack(magic, version, start, 0, 0, 0)
    if magic != _HEAD_MAGIC or crc != crc32(packed):
        return False
    if version > FORMAT:
        raise ConfigError(f"{path}: format {version} is newer than {FORMAT}, the newest known here")
    return bool(start == first)


def _allocate(fd: int, size: int) -> None:
    """Gives a file its size now, so that the disk cannot be full in the middle of a segment.

    Raises:
        OSError: It is full.
    """
    if os.fstat(fd).st_size < size:
        os.posix_fallocate(fd, 0, size)


def _read_in(fd: int) -> None:
    """Has the system read a file into its memory, without waiting for it.

    It reads the page of a short write before, unless it has it.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def _is_held(fd: int, scratch: memoryview, offset: int) -> bool:
    """Tells whether the system has a part of a file in memory; reads it if so.

    It is False where that cannot be told: some file systems do not say, and a Python that was built
    with an old C library does not ask.
    """
    flag: int | None = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return False
    try:
        return os.preadv(fd, [scratch], offset, flag) == len(scratch)
    except (OSError, NotImplementedError):
        return False


def _path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}{_SUFFIX}"


def journal_limit(folder: Path) -> int:
    """Returns a position that no record of the journal reaches, not even a damaged one.

    It is 0 if there is no journal.
    """
    starts = segment_starts(folder)
    if not starts:
        return 0
    size = _path(folder, starts[-1]).stat().st_size
    return starts[-1] + size + -size % _ALIGN
