"""Episodes that are still open: kept aside until they end, then moved into the storage."""

from __future__ import annotations

import numpy as np

from rlightning.buffer.assembly import Group, Rows
from rlightning.buffer.checks import CheckedStep, Step
from rlightning.buffer.utils.storage import Storage
from rlightning.errors import ReplayError, StorageFullError
from rlightning.types import EnvMeta

_FIRST_LENGTH = 64


class EpisodeGroup(Group):
    """The open episodes of one env, [length, rows, ...]; they are stored whole, row after row.

    Args:
        meta: What the env declared.
        storage: Where finished episodes go.
        auto_truncate: Whether an episode is stored once the env has ended it; otherwise only a call
            of `cut` stores what has come.
        from_space: As in `Group`.
    """

    def __init__(
        self, meta: EnvMeta, storage: Storage, *, auto_truncate: bool, from_space: bool = True
    ) -> None:
        super().__init__(meta, _FIRST_LENGTH, from_space=from_space)
        self._storage = storage
        self._auto_truncate = auto_truncate

    def check(self, step: Step, before: CheckedStep | None = None) -> CheckedStep:
        """Checks one item as `Group.check` does.

        Raises:
            InvalidRowError: It does not fit.
            ReplayError: An open episode has as many transitions as the storage holds.
        """
        if self.rows and self.highest >= self._storage.capacity:
            raise ReplayError(
                f"env {self.env_id!r}: an open episode has reached the capacity of "
                f"{self._storage.capacity} transitions; end it with truncate_one_episode, or set "
                "buffer.auto_truncate_episode"
            )
        return super().check(step, before)

    def apply(self, checked: CheckedStep) -> None:
        """Stores one item as `Group.apply` does.

        Raises:
            StorageFullError: It ends episodes for which the storage has no room; nothing was done.
        """
        new = checked.observed
        if new is not None and self._auto_truncate and self.rows and new.done.any():
            rows = np.arange(self.rows) if new.rows is None else new.rows
            self._check_room(rows[new.done], more=1)
        super().apply(checked)

    def cut(self, rows: Rows | None = None) -> int:
        """Ends open episodes as `Group.cut` does, and stores them.

        Raises:
            StorageFullError: The storage has no room for them; nothing was done.
        """
        self._check_room(np.arange(self.rows) if rows is None else rows, more=0)
        return super().cut(rows)

    def _check_room(self, rows: Rows, *, more: int) -> None:
        if self._storage.mode == "fixed":
            count = int((self.positions[rows] + more).sum())
            room = self._storage.capacity - self._storage.size
            if count > room:
                raise StorageFullError(
                    f"env {self.env_id!r}: episodes of {count} transitions have ended, and the "
                    f"storage has room for {room} of {self._storage.capacity}"
                )

    def _ended(self, rows: Rows) -> None:
        if self._auto_truncate:
            self._closed(rows)

    def _closed(self, rows: Rows) -> None:
        layouts = {name: column.layout for name, column in self.columns.items()}
        for row in rows.tolist():
            length = int(self.positions[row])
            if length:
                self._move(np.array([row]), 0)
                columns = {
                    name: column.read((slice(length), row)) for name, column in self.columns.items()
                }
                self._storage.push_flat(layouts, columns)

    def length_with(self, steps: int) -> int:
        """Returns the first axis that the columns have after so many more steps."""
        length = self._length
        while self.rows and self.highest + steps >= length:
            length *= 2
        return length

    def _make_room(self) -> None:
        length = self.length_with(1)
        if length > self._length:
            self._length = length
            for column in self.columns.values():
                column.resize(length)
