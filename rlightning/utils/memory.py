"""How much memory this process may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Version 1 has no word for "none", but a number near 2**63.
_NO_LIMIT = 2**62


class MemoryLimit(NamedTuple):
    """The memory that a control group, such as that of a container, allows.

    Attributes:
        nbytes: How many bytes.
        file: Where it says so.
    """

    nbytes: int
    file: Path


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
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = container_limit()
    return machine if container is None else min(machine, container.nbytes)


def container_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Returns the least of the limits of this process's control groups; None if there is none.

    Args:
        root: Where `proc` and `sys` are.
    """
    limits = []
    for file in _limit_files(root):
        try:
            nbytes = int(file.read_text())
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if nbytes < _NO_LIMIT:
            limits.append(MemoryLimit(nbytes, file))
    return min(limits, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yields where limits may be said: of the group of this process and of all around it.

    A container may see its own group where the machine has the root, or the whole path.
    """
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {"2": "", "1": ""}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["2"] = path
        elif "memory" in controllers.split(","):
            paths["1"] = path
    for top, path, name in (
        (mounted, paths["2"], "memory.max"),
        (mounted / "memory", paths["1"], "memory.limit_in_bytes"),
    ):
        folder = Path(path.strip("/"))
        for group in (folder, *folder.parents):
            yield top / group / name


def in_memory(path: Path, root: Path = Path("/")) -> bool:
    """Tells whether files of a folder are in memory (tmpfs), where they count as the container's.

    Args:
        path: The folder; what of it is not there yet is looked for in its parents.
        root: Where `proc` is.
    """
    try:
        lines = (root / "proc/self/mounts").read_text().splitlines()
    except OSError:  # no Linux
        return False
    kinds = {}
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        kinds[where.replace("\\040", " ")] = kind  # the last one of a place hides those before
    full = path.resolve()
    mount = next((kinds[str(one)] for one in (full, *full.parents) if str(one) in kinds), "")
    return mount in {"tmpfs", "ramfs"}
