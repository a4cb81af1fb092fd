"""How much memory this process may take."""

from __future__ import annotations

import os
from pathlib import Path

# Where a control group, such as that of a container, says so: version 2, then version 1.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class MemoryPool:
    """A number of bytes that several users share.

    Args:
        max_bytes: How many.

    Attributes:
        max_bytes: As given.
        used: How many are taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def take(self, nbytes: int) -> bool:
        """Takes some if so many are left; tells whether."""
        if self.used + nbytes > self.max_bytes:
            return False
        self.used += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Gives some back that were taken."""
        self.used -= nbytes


def memory_limit() -> int:
    """Returns the memory of the machine, or of the container where that is less, in bytes."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _CGROUP_LIMITS:
        try:
            limit = min(limit, int(file.read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return limit
