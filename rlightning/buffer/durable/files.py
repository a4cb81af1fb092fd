"""Files that are there whole or not at all, also after the power failed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlightning.errors import RLightningError

try:  # the same checksum as zlib's, several times faster
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

_MOST_PARTS = 512  # below the IOV_MAX of every system


class SyncError(RLightningError):
    """The disk did not confirm what was written. Nothing is known of it any more."""


class CorruptError(RLightningError):
    """What is on disk is not what was written there; the message says where."""


def write_at(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Writes parts one after the other from an offset on.

    Raises:
        OSError: The disk is full, or broken.
    """
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    first = 0
    while first < len(left):
        written = os.pwritev(fd, left[first : first + _MOST_PARTS], offset)
        offset += written
        while first < len(left) and written >= len(left[first]):
            written -= len(left[first])
            first += 1
        if written:
            left[first] = left[first][written:]


def sync(fd: int) -> None:
    """Returns when what was written to a file is on the disk.

    Raises:
        SyncError: It may not be.
    """
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise SyncError(f"fdatasync: {error}") from error


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk.

    Raises:
        SyncError: They may not be.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncError(f"{folder}: fsync: {error}") from error
    finally:
        os.close(fd)
