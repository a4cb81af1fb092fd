"""A state on disk: a folder that is there whole or not at all.

`data` holds the rows of the frozen arrays, one array after the other. `manifest` says what it is:

    magic 4s | format u32 | crc32 u32 | length u64, then the encoded value

with a checksum for every chunk of `data`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlightning.buffer.durable.files import CorruptError, crc32, sync, sync_folder, write_at
from rlightning.buffer.durable.state import frozen_in
from rlightning.buffer.utils.frozen import Frozen, FrozenBlobs
from rlightning.buffer.utils.layout import Array
from rlightning.errors import CodecError, ConfigError
from rlightning.utils.failpoints import failpoint
from rlightning.utils.waiting import in_thread
from rlightning.wire import Limits, decode_value, encode_value

FORMAT = 2
"""Version of the format of checkpoints.

Before 2 they did not say whose batches were given back, and had no outcomes (`checks.Schema`).
"""

_HEAD = struct.Struct("<4sIIQ")
DATA = "data"
"""Name of the file that takes the most."""

_MAGIC = b"RLSN"
_MANIFEST = "manifest"
_ARRAY = "$array"
_LIMITS = Limits(max_bytes=2**31 - 1, max_leaves=10_000_000)
# So much may lie in memory for the checkpoint, because others overwrite it; beyond, they wait for
# the disk.
_MOST_KEPT_BYTES = 128 * 2**20
_SYNC_BYTES = 8 * 2**20
# For every second that the disk takes for a checkpoint, so many are left to others.
_REST = 0.5
_READERS = 4


async def write_checkpoint(
    folder: Path,
    state: Mapping[str, Any],
    *,
    notes: Mapping[str, str],
    before_rename: Callable[[], Awaitable[None]],
    spare: Path | None = None,
) -> int:
    """Writes a state into a folder that does not exist yet, while others write on.

    A thread writes some chunks at a time, from where they lie. If the event loop writes over one
    meanwhile, it copies it before, and the thread writes the copy once more.

    Args:
        folder: The folder. Until everything is on the disk, it has another name.
        state: Nested values; arrays that are large come as `Frozen`, which are released.
        notes: Text of small files beside it, by name.
        before_rename: Awaited before the folder gets its name.
        spare: A file of data that nobody needs, which is written over if it is there: that is
            several times faster than a new one.

    Returns:
        What it takes on the disk, in bytes.

    Raises:
        OSError: The disk is full or broken; nothing is left.
        SyncError: The disk did not confirm what was written.
        asyncio.CancelledError: It was cancelled, and no thread is at it any more. Nothing is left,
            or the whole checkpoint.
    """
    temporary = folder.parent / f".{folder.name}.tmp"
    arrays = list(frozen_in(state))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):
                os.replace(spare, temporary / DATA)
        checksums = await _write_data(temporary / DATA, arrays)
        failpoint("checkpoint.data_written")
        nbytes = await in_thread(None, _finish, temporary, state, arrays, checksums, notes)
        await before_rename()
        failpoint("checkpoint.before_rename")
        await in_thread(None, _publish, temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        for frozen in arrays:
            frozen.release()
    failpoint("checkpoint.renamed")
    return nbytes


async def _write_data(path: Path, arrays: list[Frozen | FrozenBlobs]) -> list[Array]:
    checksums = [np.zeros(frozen.chunk_count, np.uint32) for frozen in arrays]
    offset = unsynced = 0
    with path.open("ab", buffering=0):
        pass  # it is there, with what it had
    with path.open("r+b", buffering=0) as file:
        fd = file.fileno()
        await in_thread(None, _set_size, fd, sum(frozen.nbytes for frozen in arrays))
        for frozen, mine in zip(arrays, checksums, strict=True):
            for chunks in frozen.chunks(_SYNC_BYTES):
                place = (offset, frozen.chunk_bytes)
                await in_thread(None, _write_chunks, fd, chunks, place, mine)
                unsynced += sum(chunk.nbytes for _, chunk in chunks)
                if unsynced >= _SYNC_BYTES:  # little by little, for the sake of others' syncs
                    unsynced, begun = 0, time.monotonic()
                    await in_thread(None, sync, fd)
                    await asyncio.sleep(_REST * (time.monotonic() - begun))
                if sum(other.kept_bytes for other in arrays) > _MOST_KEPT_BYTES:
                    _write_kept(fd, arrays, checksums)
            offset += frozen.nbytes
    return checksums


def _set_size(fd: int, size: int) -> None:
    """Gives a file its size, so that syncing it holds up nobody else's writes."""
    os.ftruncate(fd, min(size, os.fstat(fd).st_size))
    if size:
        os.posix_fallocate(fd, 0, size)


def _write_kept(fd: int, arrays: list[Frozen | FrozenBlobs], checksums: list[Array]) -> None:
    offset = 0
    for frozen, mine in zip(arrays, checksums, strict=True):
        _write_chunks(fd, frozen.kept(), (offset, frozen.chunk_bytes), mine)
        offset += frozen.nbytes


