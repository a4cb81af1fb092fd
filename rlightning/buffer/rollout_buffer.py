"""Rollouts: each transition is handed to the learner once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlightning.buffer.assembly import Group
from rlightning.buffer.base_buffer import DataBuffer, Prepared
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rollouts import RolloutCollector, RolloutGroup
from rlightning.buffer.sampler import AllDataSampler, Indices
from rlightning.buffer.utils.layout import map_arrays
from rlightning.buffer.utils.storage import locate
from rlightning.errors import InvalidRowError, ReplayError
from rlightning.types import EnvMeta
from rlightning.utils.registry import BUFFERS

logger = logging.getLogger(__name__)


@BUFFERS.register("RolloutBuffer")
class RolloutBuffer(DataBuffer):
    """A buffer whose transitions leave it once they were sampled.

    It is used in one of two ways. With the methods of `DataBuffer`, episodes are stored as they
    end, and `sample` returns and drops everything. With `open_group`, as a server or an actor of
    the same process does, `rollouts` collects `rollout_length` consecutive transitions of every row
    of every env that was opened, and keeps at most `max_rollouts` of them until they are released.

    Attributes:
        rollouts: The rollouts of the envs that were opened.
    """

    rollouts: RolloutCollector

    def init(
        self,
        env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None = None,
        env_ids: Sequence[str] | None = None,
    ) -> None:
        """Makes sampler and storage; see `DataBuffer.init`."""
        super().init(env_meta_list, env_ids)
        self.rollouts = RolloutCollector(self.config.rollout_length, self.config.max_rollouts)

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool | None = True,
        drop_last: bool | None = True,
    ) -> list[dict[str, Any]]:
        """Draws a batch as `DataBuffer.sample` does, and drops everything that is stored.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: `batch_size` is larger than what is stored.
            ReplayError: The transitions here are rollouts; take them from `rollouts`.
        """
        if self.rollouts.groups:
            raise ReplayError("the envs of this buffer were opened: take its rollouts")
        size = self.size()
        if batch_size is not None and not isinstance(self.sampler, AllDataSampler):
            if batch_size > size > 0:
                raise ValueError(f"a batch of {batch_size} from {size} stored transitions")
            if batch_size < size:
                logger.warning(
                    "%d of %d stored transitions are dropped unseen", size - batch_size, size
                )
        batches = super().sample(batch_size, shuffle, drop_last)
        self.clear()
        return batches

    def size(self) -> int:
        """Returns the number of stored transitions, also those of incomplete rollouts."""
        return super().size() + (self.rollouts.size if self.storages else 0)

    def clear(self) -> None:
        """Drops what is stored, but for rollouts that were taken; open episodes stay."""
        super().clear()
        if self.storages:
            self.rollouts.clear()

    def get_all(self) -> dict[str, Any]:
        """Returns copies of all stored transitions; {} if none ever was stored."""
        return self.rollouts.complete() if self._collects else super().get_all()

    def _read(self, storage: int, indices: int | Indices) -> dict[str, Any]:
        if not self._collects:
            return super()._read(storage, indices)
        columns = self.rollouts.complete()
        where = locate(indices, len(columns["reward"]) if columns else 0)
        taken: dict[str, Any] = map_arrays(lambda array: array[where], columns)
        return taken

    @property
    def _collects(self) -> bool:
        return bool(self.storages and self.rollouts.groups)

    @property
    def _size_keys(self) -> str:
        return "buffer.rollout_length, buffer.max_rollouts"

    def _alive(self) -> Collection[Group]:
        return {*self._groups.values(), *self.rollouts.alive()}

    def _storage_bytes(self, row_bytes: int) -> int:
        return 0  # nothing of the envs that are opened is stored there, and `sample` drops the rest

    def _opened(self, meta: EnvMeta) -> Group:
        return self.rollouts.open(meta)

    def _close(self, group: Group) -> None:
        if isinstance(group, RolloutGroup):
            self.rollouts.close(group.env_id)
        else:
            super()._close(group)

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items as `DataBuffer.prepare` does.

        Raises:
            InvalidRowError: One does not fit, or they are more than fit into all rollouts.
            KeyError: `open_group` was not called for this env, nor `init` with it.
        """
        most = self.config.rollout_length * self.config.max_rollouts
        if len(items) > most:
            raise InvalidRowError(f"{len(items)} items at once; the rollouts hold {most}")
        return super().prepare(env_id, items)

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether items can be stored before a rollout is released."""
        group = prepared.group
        if not isinstance(group, RolloutGroup):
            return True
        return self.rollouts.has_room(group, len(prepared.steps))

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items, and makes rollouts of what is complete."""
        super().commit(prepared)
        self.rollouts.form()
