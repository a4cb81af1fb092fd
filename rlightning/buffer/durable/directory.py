"""The data directory of a buffer server: its format, who uses it, and which checkpoints it has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from rlightning.buffer.durable.checkpoint import DATA
from rlightning.buffer.durable.files import sync, sync_folder
from rlightning.errors import ConfigError

FORMAT = 2
"""Version of what is in the directory; what is older is read too."""

POSITION = "position"
"""File of a checkpoint that says where the journal goes on after it."""

_HELD = "held"  # file of a checkpoint that somebody refers to
_PREFIX = "checkpoint-"
_TITLE = "rlightning buffer, format "


class DataDirectory:
    """A data directory, locked for this process.

    Args:
        path: Where it is; made if need be.

    Attributes:
        path: Where it is.
        journal: Folder of the journal.
        checkpoints: Folder of the checkpoints.
        spare: What the next checkpoint may write over: the data of one that was removed.

    Raises:
        ConfigError: Another process uses it, it holds something else, or its format is newer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.spare = self.checkpoints / ".spare"  # checkpoints may be on a disk of their own
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"buffer.data_dir: {path}: {error.strerror}") from error
        try:
            self._prepare()
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"buffer.data_dir: {self.path} is used by another process") from None
        title = self.path / "FORMAT"
        if title.exists():
            self._check_format(title.read_text(errors="replace"))
            (self.path / "spare").unlink(missing_ok=True)  # where it was once
        elif self.journal.exists() or self.checkpoints.exists():
            raise ConfigError(f"buffer.data_dir: {self.path} has no file FORMAT, but other files")
        else:
            self._write_format()
        self.journal.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        for left in self.checkpoints.glob(".*.tmp"):
            shutil.rmtree(left)
        sync_folder(self.path)

    def _write_format(self) -> None:
        temporary = self.path / "FORMAT.tmp"
        with temporary.open("w") as file:
            file.write(f"{_TITLE}{FORMAT}\n")
            file.flush()
            sync(file.fileno())  # or a power cut could leave the name without what is in it
        os.replace(temporary, self.path / "FORMAT")
        sync_folder(self.path)

    def upgrade(self) -> None:
        """Gives it the newest format, before anything is written that older versions cannot read.

        Raises:
            OSError: The disk is full or broken.
            SyncError: The disk did not confirm it.
        """
        if (self.path / "FORMAT").read_text() != f"{_TITLE}{FORMAT}\n":
            self._write_format()

    def _check_format(self, text: str) -> None:
        number = text.strip().removeprefix(_TITLE)
        if not text.startswith(_TITLE) or not number.isdecimal():
            raise ConfigError(
                f"buffer.data_dir: {self.path}/FORMAT is not of a buffer: {text!r:.60}"
            )
        if int(number) > FORMAT:
            raise ConfigError(
                f"buffer.data_dir: {self.path} has format {number}, which is newer than {FORMAT}, "
                "the newest known here"
            )

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, the newest first."""
        return sorted((p.name for p in self.checkpoints.glob(_PREFIX + "*")), reverse=True)

    def next_name(self) -> str:
        """Returns the name of the next checkpoint."""
        numbers = [name.removeprefix(_PREFIX) for name in self.names()]
        last = max((int(number) for number in numbers if number.isdecimal()), default=0)
        return f"{_PREFIX}{last + 1:08d}"

    def hold(self, names: Collection[str]) -> None:
        """Keeps checkpoints, however old they get, and no others but the newest any more."""
        for name in self.names():
            held = self.checkpoints / name / _HELD
            if name in names:
                held.touch()
            else:
                held.unlink(missing_ok=True)

    def prune(self, keep: int) -> int:
        """Removes all checkpoints but the newest, and those that are held.

        Returns:
            The position from which on the newest need the journal. It is 0 while there are fewer
            than shall be kept: the beginning of the journal stands for the one before the first.
        """
        names = self.names()
        for name in names[keep:]:
            if (self.checkpoints / name / _HELD).exists():
                continue
            gone = self.checkpoints / f".{name}.tmp"  # so that half of it is never taken for it
            os.replace(self.checkpoints / name, gone)
            with contextlib.suppress(FileNotFoundError):
                os.replace(gone / DATA, self.spare)
            shutil.rmtree(gone)
        if len(names) < keep:
            return 0
        try:
            return int((self.checkpoints / names[keep - 1] / POSITION).read_text())
        except (OSError, ValueError):
            return 0

    def close(self) -> None:
        """Lets others use it."""
        os.close(self._lock)
