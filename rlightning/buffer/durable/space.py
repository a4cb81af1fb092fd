"""Compares what a buffer server may take with what there is, before it takes anything."""

from __future__ import annotations

import os
from pathlib import Path

from rlightning.errors import ConfigError
from rlightning.utils.config import BufferConfig
from rlightning.utils.memory import MemoryLimit, container_limit, in_memory

# A transition has at least its own columns: reward and flags, numbers of episode, step and version.
_LEAST_ROW_BYTES = 32


def check_space(
    config: BufferConfig, limit: MemoryLimit | None = None, *, free_bytes: int | None = None
) -> None:
    """Checks that memory and disk are enough for what `max_bytes` and `data_dir` ask for.

    Args:
        config: Section `buffer`. Without `max_bytes`, transitions take a part of the memory that
            there is, and the least that they can be is compared with the disk.
        limit: Of the container; None: what the control groups of this process say.
        free_bytes: Of the disk of `data_dir`; None: what it says.

    Raises:
        ConfigError: They are not; the message has the arithmetic.
    """
    limit = container_limit() if limit is None else limit
    memory: list[tuple[int, str]] = []
    if config.max_bytes is not None:
        memory.append((config.max_bytes, "transitions (buffer.max_bytes)"))
        memory.append((config.max_bytes // 2, "messages and batches (half of it)"))
    if config.data_dir is not None:
        folder = Path(config.data_dir).expanduser()
        needed, words = _disk(config)
        there = _size(folder)
        if in_memory(folder):
            memory.append((needed, f"{folder}, which is in memory ({words})"))
        free = _free(folder) if free_bytes is None else free_bytes
        if needed - there > free:
            raise ConfigError(
                f"buffer.data_dir: {folder} may take {needed:,} bytes ({words}), of which "
                f"{there:,} are there and {free:,} are free: make room, or lower buffer.max_bytes, "
                "buffer.capacity or buffer.checkpoint_keep"
            )
    total = sum(nbytes for nbytes, _ in memory)
    if limit is not None and total > limit.nbytes:
        parts = " + ".join(f"{nbytes:,} for {what}" for nbytes, what in memory)
        raise ConfigError(
            f"buffer.max_bytes: {parts} = {total:,} bytes are more than the {limit.nbytes:,} that "
            f"this container may take ({limit.file}): lower it, or raise the limit"
        )


def _disk(config: BufferConfig) -> tuple[int, str]:
    """Returns what a data directory may take in bytes, and how that comes about.

    The full buffer as checkpoints, and as the journal since each, if there is one.
    """
    copies = 1 if config.durability == "none" else 2
    factor = copies * (config.checkpoint_keep + 1)
    how = f"{copies} x (buffer.checkpoint_keep {config.checkpoint_keep} + 1)"
    if config.max_bytes is not None:
        return factor * config.max_bytes, f"{how} x buffer.max_bytes {config.max_bytes:,}"
    sections: list[BufferConfig] = [*config.tables.values()] or [config]
    rows = sum(map(_rows, sections))
    least = f"{how} x {rows:,} transitions (buffer.capacity) of at least {_LEAST_ROW_BYTES} bytes"
    return factor * rows * _LEAST_ROW_BYTES, least


def _rows(config: BufferConfig) -> int:
    """Returns how many transitions a table holds at least when it is full."""
    if config.type == "RolloutBuffer":
        return (config.max_rollouts + 1) * config.rollout_length  # of each row that comes
    return config.capacity


def _size(folder: Path) -> int:
    """Returns what the files of a folder take, in bytes; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _free(folder: Path) -> int:
    """Returns what an ordinary user may add to the disk of a folder, which may not be there yet."""
    full = folder.resolve()
    there = next(one for one in (full, *full.parents) if one.exists())
    disk = os.statvfs(there)
    return disk.f_bavail * disk.f_frsize
