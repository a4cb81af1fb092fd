"""Memory that two processes of one host share, so that large tensors need not cross a socket.

The writer makes it, offers it and puts tensors there; messages say where they lie. The reader opens
what was offered and reads from there. It is a memfd of Linux: nothing in the file system is left
behind however the two end, and its seal keeps the writer from shrinking it under the reader's feet,
which would kill that with SIGBUS.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import sys
from bisect import insort
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.v1 import session_pb2

MIN_BYTES = 32 * 1024
"""From this size on, a tensor is put into shared memory; below, its bytes are as fast."""

_NAME = "rlightning"
_LINK = f"/memfd:{_NAME} (deleted)"
_NONCE_BYTES = 32
# Tensors begin at cache lines; the nonce has the first.
_LINE = 64


class SharedMemory:
    """Memory in which one process leaves tensors for another one to read.

    What is put there after `begin(key)` keeps its place until `free(key)`. Pages are taken from the
    system as they are needed, and given back when both ends have dropped it. For one thread.

    Args:
        nbytes: Its size in bytes, at least 64, which it keeps for itself.
        min_bytes: How large a tensor must be to be put there.

    Raises:
        OSError: The system has no such memory, or not so much.
    """

    def __init__(self, nbytes: int, *, min_bytes: int = MIN_BYTES) -> None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            raise OSError("there is no memfd on this system")
        import fcntl

        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = memoryview(mmap.mmap(self._fd, nbytes))
        except BaseException:
            os.close(self._fd)
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._memory[:_NONCE_BYTES] = nonce
        self.offer = session_pb2.SharedMemory(
            pid=os.getpid(), fd=self._fd, size_bytes=nbytes, nonce=nonce
        )
        self._min_bytes = min_bytes
        self._allocated = _LINE
        self._free = [(_LINE, nbytes - _LINE)]  # (offset, length), ascending; no two adjoin
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._key = 0

    def withdraw(self) -> None:
        """Lets nobody open it any more, nor more be put there than before. Safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self, key: int) -> None:
        """Lets what is put from now on belong to a key."""
        self._key = key

    def put(self, array: npt.NDArray[Any]) -> int | None:
        """Copies an array there, of any memory layout.

        Returns:
            Where it lies, row-major; None if there is no room, or it belongs into the message: it
            is small, or has truth values, which would have to be checked while they may change.
        """
        nbytes = array.nbytes
        if nbytes < self._min_bytes or array.dtype.kind == "b":
            return None
        length = -(-nbytes // _LINE) * _LINE
        offset = self._take(length)
        if offset is None:
            return None
        self._held.setdefault(self._key, []).append((offset, length))
        np.copyto(np.ndarray(array.shape, array.dtype, self._memory, offset), array)
        return offset

    def _take(self, length: int) -> int | None:
        """Takes the first place that is large enough: the lowest pages are in the cache."""
        for index, (offset, room) in enumerate(self._free):
            if room >= length:
                if not self._allocate(offset + length):
                    return None
                left = [(offset + length, room - length)] if room > length else []
                self._free[index : index + 1] = left
                return offset
        return None

    def _allocate(self, end: int) -> bool:
        """Takes memory from the system; missing later, it would end whoever touches it."""
        if end > self._allocated:
            if self._fd < 0:
                return False
            try:
                os.posix_fallocate(self._fd, self._allocated, end - self._allocated)
            except OSError:
                return False
            self._allocated = end
        return True

    def held_bytes(self, key: int) -> int:
        """Returns the size of the places of what was put under a key."""
        return sum(length for _, length in self._held.get(key, ()))

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns what lies at some place; valid until that is free."""
        place: npt.NDArray[np.uint8] = np.ndarray(nbytes, np.uint8, self._memory, offset)
        return place

    def free(self, key: int) -> None:
        """Gives the places of what was put under a key back; the reader is done with it."""
        for span in self._held.pop(key, ()):
            insort(self._free, span)
            index = self._free.index(span)
            for first in (index, index - 1):  # the one behind it, then the one before
                if 0 <= first < len(self._free) - 1:
                    (offset, length), (after, more) = self._free[first : first + 2]
                    if offset + length == after:
                        self._free[first : first + 2] = [(offset, length + more)]


def open_shared(offer: session_pb2.SharedMemory, *, max_bytes: int) -> memoryview:
    """Opens memory of another process of this user on this host, for reading.

    Its writer can change what lies there at any time, and nothing else.

    Args:
        offer: What the other process said of it.
        max_bytes: How large it may be.

    Returns:
        The memory, which is given back with the last array over it. Never release the view: numpy
        does not hold it for its arrays.

    Raises:
        ValueError: It is too large, or what was found is not what was offered; says why.
        OSError: There is nothing to be found, or this process may not look.
    """
    if sys.platform != "linux":
        raise OSError("there is no memfd on this system")
    import fcntl

    size = offer.size_bytes
    if not _LINE <= size <= max_bytes:
        raise ValueError(f"{size} bytes; at most {max_bytes} are allowed")
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    # Before it is opened: that alone might do something to a device or a pipe.
    if os.readlink(path) != _LINK:
        raise ValueError("the descriptor is no memory for tensors")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to user {status.st_uid}")
        if status.st_size != size:
            raise ValueError(f"{status.st_size} bytes, offered were {size}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("it may shrink")
        # A huge page that is missing is SIGBUS for who reads there; of plain ones it is zeros.
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise ValueError("it consists of huge pages")
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    if not hmac.compare_digest(memory[:_NONCE_BYTES], offer.nonce):
        raise ValueError("it begins with other bytes than were offered")
    return memoryview(memory)
