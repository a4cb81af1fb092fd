"""What /proc says of a process."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ESTABLISHED = "01"


def established(pid: int) -> int:
    """Number of TCP connections that a process holds open, in its own network namespace."""
    folder = Path(f"/proc/{pid}")
    inodes = set()
    for fd in (folder / "fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue  # closed meanwhile
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if (folder / "net" / table).exists()
        for line in (folder / "net" / table).read_text().splitlines()[1:]
    ]
    return sum(row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in inodes for row in rows)


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """A size of a process in MiB: VmRSS is the current one, VmHWM the largest so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = re.findall(rf"^{what}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) / 1024
