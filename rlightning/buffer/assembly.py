"""Transitions out of what envs return and policies answer: the one place that pairs them.

Transition t of a row is observation t and the answer to it; EnvRet t+1 completes it with reward and
flags and with `next_observation`: its own observation, or the final one where the row ended an
episode and shows the first of the next one already. A transition is written where it will stay: the
pending one of each row lies in the slot that it keeps once it is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.buffer.checks import (
    CheckedStep,
    Final,
    Observed,
    Schema,
    Step,
    actions_differ,
    check_step,
)
from rlightning.buffer.columns import Column, Counters
from rlightning.buffer.utils.layout import Array, Layout
from rlightning.errors import InvalidRowError, ReplayError
from rlightning.types import EnvMeta

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
At = slice | Rows

_ALL = slice(None)

# States of a row: nothing pending; an observation; an observation and the answer to it.
_CLOSED, _OBSERVED, _ACTED = 0, 1, 2

# What a group keeps of each row beside its columns, in bytes; see `Group._set_rows`.
_ROW_STATE_BYTES = 4 * 8 + 2

_CUT = Layout.of_scalar("cut", np.bool_)
_SOURCE = Layout.of_scalar("action_source", np.int8)
_AGE = Layout.of_scalar("action_age", np.int32)
_VERSION = Layout.of_scalar("policy_version", np.int64)
_EPISODE = Layout.of_scalar("episode_id", np.int64)
_STEP = Layout.of_scalar("step", np.int64)


class Group:
    """The rows of one env: their transitions, the pending one of each row included.

    Columns have shape [length, rows, ...]. Each row is written at its own position, since rows may
    come one by one; the slot of a position is the position modulo the length. Not thread-safe.

    Args:
        meta: What the env declared.
        length: First axis of the columns.
        start: First position.
        from_space: Whether observations are those of the declared space, rather than what a
            preprocessor made of them.

    Attributes:
        env_id: Id of the env.
        meta: What it declared.
        schema: What its items look like; None before the first.
        columns: The stored fields by name.
        positions: Where each row's pending transition is or will be, int64 [rows].
        counters: What happened so far.
        nbytes: Memory that its rows and their columns may take, in bytes; the buffer counts it.

    Raises:
        ConfigError: Values of the declared space cannot be stored.
    """

    def __init__(
        self, meta: EnvMeta, length: int, *, start: int = 0, from_space: bool = True
    ) -> None:
        self.env_id = meta.env_id or ""
        self.meta = meta
        self.schema: Schema | None = None
        self.columns: dict[str, Column] = {}
        self.counters = Counters()
        self.nbytes = 0
        self._length = length
        self._start = start
        space = meta.observation_space if from_space else None
        self._declared = None if space is None else Layout.of_space(space, "observation")
        self._answers: At | None = None
        self._warned = False
        # Where the policy's action is written; `action` holds what was executed once that is told.
        self._own_action = "action"
        self._set_rows(meta.num_envs or 0)

    def _set_rows(self, rows: int) -> None:
        self._all = np.arange(rows)
        self.positions = np.full(rows, self._start, np.int64)
        # The position that all rows share, as they mostly do; None if they do not.
        self._level: int | None = self._start
        self._state = np.zeros(rows, np.int8)
        # Whether the last completed transition of a row is continued by its pending one.
        self._tail = np.zeros(rows, np.bool_)
        self._episode = np.zeros(rows, np.int64)
        self._step = np.zeros(rows, np.int64)
        self._next_episode = 0

    @property
    def rows(self) -> int:
        """Number of rows; 0 while it is not known."""
        return len(self._all)

    @property
    def lowest(self) -> int:
        """Position of the row that has got least far."""
        return int(self.positions.min()) if self._level is None else self._level

    @property
    def highest(self) -> int:
        """Position of the row that has got furthest."""
        return int(self.positions.max()) if self._level is None else self._level

    @property
    def declared(self) -> Layout | None:
        """Layout of one row's observation, if the env declared it."""
        return self._declared

    def nbytes_with(self, schema: Schema | None, length: int) -> int:
        """Returns the memory in bytes of rows that look like this, with columns of this length."""
        rows = self.rows if schema is None else schema.rows
        return rows * (_ROW_STATE_BYTES + length * self.row_bytes(schema))

    def row_bytes(self, schema: Schema | None) -> int:
        """Returns the size in bytes of a transition; without a schema what the env declared."""
        if schema is not None:
            return schema.row_bytes
        return 0 if self._declared is None else 2 * self._declared.nbytes

    def length_with(self, steps: int) -> int:
        """Returns the first axis that the columns have after so many more steps."""
        return self._length

    def _move(self, rows: Rows, positions: Any) -> None:
        """Sets the positions of some rows."""
        self.positions[rows] = positions
        first = int(self.positions[0])
        self._level = first if (self.positions == first).all() else None

    def check(self, step: Step, before: CheckedStep | None = None) -> CheckedStep:
        """Checks one item without changing anything.

        Args:
            step: The item.
            before: The item of the same message that will be applied first.

        Raises:
            InvalidRowError: It does not fit; the message names the field.
        """
        schema = self.schema if before is None else before.schema
        awaiting = 0
        if step.env_ret is None:
            if self._answers is None:
                raise InvalidRowError("a response, but no observation that waits for one")
            awaiting = len(self._all[self._answers])
        return check_step(
            step,
            schema,
            rows=self.meta.num_envs,
            declared=self._declared,
            awaiting=awaiting,
            action_space=self.meta.action_space,
        )

    def apply(self, checked: CheckedStep) -> None:
        """Stores one item that was checked against the present state."""
        self.schema = checked.schema
        if not len(self._all):
            self._set_rows(checked.schema.rows)
        if checked.observed is not None:
            self._make_room()
            self._observe(checked, checked.observed)
        if checked.outputs is not None:
            self._respond(checked, checked.outputs)
        if checked.cut_rows is not None:
            self.cut(checked.cut_rows)

    def cut(self, rows: Rows | None = None) -> int:
        """Ends open episodes from outside; returns how many.

        The last transition of each is marked as cut. The pending one is dropped: what followed is
        not known.

        Args:
            rows: Which rows; all if None.
        """
        chosen = self._all if rows is None else rows
        opened = chosen[self._state[chosen] != _CLOSED]
        self._break(opened)
        self.counters.cut += len(opened)
        self._closed(chosen)
        return len(opened)

    def discard(self) -> int:
        """Removes the open episodes of all rows, or the last stored ones if none is open.

        Returns:
            How many transitions were removed.

        Raises:
            ReplayError: What is kept of the env are rollouts, which have no episodes to remove.
        """
        raise ReplayError(f"env {self.env_id!r}: an episode cannot be taken out of rollouts")

    def opened(self) -> Mask:
        """Tells which rows have an observation that is not part of a complete transition."""
        opened: Mask = self._state != _CLOSED
        return opened

    def _drop(self, rows: Rows) -> None:
        """Forgets what is pending of rows."""
        self._tail[rows] = False
        self._state[rows] = _CLOSED

    def break_segment(self) -> None:
        """Joins nothing that comes to what is here: the writer is another, or lost an item."""
        opened = self._all[self._state != _CLOSED]
        if len(opened):
            self._break(opened)
            self.counters.lost += len(opened)
            self.counters.segments += 1
        self._answers = None

    # What a kind of storage decides.

    def _ended(self, rows: Rows) -> None:
        """Takes note that episodes ended with the transitions just completed."""

    def _closed(self, rows: Rows) -> None:
        """Takes note that the open episodes of rows were ended from outside."""

    def _make_room(self) -> None:
        """Lets every row write one transition more."""

    def _may_complete(self, at: At) -> Mask | None:
        """Tells which rows have room for a complete transition; None if all have."""
        return None

    def _may_mark(self, positions: npt.NDArray[np.int64]) -> Mask | None:
        """Tells which positions can still be changed; None if all can."""
        return None

    # The state machine. Rows are a slice for all of them, which numpy is fastest with, or numbers.

    def _observe(self, checked: CheckedStep, new: Observed) -> None:
        at = _ALL if new.rows is None else new.rows
        joined = self._joined(checked, new, at)
        episodes = self._episodes(new, at, joined)
        count = np.count_nonzero(joined)
        if count == new.count:
            self._complete(new, at, None)
        else:
            lost = self._all[at][(self._state[at] != _CLOSED) & ~joined]
            if len(lost):
                self._lose(lost, warn=not checked.new_segment)
            if count:
                self._complete(new, self._all[at][joined], joined)
        opens = None
        if np.count_nonzero(new.done):
            self._ended(self._all[at][new.done])
            opens = ~new.done
            if new.final is not None:
                opens[new.final.positions] = True
            if np.count_nonzero(opens) == new.count:
                opens = None
            else:
                self._state[self._all[at][~opens]] = _CLOSED
        self._open(checked.schema, new, at, opens, episodes)
        self._answers = at

    def _joined(self, checked: CheckedStep, new: Observed, at: At) -> Mask:
        """Tells whose pending transition this EnvRet completes."""
        joined: Mask = self._state[at] == _ACTED
        if checked.new_segment:
            joined[:] = False
        if new.episode_id is not None:
            continues = new.episode_id == self._episode[at]
            if new.step is not None:
                continues &= new.step == self._step[at] + 1
            if new.final is not None:  # these show the next episode already
                continues[new.final.positions] = True
            joined &= continues
        if new.executed is None and self._own_action != "action" and actions_differ(checked.schema):
            joined[:] = False  # what was executed is not known
        if (room := self._may_complete(at)) is not None:
            joined &= room
        return joined

    def _episodes(self, new: Observed, at: At, joined: Mask) -> tuple[Array, Array]:
        """Returns episode and step of each row's observation; counts where the env does not."""
        episode, step = new.episode_id, new.step
        if episode is not None and step is not None:
            return episode, step
        begins = ~joined
        if new.final is not None:
            begins[new.final.positions] = True
        if episode is None:
            episode = self._episode[at].copy()
            count = int(begins.sum())
            episode[begins] = np.arange(self._next_episode, self._next_episode + count)
            self._next_episode += count
        if step is None:
            step = self._step[at] + 1
            step[begins] = 0
        return episode, step

    def _lose(self, rows: Rows, *, warn: bool) -> None:
        self.counters.lost += len(rows)
        self.counters.segments += 1
        self._break(rows)
        if warn and not self._warned:
            self._warned = True
            logger.warning(
                "env %s: an observation of rows %s does not follow the one before it, or that was "
                "never answered; they are not joined (said once for each env)",
                self.env_id,
                rows[:8].tolist(),
            )

    def _break(self, rows: Rows) -> None:
        """Drops the pending transitions of rows and marks the completed ones before as cut."""
        tails = rows[self._tail[rows]]
        marked = self._may_mark(self.positions[tails] - 1)
        if marked is not None:
            tails = tails[marked]
        if len(tails):
            self.columns["cut"].fill(((self.positions[tails] - 1) % self._length, tails), True)
        self._drop(rows)

    def _complete(self, new: Observed, at: At, pick: Mask | None) -> None:
        """Completes the pending transitions of rows, which are `pick` among those of the EnvRet."""
        columns = self.columns
        assert self.schema is not None
        if "reward" not in columns:
            self._allocate_results(self.schema)
        index = self._index(at)
        columns["reward"].write(index, _picked(new.reward, pick))
        columns["terminated"].write(index, _picked(new.terminated, pick))
        columns["truncated"].write(index, _picked(new.truncated, pick))
        columns["cut"].fill(index, False)
        for outcome, name in self.schema.outcomes.items():
            columns[outcome].write(index, _picked(new.extras[name], pick))
        self._write_next(new, at, pick)
        source = new.action_source
        if isinstance(source, int):
            columns["action_source"].fill(index, source)
        else:
            columns["action_source"].write(index, _picked([source], pick))
        if new.action_age is not None:
            columns["action_age"].fill(index, new.action_age)
        if new.executed is not None or self._own_action != "action":
            self._write_executed(self.schema, new.executed, index, pick)
        self._tail[at] = ~(new.done if pick is None else new.done[pick])
        if at is _ALL and self._level is not None:
            self.positions += 1
            self._level += 1
        else:
            self._move(self._all[at], self.positions[at] + 1)
        self.counters.completed += new.count if pick is None else len(self._all[at])

    def _write_next(self, new: Observed, at: At, pick: Mask | None) -> None:
        """Writes the next observations of rows, which are `pick` among those of the EnvRet."""
        self.columns["next_observation"].write(self._index(at), _picked(new.observation, pick))
        if new.final is not None:
            self._write_final(new.final, at, pick)

    def _allocate_results(self, schema: Schema) -> None:
        agents = schema.agents
        self._allocate("reward", Layout.of_scalar("reward", np.float32, agents))
        self._allocate("terminated", Layout.of_scalar("terminated", np.bool_, agents))
        self._allocate("truncated", Layout.of_scalar("truncated", np.bool_, agents))
        self._allocate("cut", _CUT)
        for outcome, name in schema.outcomes.items():
            self._allocate(outcome, schema.extras[name])
        self._allocate("next_observation", schema.observation)
        self._allocate("action_source", _SOURCE)
        if schema.aged:
            self._allocate("action_age", _AGE)

    def _write_final(self, final: Final, at: At, pick: Mask | None) -> None:
        """Replaces the next observation of rows that show the next episode already."""
        positions, arrays = final
        if pick is not None:
            kept = pick[positions]
            positions = (np.cumsum(pick) - 1)[positions[kept]]
            arrays = [array[kept] for array in arrays]
        ended = self._all[at][positions]
        index = (self.positions[ended] % self._length, ended)
        self.columns["next_observation"].write(index, arrays)

    def _write_executed(
        self, schema: Schema, executed: list[Array] | None, index: Any, pick: Mask | None
    ) -> None:
        """Stores what was executed as `action`, and the policy's own beside it."""
        columns = self.columns
        if self._own_action == "action":
            self._own_action = "policy_action"
            if "action" in columns:
                columns["policy_action"] = columns.pop("action")
            assert schema.executed is not None
            self._allocate("action", schema.executed)
            if not actions_differ(schema):  # up to here, the policy's own was executed
                columns["action"].write((), columns["policy_action"].arrays)
        if executed is None:
            columns["action"].write(index, columns["policy_action"].read(index))
        else:
            columns["action"].write(index, _picked(executed, pick))

    def _open(
        self,
        schema: Schema,
        new: Observed,
        at: At,
        pick: Mask | None,
        episodes: tuple[Array, Array],
    ) -> None:
        """Writes observations that wait for an answer: all that came, or `pick` among them."""
        columns = self.columns
        if "observation" not in columns:
            self._allocate("observation", schema.observation)
            for name, layout in schema.extras.items():
                self._allocate(name, layout)
            self._allocate("episode_id", _EPISODE)
            self._allocate("step", _STEP)
        if pick is not None:
            at = self._all[at][pick]
        episode, step = _picked(episodes, pick)
        index = self._index(at)
        columns["observation"].write(index, _picked(new.observation, pick))
        for name, arrays in new.extras.items():
            columns[name].write(index, _picked(arrays, pick))
        columns["episode_id"].fill(index, episode)
        columns["step"].fill(index, step)
        self._episode[at] = episode
        self._step[at] = step
        self._state[at] = _OBSERVED

    def _respond(self, checked: CheckedStep, outputs: dict[str, list[Array]]) -> None:
        """Writes the answers to the observations that came last."""
        assert self._answers is not None
        at, self._answers = self._answers, None
        waits = self._state[at] == _OBSERVED
        pick = None
        if np.count_nonzero(waits) < len(waits):
            at, pick = self._all[at][waits], waits  # others saw the last of an episode
        columns = self.columns
        if "policy_version" not in columns:
            assert checked.schema.outputs is not None
            for name, layout in checked.schema.outputs.items():
                self._allocate(name, layout)
            self._allocate("policy_version", _VERSION)
        index = self._index(at)
        for name, arrays in outputs.items():
            column = self._own_action if name == "action" else name
            columns[column].write(index, _picked(arrays, pick))
        columns["policy_version"].fill(index, checked.policy_version)
        self._state[at] = _ACTED

    def _allocate(self, name: str, layout: Layout) -> None:
        self.columns[name] = Column(layout, (self._length, self.rows))

    def _index(self, at: At) -> Any:
        """Returns where the pending transitions of rows are; one plain slot if all share it."""
        if at is _ALL and self._level is not None:
            return self._level % self._length
        return self.positions[at] % self._length, self._all[at]


def _picked(arrays: Sequence[Array], pick: Mask | None) -> Sequence[Array]:
    """Returns the picked rows of each array."""
    return arrays if pick is None else [array[pick] for array in arrays]
