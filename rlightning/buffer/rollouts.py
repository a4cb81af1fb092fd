"""Rollouts: the same number of consecutive transitions from every row of every env."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.buffer.assembly import At, Group, Mask
from rlightning.buffer.checks import CheckedStep, Step
from rlightning.buffer.columns import Column
from rlightning.buffer.utils.layout import Array, Layout
from rlightning.errors import InvalidRowError
from rlightning.types import EnvMeta


class RolloutGroup(Group):
    """The rows of one env in a ring of rollouts.

    Rollout k of a row is its positions [k * length, (k + 1) * length). The ring holds one rollout
    more than may be kept, in which the pending transitions lie when all others are full, and what
    came with the last one of these.
    """

    def __init__(
        self, meta: EnvMeta, collector: RolloutCollector, *, from_space: bool = True
    ) -> None:
        ring = (collector.max_rollouts + 1) * collector.length
        start = collector.formed * collector.length
        super().__init__(meta, ring, start=start, from_space=from_space)
        self._collector = collector

    def check(self, step: Step, before: CheckedStep | None = None) -> CheckedStep:
        """Checks one item as `Group.check` does, also against the other envs' items.

        Raises:
            InvalidRowError: It does not fit.
        """
        checked = super().check(step, before)
        if checked.schema is not self.schema:
            for other in self._collector.groups.values():
                if other is self or other.schema is None:
                    continue
                if said := other.schema.difference(checked.schema):
                    raise InvalidRowError(f"{said}; env {other.env_id!r} shares the rollouts")
        return checked

    def _may_complete(self, at: At) -> Mask | None:
        end = self._collector.bound + self._collector.length - 1  # the last slot, for what pends
        return None if self.highest < end else self.positions[at] < end

    def _may_mark(self, positions: npt.NDArray[np.int64]) -> Mask | None:
        return positions >= self._collector.formed * self._collector.length

    def rewind(self, position: int) -> None:
        """Forgets the transitions from a position on; what is pending is pending there."""
        slots = self.positions % self._length
        for column in self.columns.values():
            column.write(position % self._length, column.read((slots, np.arange(self.rows))))
        self._move(np.arange(self.rows), position)
        self._tail[:] = False

    def window(self, index: int, *, plain: bool = False) -> dict[str, list[Array]]:
        """Returns the leaves of a complete rollout, [length, rows, ...], by column; views.

        Args:
            index: Number of the rollout.
            plain: As of `columns_of`.
        """
        length = self._collector.length
        slot = index * length % self._length
        return self._leaves(self.columns_of(plain=plain), slice(slot, slot + length))

    def columns_of(self, *, plain: bool) -> Mapping[str, Column]:
        """Returns the columns by name.

        Args:
            plain: Those of a rollout in which the policy's own actions were executed, whatever was
                since.
        """
        if not plain:
            return self.columns
        columns = dict(self.columns)
        columns["action"] = columns.pop("policy_action")
        return columns

    def complete(self) -> dict[str, list[Array]]:
        """Returns the leaves of all transitions that were not released, [n, ...], by column.

        They are copies, row after row.
        """
        start = max(self._collector.oldest * self._collector.length, self._start)
        counts = self.positions - start
        rows = np.repeat(np.arange(self.rows), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._leaves(self.columns, ((start + within) % self._length, rows))

    @staticmethod
    def _leaves(columns: Mapping[str, Column], index: Any) -> dict[str, list[Array]]:
        leaves = {name: column.read(index) for name, column in columns.items()}
        if "action" in leaves:  # without a column of its own, the policy's action was executed
            leaves.setdefault("policy_action", leaves["action"])
        return leaves


class Rollout:
    """One complete rollout; what it holds does not change until it is released.

    Args:
        index: Number of the rollout, from 0.
        groups: The envs in it.
        plain: Those of them whose columns are as of `RolloutGroup.columns_of`.

    Attributes:
        index: Number of the rollout.
        groups: As given; their columns live as long as this does, also after they were closed.
        env_ids: Ids of the envs, in the order of their rows.
        rows: Number of rows of each env.
        transitions: Number of transitions.
        nbytes: Size of the columns in bytes.
    """

    def __init__(
        self, index: int, groups: Sequence[RolloutGroup], plain: Collection[RolloutGroup] = ()
    ) -> None:
        self.index = index
        self.env_ids = [group.env_id for group in groups]
        self.rows = [group.rows for group in groups]
        self.groups = groups
        self._parts = [group.window(index, plain=group in plain) for group in groups]
        self._layouts = _layouts(groups, plain)
        self.transitions = len(self._parts[0]["step"][0]) * sum(self.rows)
        self.nbytes = sum(
            leaf.nbytes for part in self._parts for name in self._layouts for leaf in part[name]
        )

    def plain(self) -> list[RolloutGroup]:
        """Returns the envs that have a column for the policy's own actions only since it."""
        return [
            group
            for group, part in zip(self.groups, self._parts, strict=True)
            if "policy_action" in group.columns
            and np.may_share_memory(part["action"][0], group.columns["policy_action"].arrays[0])
        ]

    def columns(self, first: int = 0, stop: int | None = None) -> dict[str, Any]:
        """Returns the columns by name, [length, rows, ...]; read-only.

        They are views into the ring if they are of one env, which change once the rollout is
        released. Safe to call from another thread until then.

        Args:
            first: The first of the rows, which count over all envs.
            stop: The one after the last of them; None: all.
        """
        parts = []
        for part, (begin, end) in zip(self._parts, self.within(first, stop), strict=True):
            if end > begin:
                parts.append(
                    {name: [leaf[:, begin:end] for leaf in part[name]] for name in self._layouts}
                )
        return _merged(self._layouts, parts, axis=1)

    def within(self, first: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Returns which rows of each env are among rows [first, stop) of all of them."""
        stop = sum(self.rows) if stop is None else stop
        spans, offset = [], 0
        for rows in self.rows:
            begin, end = (min(max(edge - offset, 0), rows) for edge in (first, stop))
            spans.append((begin, end))
            offset += rows
        return spans


def _layouts(
    groups: Sequence[RolloutGroup], plain: Collection[RolloutGroup] = ()
) -> dict[str, Layout]:
    """Returns the layouts of the columns that any of the groups has."""
    return {
        name: column.layout
        for group in groups
        for name, column in group.columns_of(plain=group in plain).items()
    }


def _merged(
    layouts: Mapping[str, Layout], parts: Sequence[Mapping[str, list[Array]]], *, axis: int
) -> dict[str, Any]:
    """Joins the leaves of several groups, column by column; read-only."""
    columns = {}
    for name, layout in layouts.items():
        leaves = []
        for same in zip(*(part[name] for part in parts), strict=True):
            leaf = same[0] if len(same) == 1 else np.concatenate(same, axis=axis)
            leaf.flags.writeable = False
            leaves.append(leaf)
        columns[name] = layout.unflatten(leaves)
    return columns


class RolloutCollector:
    """Collects rollouts of several envs, and keeps them until they are released.

    A rollout is complete when each row of each env has `length` transitions in it. At most
    `max_rollouts` are kept, those under collection included: whoever inserts has to wait for
    `has_room`. Items that are stored together may pass that, by less than a rollout. Rows that run
    ahead of others of their own env, which no waiting would help, lose what goes beyond.

    Args:
        length: Transitions of each row in one rollout.
        max_rollouts: How many are kept at most.

    Attributes:
        groups: The envs whose rows make up a rollout, by id.
        formed: Number of rollouts completed so far.
    """

    def __init__(self, length: int, max_rollouts: int) -> None:
        self.length = length
        self.max_rollouts = max_rollouts
        self.groups: dict[str, RolloutGroup] = {}
        self.formed = 0
        self._ready: deque[Rollout] = deque()
        self._held: dict[int, Rollout] = {}

    @property
    def bound(self) -> int:
        """Position from which on nothing more is stored before a rollout is released."""
        return (self.oldest + self.max_rollouts) * self.length

    @property
    def oldest(self) -> int:
        """Number of the first rollout that was not released."""
        return min(self._held, default=self.formed)

    @property
    def ready(self) -> int:
        """Number of complete rollouts that nobody has taken."""
        return len(self._ready)

    @property
    def held(self) -> int:
        """Number of complete rollouts, those that were taken but not released included."""
        return len(self._held)

    @property
    def size(self) -> int:
        """Number of complete transitions that were not released."""
        start = self.formed * self.length
        collecting = sum(int((group.positions - start).sum()) for group in self.groups.values())
        return collecting + sum(rollout.transitions for rollout in self._held.values())

    def alive(self) -> set[RolloutGroup]:
        """Returns the envs whose columns exist, also removed ones that a rollout still needs."""
        held = (group for rollout in self._held.values() for group in rollout.groups)
        return {*self.groups.values(), *held}

    def open(self, meta: EnvMeta, *, from_space: bool = True) -> RolloutGroup:
        """Adds an env, whose rows the next rollout waits for; see `Group`."""
        group = RolloutGroup(meta, self, from_space=from_space)
        self.groups[group.env_id] = group
        return group

    def close(self, env_id: str) -> None:
        """Removes an env: what it has in the rollouts under collection is given up."""
        group = self.groups.pop(env_id)
        group.break_segment()
        group.counters.discarded += int((group.positions - self.formed * self.length).sum())
        self.form()

    def has_room(self, group: RolloutGroup) -> bool:
        """Tells whether a group can store a message now.

        True too where waiting would be in vain, since nothing can be released before rows of this
        very group have caught up with the others.
        """
        if not group.rows or group.highest < self.bound:
            return True
        return group.lowest < (self.oldest + 1) * self.length

    def form(self) -> None:
        """Makes a rollout of what is complete, as often as possible."""
        while self.groups:
            end = (self.formed + 1) * self.length
            for group in self.groups.values():
                if not group.rows or group.lowest < end:
                    return
            rollout = Rollout(self.formed, tuple(self.groups.values()))
            self._held[self.formed] = rollout
            self._ready.append(rollout)
            self.formed += 1

    def take(self) -> Rollout | None:
        """Returns the oldest rollout that nobody has taken; None if there is none."""
        return self._ready.popleft() if self._ready else None

    def give_back(self, rollout: Rollout) -> None:
        """Lets somebody else take a rollout that was taken and not used."""
        later = [other for other in self._ready if other.index > rollout.index]
        earlier = [other for other in self._ready if other.index < rollout.index]
        self._ready = deque([*earlier, rollout, *later])

    def release(self, rollout: Rollout) -> None:
        """Gives the room of a rollout that was taken to new ones."""
        self._held.pop(rollout.index, None)

    def release_ready(self, index: int) -> bool:
        """Releases a rollout by its number if it is ready; tells whether it was."""
        for rollout in self._ready:
            if rollout.index == index:
                self._ready.remove(rollout)
                self.release(rollout)
                return True
        return False

    def clear(self) -> int:
        """Drops all complete transitions but those of rollouts that were taken; returns how many.

        What is pending stays.
        """
        dropped = 0
        for rollout in self._ready:
            dropped += rollout.transitions
            del self._held[rollout.index]
        self._ready.clear()
        start = self.formed * self.length
        for group in self.groups.values():
            count = int((group.positions - start).sum())
            group.counters.discarded += count
            dropped += count
            group.rewind(start)
        return dropped

    def complete(self) -> dict[str, Any]:
        """Returns copies of all transitions that were not released, [n, ...]; {} if there are none.

        Those of envs that were removed meanwhile are not among them.
        """
        groups = [group for group in self.groups.values() if "reward" in group.columns]
        return _merged(_layouts(groups), [group.complete() for group in groups], axis=0)
