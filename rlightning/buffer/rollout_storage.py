"""A storage whose opened envs make rollouts; others are stored as their episodes end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlightning.buffer.assembly import Group
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rollouts import RolloutCollector, RolloutGroup
from rlightning.buffer.utils.indexing import Index, locate
from rlightning.buffer.utils.layout import Layout, iter_arrays, map_arrays
from rlightning.buffer.utils.storage import Prepared, Storage
from rlightning.errors import InvalidRowError
from rlightning.types import EnvMeta


class RolloutStorage(Storage):
    """Rollouts of the envs that were opened, and the episodes of others.

    Args:
        capacity: As of `Storage`, for what is not part of a rollout.
        rollouts: Collects the rollouts of the envs that are opened.
        **options: As of `Storage`.
    """

    def __init__(self, capacity: int, *, rollouts: RolloutCollector, **options: Any) -> None:
        super().__init__(capacity, **options)
        self.rollouts = rollouts

    def get_size(self) -> int:
        """Returns the number of transitions, also those of incomplete rollouts."""
        return super().get_size() + self.rollouts.size

    def num_transitions(self) -> int:
        """Returns the number of transitions, also those of incomplete rollouts."""
        return super().num_transitions() + self.rollouts.size

    def clear(self) -> None:
        """Drops what is stored, but for rollouts that were taken; open episodes stay."""
        super().clear()
        self.rollouts.clear()

    def _get_columns(self) -> dict[str, Any]:
        return self.rollouts.complete() if self.rollouts.groups else super()._get_columns()

    def read(self, index: Index) -> Any:
        """Returns copies of what is stored; see `DataContainer.read`."""
        if not self.rollouts.groups:
            return super().read(index)
        columns = self.rollouts.complete()
        size = len(next(iter_arrays(columns["reward"]))) if columns else 0
        where = locate(index, size)
        return map_arrays(lambda array: array[where], columns)

    @property
    def _size_keys(self) -> str:
        return "buffer.rollout_length, buffer.max_rollouts"

    def _alive(self) -> Collection[Group]:
        return {*self._groups.values(), *self.rollouts.alive()}

    def _storage_bytes(self, row_bytes: int, observation: Layout | None) -> int:
        return 0  # nothing of the envs that are opened is stored there, and `sample` drops the rest

    def _opened(self, meta: EnvMeta) -> Group:
        return self.rollouts.open(meta, from_space=self._pipeline.from_space)

    def _close(self, group: Group) -> None:
        if isinstance(group, RolloutGroup):
            self.rollouts.close(group.env_id)
        else:
            super()._close(group)

    @property
    def max_items(self) -> int:
        """How many items can be stored together at most: what a rollout takes."""
        return self.rollouts.length

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items as `Storage.prepare` does.

        Raises:
            InvalidRowError: One does not fit, or they are more than `max_items`.
            KeyError: `open_group` was not called for this env, nor `init` with it.
        """
        if len(items) > self.max_items:
            raise InvalidRowError(f"{len(items)} items at once; a rollout takes {self.max_items}")
        return super().prepare(env_id, items)

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether items can be stored before a rollout is released."""
        group = prepared.group
        return not isinstance(group, RolloutGroup) or self.rollouts.has_room(group)

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items, and makes rollouts of what is complete."""
        super().commit(prepared)
        self.rollouts.form()