def _write_chunks(
    fd: int, chunks: Iterable[tuple[int, Array]], place: tuple[int, int], checksums: Array
) -> None:
    """Writes chunks by number; `place` is where the first one is, and the size of each."""
    offset, nbytes = place
    for number, chunk in chunks:
        view = _bytes_of(chunk)
        write_at(fd, [view], offset + number * nbytes)
        checksums[number] = crc32(view)


def _bytes_of(array: Array) -> memoryview:
    """Returns a view over a C-contiguous array as bytes."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _finish(
    temporary: Path,
    state: Mapping[str, Any],
    arrays: list[Frozen | FrozenBlobs],
    checksums: list[Array],
    notes: Mapping[str, str],
) -> int:
    numbers = {id(frozen): number for number, frozen in enumerate(arrays)}
    value = {
        "state": _numbered(state, numbers),
        "arrays": [
            {
                "dtype": frozen.dtype.str,
                "shape": list(frozen.shape),
                "chunk_bytes": frozen.chunk_bytes,
                "crc32": mine,
            }
            for frozen, mine in zip(arrays, checksums, strict=True)
        ],
    }
    data = encode_value(value, _LIMITS)
    head = _HEAD.pack(_MAGIC, FORMAT, crc32(data), len(data))
    files = {_MANIFEST: [head, data], **{name: [text.encode()] for name, text in notes.items()}}
    for name, parts in files.items():
        with (temporary / name).open("wb", buffering=0) as file:
            write_at(file.fileno(), parts, 0)
            sync(file.fileno())
    with (temporary / DATA).open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        sync(file.fileno())
    sync_folder(temporary)
    return nbytes + len(head) + len(data)


def _publish(temporary: Path, folder: Path) -> None:
    os.replace(temporary, folder)
    sync_folder(folder.parent)


def _numbered(value: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(value, (Frozen, FrozenBlobs)):
        return {_ARRAY: numbers[id(value)]}
    if isinstance(value, dict):
        return {key: _numbered(part, numbers) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbered(part, numbers) for part in value]
    return value


class _StoredArray:
    """Rows of a column in `data`; see `state.Stored`."""

    def __init__(self, path: Path, offset: int, described: Mapping[str, Any]) -> None:
        self._path = path
        self._offset = offset
        self._dtype = np.dtype(described["dtype"])
        self._shape: tuple[int, ...] = tuple(described["shape"])
        self._chunk_bytes = described["chunk_bytes"]
        self._crcs = described["crc32"].tolist()

    @property
    def rows(self) -> int:
        return self._shape[0]

    @property
    def nbytes(self) -> int:
        nbytes: int = math.prod(self._shape) * self._dtype.itemsize
        return nbytes

    def read_into(self, array: Array) -> None:
        if array.dtype != self._dtype or array.shape[1:] != self._shape[1:]:
            raise CorruptError(f"{self._path}: a column of another kind")
        if not self.nbytes:
            return
        try:
            self._read(_bytes_of(array[: self.rows]))
        except OSError as error:
            raise CorruptError(f"{self._path}: {error}") from error

    def _read(self, view: memoryview) -> None:
        with self._path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as pool:
            read = partial(self._read_chunk, file.fileno(), view)
            for _ in pool.map(read, range(len(self._crcs))):
                pass

    def _read_chunk(self, fd: int, view: memoryview, number: int) -> None:
        start = number * self._chunk_bytes
        part, done = view[start : start + self._chunk_bytes], 0
        while done < len(part):
            count = os.preadv(fd, [part[done:]], self._offset + start + done)
            if not count:
                raise CorruptError(f"{self._path}: ends early")
            done += count
        if crc32(part) != self._crcs[number]:
            raise CorruptError(f"{self._path}: offset {self._offset + start}: damaged")


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Returns the state in a folder; its large arrays as `Stored`, which are read later.

    Raises:
        CorruptError: It is damaged.
        ConfigError: Its format is newer than what this version reads.
    """
    path = folder / _MANIFEST
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"{path}: {error}") from error
    if len(whole) < _HEAD.size:
        raise CorruptError(f"{path}: ends early")
    magic, version, crc, length = _HEAD.unpack_from(whole)
    if magic == _MAGIC and version > FORMAT:
        raise ConfigError(
            f"{folder}: format {version} is newer than {FORMAT}, the newest known here"
        )
    data = memoryview(whole)[_HEAD.size :]
    if magic != _MAGIC or len(data) != length or crc32(data) != crc:
        raise CorruptError(f"{path}: damaged")
    try:
        value = decode_value(bytes(data), _LIMITS)
    except CodecError as error:
        raise CorruptError(f"{path}: {error}") from error
    arrays, offset = [], 0
    for described in value["arrays"]:
        stored = _StoredArray(folder / DATA, offset, described)
        arrays.append(stored)
        offset += stored.nbytes
    state: dict[str, Any] = _resolved(value["state"], arrays)
    return state


def _resolved(value: Any, arrays: list[_StoredArray]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _resolved(part, arrays) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part, arrays) for part in value]
    return value
