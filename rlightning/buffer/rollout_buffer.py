"""Rollouts: each transition is handed to the learner once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.rollout_storage import RolloutStorage
from rlightning.buffer.rollouts import RolloutCollector
from rlightning.buffer.sampler import AllDataSampler
from rlightning.buffer.where import Where
from rlightning.errors import ReplayError
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
    """

    @property
    def rollouts(self) -> RolloutCollector:
        """The rollouts of the envs that were opened.

        Raises:
            ReplayError: There are several storages, of which each has its own.
        """
        if len(self.storages) > 1:
            raise ReplayError("rollouts are collected in one storage, or in buffer servers")
        storage = self._get_storage()
        assert isinstance(storage, RolloutStorage)
        return storage.rollouts

    def _make_storage(
        self, env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None
    ) -> RolloutStorage:
        rollouts = RolloutCollector(self.config.rollout_length, self.config.max_rollouts)
        options = self._storage_options(env_meta_list)
        return RolloutStorage(self.config.capacity, rollouts=rollouts, **options)

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool | None = True,
        drop_last: bool | None = True,
        *,
        where: Where | None = None,
        out: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Draws a batch as `DataBuffer.sample` does, and drops everything that is stored.

        Of buffer servers it is their next rollout, [T, N, ...], with the rows of all of them; of
        several train workers each gets as many rows of its own, whatever `drop_last` says.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: `batch_size` is larger than what is stored.
            ReplayError: The transitions here are rollouts; take them from `rollouts`. Or the
                rows of a rollout of buffer servers do not divide by the number of train workers;
                nothing is lost: the next call gets it.
        """
        if self._remote is not None:
            return super().sample(batch_size, shuffle, drop_last, where=where, out=out)
        if any(storage.rollouts.groups for storage in self.storages.values()):
            raise ReplayError("the envs of this buffer were opened: take its rollouts")
        size = self.size()
        if batch_size is not None and not isinstance(self.sampler, AllDataSampler):
            if batch_size > size > 0:
                raise ValueError(f"a batch of {batch_size} from {size} stored transitions")
            if batch_size < size:
                logger.warning(
                    "%d of %d stored transitions are dropped unseen", size - batch_size, size
                )
        batches = super().sample(batch_size, shuffle, drop_last, where=where, out=out)
        self.clear()
        return batches
