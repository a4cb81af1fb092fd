"""Episodes that are still open: kept aside until they end, then moved into the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlightning.buffer.assembly import At, Group, Mask, Rows
from rlightning.buffer.checks import CheckedStep, Observed, Schema, Step
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.layout import Array, Layout, as_array, iter_arrays, map_arrays
from rlightning.errors import ReplayError, StorageFullError
from rlightning.types import EnvMeta

_FIRST_LENGTH = 64
_LAST_BYTES = 2 * 8  # what is kept of each row to find its last episode
# From so many bytes on, an episode is copied straight into the storage, without others.
_LARGE_BYTES = 64 * 1024

_SHIFTED = {
    "reward": "last_reward",
    "terminated": "last_terminated",
    "truncated": "last_truncated",
}


class _Finished(NamedTuple):
    """An episode that a function of the user makes transitions of."""

    steps: dict[str, Any]
    rows: Rows
    """The row that it is of; all rows if its values are [T, rows, ...]."""


class EpisodeGroup(Group):
    """The open episodes of one env, [length, rows, ...]; they are stored whole, row after row.

    The next observation of a transition mostly is the observation of the one after it, and is
    written only where it is not.

    Args:
        meta: What the env declared.
        container: Where finished episodes go.
        auto_truncate: Whether an episode is stored once the env has ended it; otherwise only a call
            of `cut` stores what has come.
        from_space: As in `Group`.
        postprocess_fn: In place of `default_postprocess_fn`; None for that. It gets the steps of
            one episode, [T, ...], or of all rows, [T, rows, ...], where they are ended together.
    """

    def __init__(
        self,
        meta: EnvMeta,
        container: DataContainer,
        *,
        auto_truncate: bool,
        from_space: bool = True,
        postprocess_fn: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(meta, _FIRST_LENGTH, from_space=from_space)
        self._container = container
        self._auto_truncate = auto_truncate
        self._postprocess_fn = postprocess_fn
        self._finished: list[_Finished] = []

    def _set_rows(self, rows: int) -> None:
        super()._set_rows(rows)
        # Which transitions since the start the last stored episode of each row consists of.
        self._last = np.zeros((2, rows), np.int64)
        # Which complete transitions have a next observation of their own, in its column.
        self._apart = np.zeros((self._length, rows), np.bool_)

    def nbytes_with(self, schema: Schema | None, length: int) -> int:
        """Returns the memory in bytes of rows that look like this, with columns of this length."""
        rows = self.rows if schema is None else schema.rows
        return super().nbytes_with(schema, length) + rows * (_LAST_BYTES + length)

    def check(self, step: Step, before: CheckedStep | None = None) -> CheckedStep:
        """Checks one item as `Group.check` does.

        Raises:
            InvalidRowError: It does not fit.
            ReplayError: An open episode has as many transitions as the storage holds.
        """
        if self.rows and self.highest >= self._container.capacity:
            raise ReplayError(
                f"env {self.env_id!r}: an open episode has reached the capacity of "
                f"{self._container.capacity} transitions; end it with truncate_one_episode, or set "
                "buffer.auto_truncate_episode"
            )
        return super().check(step, before)

    def apply(self, checked: CheckedStep) -> None:
        """Stores one item as `Group.apply` does.

        Raises:
            StorageFullError: It ends episodes for which the storage has no room; nothing was done.
            Exception: What the postprocess function raised; the item is stored, and the episode
                that it ended is lost.
        """
        new = checked.observed
        if new is not None and self._auto_truncate and self.rows and np.count_nonzero(new.done):
            rows = np.arange(self.rows) if new.rows is None else new.rows
            self._check_room(rows[new.done], more=1)
        super().apply(checked)
        self._store_finished()

    def cut(self, rows: Rows | None = None) -> int:
        """Ends open episodes as `Group.cut` does, and stores them.

        Raises:
            StorageFullError: The storage has no room for them; nothing was done.
            Exception: What the postprocess function raised; the episode is lost.
        """
        self._check_room(np.arange(self.rows) if rows is None else rows, more=0)
        count = super().cut(rows)
        self._store_finished()
        return count

    def pushes(self, steps: Sequence[CheckedStep]) -> int:
        """Returns how many transitions checked items will move into the container at most."""
        if not self.rows:
            return 0
        total, positions = 0, self.positions.copy()
        for step in steps:
            new = step.observed
            if new is not None:
                rows = np.arange(self.rows) if new.rows is None else new.rows
                positions[rows] += 1
                if self._auto_truncate:
                    total += self._taken_from(positions, rows[new.done])
            if step.cut_rows is not None:
                total += self._taken_from(positions, step.cut_rows)
        return total

    @staticmethod
    def _taken_from(positions: npt.NDArray[np.int64], rows: Rows) -> int:
        count = int(positions[rows].sum())
        positions[rows] = 0
        return count

    def discard(self) -> int:
        """Removes the open episodes of all rows, or the last stored ones if none is open."""
        opened = np.flatnonzero(self.opened() | (self.positions > 0))
        if len(opened):
            removed = int(self.positions[opened].sum())
            self._drop(opened)
            self._move(opened, 0)
        else:
            last, self._last = self._last, np.zeros_like(self._last)
            removed = sum(
                self._container.discard(first, count) for first, count in last.T.tolist() if count
            )
        self.counters.discarded += removed
        return removed

    def _check_room(self, rows: Rows, *, more: int) -> None:
        if self._container.mode == "fixed":
            count = int((self.positions[rows] + more).sum())
            room = self._container.room
            if count > room:
                raise StorageFullError(
                    f"env {self.env_id!r}: episodes of {count} transitions have ended, and the "
                    f"storage has room for {room} of {self._container.capacity}"
                )

    def _write_next(self, new: Observed, at: At, pick: Mask | None) -> None:
        """Writes next observations that will not be the observation of the transition after."""
        apart = shown = new.done
        if new.final is not None:
            apart, shown = apart.copy(), shown.copy()
            apart[new.final.positions] = True
            shown[new.final.positions] = False
        self._apart[self._index(at)] = apart if pick is None else apart[pick]
        mine = shown if pick is None else shown[pick]
        if np.count_nonzero(mine):
            rows = self._all[at][mine]
            chosen = shown if pick is None else shown & pick
            leaves = [array[chosen] for array in new.observation]
            self.columns["next_observation"].write((self.positions[rows], rows), leaves)
        if new.final is not None:
            self._write_final(new.final, at, pick)

    def _drop(self, rows: Rows) -> None:
        """Forgets what is pending of rows, but as the next observation of what is before it."""
        opened = rows[self.opened()[rows] & (self.positions[rows] > 0)]
        before = self.positions[opened] - 1
        alone = ~self._apart[before, opened]
        opened, before = opened[alone], before[alone]
        if len(opened):
            seen = self.columns["observation"].read((before + 1, opened))
            self.columns["next_observation"].write((before, opened), seen)
            self._apart[before, opened] = True
        super()._drop(rows)

    def _ended(self, rows: Rows) -> None:
        if self._auto_truncate:
            self._closed(rows)

    def _closed(self, rows: Rows) -> None:
        rows = rows[self.positions[rows] > 0]
        if not len(rows):
            return
        lengths = self.positions[rows].astype(np.intp)
        self._move(rows, 0)
        if self._postprocess_fn is not None:
            self._finished.extend(self._episodes_of(rows, lengths))
            return
        layouts = {name: column.layout for name, column in self.columns.items()}
        for part in self._parts(lengths):
            self._push_episodes(layouts, rows[part], lengths[part])

    def _parts(self, lengths: npt.NDArray[np.intp]) -> Iterator[slice]:
        """Yields which of several episodes are pushed together.

        Small ones are gathered; to gather large ones would only copy them once more.
        """
        count, total = len(lengths), int(lengths.sum())
        nbytes = total * sum(column.layout.nbytes for column in self.columns.values())
        if nbytes >= count * _LARGE_BYTES and self._container.takes_in_parts(total):
            yield from (slice(i, i + 1) for i in range(count))
        else:
            yield slice(count)

    def _push_episodes(
        self, layouts: Mapping[str, Layout], rows: Rows, lengths: npt.NDArray[np.intp]
    ) -> None:
        if len(rows) == 1:
            index: Any = (slice(int(lengths[0])), int(rows[0]))
            apart = self._apart[index]
            own: Any = (apart.nonzero()[0], index[1])
        else:  # row after row
            starts = np.cumsum(lengths) - lengths
            within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
            index = (within, np.repeat(rows, lengths))
            apart = self._apart[index]
            own = (within[apart], index[1][apart])
        columns = {
            name: column.read(own if name == "next_observation" else index)
            for name, column in self.columns.items()
        }
        self._push(layouts, columns, rows, lengths, apart)

    def _push(
        self,
        layouts: Mapping[str, Layout],
        columns: Mapping[str, list[Array]],
        rows: Rows,
        lengths: npt.NDArray[np.intp],
        apart: Mask | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        first = self._container.pushed_total
        self._container.push_flat(layouts, columns, lengths, apart, ahead=ahead)
        self._last[0, rows] = first + np.cumsum(lengths) - lengths
        self._last[1, rows] = lengths

    # With a postprocess function of the user. It is called when the group is in order again, so
    # that an error of it harms nothing else.

    def _episodes_of(self, rows: Rows, lengths: npt.NDArray[np.intp]) -> Iterator[_Finished]:
        length = int(lengths[0])
        whole = len(rows) == self.rows > 1 and not self._auto_truncate
        if whole and (lengths == length).all() and not self._breaks(slice(length - 1)).any():
            yield _Finished(self._steps(slice(length), slice(None)), rows)
            return
        for row, count in zip(rows.tolist(), lengths.tolist(), strict=True):
            ends = np.flatnonzero(self._breaks((slice(count), row)))
            bounds = [0, *(end + 1 for end in ends.tolist() if end + 1 < count), count]
            for begin, end in pairwise(bounds):
                yield _Finished(self._steps(slice(begin, end), row), np.array([row]))

    def _breaks(self, index: Any) -> Array:
        """Tells after which transitions an episode or segment ended."""
        columns = self.columns
        over = [
            np.logical_or(*flags)
            for flags in zip(
                columns["terminated"].read(index), columns["truncated"].read(index), strict=True
            )
        ]
        ended: Array = np.logical_and.reduce(over) | columns["cut"].read(index)[0]
        return ended

    def _steps(self, part: slice, row: Any) -> dict[str, Any]:
        """Returns the T steps that T - 1 transitions were made of, by name.

        What belongs to the answer of the last step, which no transition has, repeats the last one.
        """
        assert self.schema is not None
        steps: dict[str, Any] = {}
        outcomes = self.schema.outcomes
        for name, column in self.columns.items():
            if name == "next_observation" or name in outcomes.values():
                continue
            leaves = [leaf[:, row] for leaf in column.read(part)]
            if name in _SHIFTED:
                joined = [np.concatenate([np.zeros_like(leaf[:1]), leaf]) for leaf in leaves]
            elif name in outcomes:  # which has the field of all steps but the first
                firsts = [leaf[:1, row] for leaf in self.columns[outcomes[name]].read(part)]
                joined = [np.concatenate(pair) for pair in zip(firsts, leaves, strict=True)]
            else:
                source = self.columns["next_observation"] if name == "observation" else column
                last = [leaf[-1:, row] for leaf in source.read(part)]
                joined = [np.concatenate(pair) for pair in zip(leaves, last, strict=True)]
            value = column.layout.unflatten(joined)
            if not isinstance(value, np.ndarray):  # a nesting for each step
                value = [map_arrays(itemgetter(t), value) for t in range(len(joined[0]))]
            steps[_SHIFTED.get(name) or outcomes.get(name, name)] = value
        return steps

    def _store_finished(self) -> None:
        while self._finished:
            steps, rows = self._finished.pop(0)
            assert self._postprocess_fn is not None
            columns = dict(self._postprocess_fn(steps))
            for name in self._unstored():
                columns.pop(name, None)
            columns = map_arrays(lambda leaf: as_array(leaf, "postprocess_fn", text=True), columns)
            length = min((len(leaf) for leaf in iter_arrays(columns)), default=0)
            if not length:
                continue
            if len(rows) > 1:
                columns = by_env(columns)
            lead = (length * len(rows),)
            layouts = {
                name: Layout.of_value(value, name, lead=1) for name, value in columns.items()
            }
            flat = {name: layout.flatten(columns[name], lead) for name, layout in layouts.items()}
            # With n steps, flags are those of later ones.
            self._push(layouts, flat, rows, np.full(len(rows), length), ahead=True)

    def _unstored(self) -> set[str]:
        """Returns the outcomes that functions make but that are not stored beside older rows."""
        assert self.schema is not None
        names = self._container.names
        return (
            self.schema.derived().keys() - self.schema.outcomes.keys() - names if names else set()
        )

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
            more = np.zeros((length - len(self._apart), self.rows), np.bool_)
            self._apart = np.concatenate([self._apart, more])


def by_env(columns: Any) -> Any:
    """Returns columns [T, envs, ...] as [envs * T, ...], the transitions of one env together."""
    return map_arrays(
        lambda leaf: leaf.swapaxes(0, 1).reshape((-1, *leaf.shape[2:])),
        columns,
    )
