"""A ring of transitions in columns that are allocated once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.fitting import (
    as_columns,
    as_lengths,
    count_of,
    ends_of,
    mismatch,
    with_next_observations,
    with_policy_action,
    with_policy_layout,
)
from rlightning.buffer.utils.frozen import before_write
from rlightning.buffer.utils.layout import Array, Layout
from rlightning.buffer.utils.observations import Place
from rlightning.buffer.utils.stored_rows import StoredRows
from rlightning.buffer.utils.watcher import Slots
from rlightning.errors import InvalidRowError, ReplayError, StorageFullError

logger = logging.getLogger(__name__)


class DataContainer(StoredRows):
    """Columns of `capacity` transitions; nested values keep their structure.

    The first push fixes names, dtypes and shapes. Memory is allocated then, and kept by `clear`. An
    observation is stored once, see `Observations`. Not thread-safe.

    Args:
        capacity: Transitions that it holds.
        mode: When it is full, `circular` overwrites, `fixed` refuses more.
        unit: What is indexed: transitions, or whole episodes, which are never split at the end of
            the ring, so that its last slots may stay empty.
        device: Only "cpu": columns are numpy arrays.
        frame_stack: As of `Observations`.
        removal: What `circular` overwrites: the oldest transitions (`fifo`), the newest (`lifo`),
            or those that the watcher calls lowest (`priority`).
        compression: As of `Observations`.

    Attributes:
        capacity: Transitions that it holds at most.
        pointer: Slot that is written next.
        data_use_counter: How often each slot was read, int32 [capacity]; -1 where it is empty.
        generation: Which transition since the start each slot held last, int64 [capacity] from the
            first push on.
        pushed_total: Transitions pushed since the start.
        changes: How often something was written or removed.
        episode_registry: Where the episodes are, with unit `episode`.
        watcher: Who is told of new and released slots; None for nobody.

    Raises:
        ConfigError: Another device than the CPU.
    """

    # Writing.

    def takes_in_parts(self, count: int) -> bool:
        """Tells whether so many transitions replace the same ones if they are pushed in parts."""
        return self._removal == "fifo" and count <= self.capacity

    def push(self, data: Any, lengths: Sequence[int] | None = None) -> None:
        """Appends transitions of one episode; copies them.

        Args:
            data: Values by name, each leaf [n, ...] with one n; or a list of such, pushed in order.
            lengths: Number of transitions of each of several episodes, one after the other.

        Raises:
            InvalidRowError: They differ in length, or do not fit what is stored already.
            StorageFullError: Mode `fixed`, and they do not fit; nothing was stored.
            TypeError: `data` is something else.
        """
        if isinstance(data, (list, tuple)):
            for part in data:
                self.push(part)
            return
        data = as_columns(data)
        lead = (count_of(data),)
        if data.keys() == self._layouts.keys():
            try:
                flat = {
                    name: mine.flatten(data[name], lead) for name, mine in self._layouts.items()
                }
            except InvalidRowError:
                pass  # said below, or the schema is another now
            else:
                self.push_flat(self._layouts, flat, as_lengths(lengths))
                return
        layouts = {name: Layout.of_value(value, name, lead=1) for name, value in data.items()}
        flat = {name: layout.flatten(data[name], lead) for name, layout in layouts.items()}
        self.push_flat(layouts, flat, as_lengths(lengths))

    def push_flat(
        self,
        layouts: Mapping[str, Layout],
        columns: Mapping[str, list[Array]],
        lengths: Slots | None = None,
        apart: npt.NDArray[np.bool_] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """Appends transitions that are in the order of their layouts' leaves; see `push`.

        Args:
            layouts: What the columns look like, by name.
            columns: The arrays of the leaves.
            lengths: As of `push`.
            apart: Which of them, [n], have a next observation that is not the observation of the
                next of them: only these are in its column. None: all are.
            ahead: Whether flags may be those of later steps; see `ends_of`.
        """
        count = len(next(iter(columns.values()))[0])
        if count == 0:
            return
        if self.mode == "fixed" and self._used + count > self.capacity:
            raise StorageFullError(
                f"{count} transitions for a storage that holds {self._used} of {self.capacity}"
            )
        self._check(layouts)
        columns = with_policy_action(columns, self._layouts)
        if apart is not None and (self._observations is None or count > self.capacity):
            columns, apart = with_next_observations(columns, apart), None
        if lengths is not None:
            lengths = lengths[lengths > 0]
        ends = ends_of(columns, count, lengths, ahead=ahead)
        if self.unit == "transition":
            self._write(self._place(count), columns, count, ends, apart)
        else:
            if apart is not None:
                columns = with_next_observations(columns, apart)
            parts = np.array([count]) if lengths is None else lengths
            for place in self._episode_places(count, parts):
                self._write(place, columns, count, ends)
        self.pushed_total += count

    def _place(self, count: int) -> Place:
        """Returns where new transitions go, having emptied the place."""
        skipped = 0
        if count > self.capacity:
            skipped = count - self.capacity
            said = "%d transitions at once for a storage of %d: the oldest are dropped"
            logger.warning(said, count, self.capacity)
        start = 0 if skipped else self.pointer
        kept = count - skipped
        over = self._used + kept - self.capacity
        if over > 0 and not skipped and self._removal != "fifo":
            slots = np.concatenate([np.arange(self._used, self.capacity), self._victims(over)])
            place = Place.of(slots, slice(0, count), self.capacity)
        else:
            place = Place.run(start, slice(skipped, count), self.capacity)
            self.pointer = (start + kept) % self.capacity
        if over <= 0 and not self._holes:
            pass  # the slots were never used, or are empty since
        elif self._holes or over < kept:
            held = place.slots[self.data_use_counter[place.where] >= 0]
            if len(held):
                self._vacate(held)
        else:
            self._vacate(place.where)
        self._used = self.capacity if over > 0 else self._used + kept
        return place

    def _victims(self, count: int) -> Slots:
        """Returns which slots are written anew: what was discarded makes room before all others."""
        rows = self.data_use_counter[: self._used] >= 0
        empty = np.flatnonzero(~rows)[:count]
        count -= len(empty)
        if not count:
            return empty
        if self._removal == "lifo":
            held = np.flatnonzero(rows)
            rest = len(held) - count
            chosen = held[np.argpartition(self.generation[held], rest - 1)[rest:]]
        elif self.watcher is None:
            raise ReplayError("removal by priority needs a prioritised sampler")
        else:
            chosen = self.watcher.lowest(count)
        return np.sort(np.concatenate([empty, chosen]))

    def _episode_places(self, count: int, lengths: Slots) -> Iterator[Place]:
        """Yields where episodes go, having emptied the place; they are written before the next."""
        if count > self.capacity:
            from_end = np.cumsum(lengths[::-1])
            whole = int(np.searchsorted(from_end, self.capacity, side="right"))
            lengths = lengths[len(lengths) - whole :] if whole else np.array([self.capacity])
            said = "%d transitions at once for a storage of %d: the last %d are kept"
            logger.warning(said, count, self.capacity, lengths.sum())
        row = count - int(lengths.sum())
        while len(lengths):
            fit = int(np.searchsorted(np.cumsum(lengths), self.capacity - self.pointer, "right"))
            if not fit:
                self._drop_episodes(self.pointer, self.capacity)
                self.pointer = 0
                continue
            size = int(lengths[:fit].sum())
            self._drop_episodes(self.pointer, self.pointer + size)
            self.episode_registry.append(self.pointer, lengths[:fit])
            place = Place.run(self.pointer, slice(row, row + size), self.capacity)
            self.pointer += size
            self._used = max(self._used, self.pointer)
            yield place
            row, lengths = row + size, lengths[fit:]

    def _drop_episodes(self, start: int, stop: int) -> None:
        self._release(self.episode_registry.drop_overlapping(start, stop))

    def _vacate(self, where: slice | Slots) -> None:
        """Lets slots that hold rows be written anew, at least one; they are given as of `Place`."""
        if self._observations is not None:
            self._observations.forget(where, self.data_use_counter)
        self._follows[where.start - 1 if type(where) is slice else where - 1] = False

    def _release(self, slots: Slots) -> None:
        """Empties slots that hold rows."""
        if not len(slots):
            return
        self._vacate(slots)
        self.changes += 1
        self.data_use_counter[slots] = -1
        self._follows[slots] = False
        if self.watcher is not None:
            self.watcher.released(slots)

    def _write(
        self,
        place: Place,
        columns: Mapping[str, list[Array]],
        count: int,
        ends: npt.NDArray[np.bool_] | None,
        own: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        where, rows, breaks = place
        if self._has_text:
            columns = {
                name: [self._texts.put(new) if new.dtype.kind == "O" else new for new in leaves]
                for name, leaves in columns.items()
            }
        kept = rows.stop - rows.start
        if kept < count:
            ends = None if ends is None else ends[rows]
            columns = {name: [leaf[rows] for leaf in leaves] for name, leaves in columns.items()}
        first = self.pushed_total + rows.start
        self.generation[where] = np.arange(first, first + kept)
        for name, mine in self._arrays.items():
            before_write(mine, where)
            if len(mine) == 1:
                mine[0][where] = columns[name][0]
                continue
            for array, new in zip(mine, columns[name], strict=True):
                array[where] = new
        if ends is None:
            ends = breaks
        elif breaks is not None:
            ends = breaks | ends
        if self._observations is not None:
            # Episodes are dropped whole, transitions one by one.
            apart = ends if self.unit == "episode" else breaks
            pair = (columns["observation"], columns["next_observation"])
            self._observations.write(place, *pair, apart, own)
        self.changes += 1
        self.data_use_counter[where] = 0
        self._follows[where] = True if ends is None else ~ends
        self._follows[place.last] = False
        if self._holes:
            self._holes = self._used - int((self.data_use_counter[: self._used] >= 0).sum())
        self._valid = None
        if self._has_text and self._texts.sweep_is_due:
            self._texts.sweep(self._text_ids())
        if self.watcher is not None:
            self.watcher.wrote(place.slots)

    def _check(self, layouts: Mapping[str, Layout]) -> None:
        """Makes the columns fit what comes, or refuses it."""
        if layouts is self._layouts or layouts is self._fitting:
            return
        if not self._layouts or (
            not self.size and mismatch(self._layouts, with_policy_layout(layouts, self._layouts))
        ):
            self._allocate(layouts)
            return
        if "policy_action" in layouts and "policy_action" not in self._layouts:
            # Up to here, the policy's own action was executed everywhere.
            self._layouts["policy_action"] = self._layouts["action"]
            self._arrays["policy_action"] = [array.copy() for array in self._arrays["action"]]
        if said := mismatch(self._layouts, with_policy_layout(layouts, self._layouts)):
            raise InvalidRowError(said)
        self._fitting = layouts

    # Removing.

    def discard(self, first: int, count: int) -> int:
        """Removes an episode; returns how many transitions of it were still there.

        Args:
            first: Its first transition, counted since the start.
            count: How many transitions it has.
        """
        mine = (self.generation >= first) & (self.generation < first + count)
        slots = np.flatnonzero(mine & (self.data_use_counter >= 0))
        if self.unit == "episode":
            slots = self.episode_registry.drop_at(int(slots[0])) if len(slots) else slots
            self._release(slots)
            if self.mode == "fixed":  # the slots at the end can be written next
                registry = self.episode_registry
                self._used = self.pointer = int((registry.starts + registry.lengths).max(initial=0))
        else:
            self.remove(slots)
        return len(slots)

    def remove(self, slots: Slots) -> None:
        """Removes single transitions, with unit `transition`.

        Args:
            slots: Where they are; each holds one.
        """
        self._release(slots)
        if not len(slots):
            return
        self._holes += len(slots)
        self._valid = None
        if self._used < self.capacity or self.mode == "fixed":
            # Nothing came after those at the end, so that their slots can be written next.
            alive = np.flatnonzero(self.data_use_counter[: self._used] >= 0)
            used = int(alive[-1]) + 1 if len(alive) else 0
            self._holes -= self._used - used
            self._used = self.pointer = used

    def clear(self) -> None:
        """Drops all transitions; the memory stays allocated."""
        self._used = self.pointer = self._holes = 0
        self.changes += 1
        self._valid = None
        self.episode_registry.clear()
        self.data_use_counter.fill(-1)
        self._follows.fill(False)
        if self._observations is not None:
            self._observations.clear()
        if self.watcher is not None:
            self.watcher.released(np.arange(self.capacity))
