"""A ring of transitions in columns that are allocated once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.compressed import Codec
from rlightning.buffer.utils.episode_registry import EpisodeRegistry, ranges
from rlightning.buffer.utils.fitting import (
    as_columns,
    as_lengths,
    count_of,
    ends_of,
    mismatch,
    outputs,
    stored_leaf,
    window,
    with_next_observations,
    with_policy_action,
    with_policy_layout,
)
from rlightning.buffer.utils.frozen import before_write
from rlightning.buffer.utils.indexing import Index, locate
from rlightning.buffer.utils.layout import (
    Array,
    Layout,
    map_arrays,
)
from rlightning.buffer.utils.observations import Observations, Place
from rlightning.buffer.utils.texts import Texts
from rlightning.buffer.utils.watcher import Slots, Watcher
from rlightning.errors import ConfigError, InvalidRowError, ReplayError, StorageFullError

logger = logging.getLogger(__name__)

Mode = Literal["circular", "fixed"]
Unit = Literal["transition", "episode"]
Removal = Literal["fifo", "lifo", "priority"]

USE_BYTES = 4
"""What is kept for each transition before the first one is stored, in bytes."""

_OWN_BYTES = USE_BYTES + 8 + 1  # afterwards also its generation, and whether another follows

_NO_SLOTS = np.zeros(0, np.intp)


class DataContainer:
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

    def __init__(
        self,
        capacity: int,
        mode: Mode = "circular",
        unit: Unit = "transition",
        device: str = "cpu",
        *,
        frame_stack: Mapping[str, int] | None = None,
        removal: Removal = "fifo",
        compression: Mapping[str, Codec] | None = None,
    ) -> None:
        if device != "cpu":
            raise ConfigError(f"storage.device: {device!r} is not supported, only 'cpu' is")
        self.capacity = capacity
        self.mode = mode
        self.unit = unit
        self.pointer = 0
        self.pushed_total = 0
        self.changes = 0
        self.data_use_counter = np.full(capacity, -1, np.int32)
        self.generation = np.zeros(0, np.int64)  # allocated with the columns
        self.episode_registry = EpisodeRegistry()
        self.watcher: Watcher | None = None
        self._frame_stack = frame_stack
        self._compression = compression
        self._removal = removal
        self._used = 0  # slots [0, used) are in use, but for holes: what was discarded
        self._holes = 0
        self._valid: Slots | None = None
        # Whether the row in the next slot is the next of the same episode.
        self._follows = np.zeros(0, np.bool_)
        self._layouts: dict[str, Layout] = {}
        self._arrays: dict[str, list[Array]] = {}
        self._observations: Observations | None = None
        self._texts = Texts()
        self._has_text = False

    @property
    def size(self) -> int:
        """Transitions that it holds."""
        if self.unit == "episode":
            return int(self.episode_registry.lengths.sum())
        return self._used - self._holes

    def __len__(self) -> int:
        return len(self.episode_registry) if self.unit == "episode" else self.size

    @property
    def pushed_units(self) -> int:
        """Transitions or episodes pushed since the start."""
        return self.episode_registry.total if self.unit == "episode" else self.pushed_total

    @property
    def room(self) -> int:
        """Transitions that can be pushed before some are overwritten or refused."""
        return self.capacity - self._used

    @property
    def nbytes(self) -> int:
        """Memory that it has allocated, in bytes."""
        arrays = sum(array.nbytes for arrays in self._arrays.values() for array in arrays)
        pair = 0 if self._observations is None else self._observations.nbytes
        own = (self.data_use_counter, self.generation, self._follows)
        texts = self._texts.nbytes if self._has_text else 0
        return sum(array.nbytes for array in own) + arrays + pair + texts

    @property
    def pooled_bytes(self) -> int:
        """Memory that grows with what comes, in bytes.

        Of observations that could not be stored with their neighbours, of those that are
        compressed, and of text.
        """
        texts = self._texts.nbytes if self._has_text else 0
        return texts + (0 if self._observations is None else self._observations.pooled_bytes)

    @property
    def row_bytes(self) -> int:
        """Size of one transition as it is read, in bytes; 0 before the first push."""
        return sum(layout.nbytes for layout in self._layouts.values())

    def nbytes_with(self, row_bytes: int, observation: Layout | None = None) -> int:
        """Returns the memory in bytes that it takes for transitions of so many bytes as read.

        Args:
            row_bytes: Size of a transition with both of its observations.
            observation: What an observation looks like; None if there is none.
        """
        if observation is not None:
            row_bytes -= 2 * observation.nbytes
            kept = observation.map(stored_leaf) if observation.has_text else observation
            row_bytes += Observations.row_bytes(kept, self._frame_stack, self._compression)
        return self.capacity * (_OWN_BYTES + row_bytes)

    # Writing.

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
    ) -> None:
        """Appends transitions that are in the order of their layouts' leaves; see `push`.

        Args:
            layouts: What the columns look like, by name.
            columns: The arrays of the leaves.
            lengths: As of `push`.
            apart: Which of them, [n], have a next observation that is not the observation of the
                next of them: only these are in its column. None: all are.
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
        ends = ends_of(columns, count, lengths)
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
        if self._removal == "lifo":
            rest = self._used - count
            return np.sort(np.argpartition(self.generation[: self._used], rest - 1)[rest:])
        if self.watcher is None:
            raise ReplayError("removal by priority needs a prioritised sampler")
        return self.watcher.lowest(count)

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
        if layouts is self._layouts:
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

    def _allocate(self, layouts: Mapping[str, Layout]) -> None:
        self._has_text = any(layout.has_text for layout in layouts.values())
        own = {name: layout.map(stored_leaf) for name, layout in layouts.items()}
        now, after = own.get("observation"), own.get("next_observation")
        self._observations, self._texts = None, Texts()
        if now is not None and after is not None and now.difference(after) is None:
            self._observations = Observations(
                now, self.capacity, self._frame_stack, self._compression
            )
            del own["observation"], own["next_observation"]
        self.generation = np.full(self.capacity, -1, np.int64)
        self._follows = np.zeros(self.capacity, np.bool_)
        self._layouts = dict(layouts)
        self._arrays = {name: layout.allocate((self.capacity,)) for name, layout in own.items()}

    def _text_ids(self) -> Iterator[Array]:
        """Yields the arrays that hold numbers of texts."""
        for name, layout in self._layouts.items():
            for i, leaf in enumerate(layout.leaves):
                if not leaf.text:
                    continue
                if name in self._arrays:
                    yield self._arrays[name][i]
                elif self._observations is not None and name == "observation":
                    yield from self._observations.arrays_of(i)

    # Reading.

    def read(self, index: Index) -> Any:
        """Returns copies of what is stored, in the order of the index.

        Args:
            index: An int, a slice, or a sequence, array or tensor of ints, which count transitions
                or episodes; negative ones count from the end of what is stored.

        Returns:
            Columns by name. Leaves of a transition are [...], of several [n, ...]; of an episode
            [T, ...], of several of one length [n, T, ...]. For episodes of several lengths a list
            of one dict for each.

        Raises:
            IndexError: Nothing is stored there.
            TypeError: Another kind of index.
        """
        where = locate(index, len(self), f"{self.unit}s")
        if self.unit == "episode":
            return self._read_episodes(where)
        if isinstance(where, int):
            one = self.read_slots(self.slots_of(np.array([where])))
            return map_arrays(itemgetter((0, ...)), one)
        return self.read_slots(self.slots_of(where))

    def _read_episodes(self, where: int | Slots) -> Any:
        registry = self.episode_registry
        if isinstance(where, int):
            start = int(registry.starts[where])
            return self.read_slots(np.arange(start, start + int(registry.lengths[where])))
        starts, lengths = registry.starts[where], registry.lengths[where]
        if len(lengths) and (lengths == lengths[0]).all():
            return self.read_slots(starts[:, np.newaxis] + np.arange(lengths[0]))
        return [
            self.read_slots(np.arange(start, start + length))
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]

    def slots_of(self, positions: Slots) -> Slots:
        """Returns the slots of transitions by position among what is stored."""
        if not self._holes:
            return positions
        if self._valid is None:
            self._valid = np.flatnonzero(self.data_use_counter[: self._used] >= 0)
        return self._valid[positions]

    def generation_of(self, positions: Slots) -> npt.NDArray[np.int64]:
        """Returns which transitions since the start are at positions, int64."""
        return self.generation.take(self.slots_of(positions))

    def positions_of(self, slots: Slots) -> Slots:
        """Returns the positions of stored transitions by slot."""
        if not self._holes:
            return slots
        self.slots_of(_NO_SLOTS)
        assert self._valid is not None
        return np.searchsorted(self._valid, slots)

    def read_slots(self, slots: Slots, out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns copies of the rows in slots; leaves are [*slots.shape, ...].

        Args:
            slots: The slots.
            out: What an earlier call returned for as many slots; its arrays are written anew and
                returned. Text is always new.

        Raises:
            InvalidRowError: `out` does not fit.
        """
        outs = outputs(out, self._layouts, slots.shape)
        np.add.at(self.data_use_counter, slots, np.int32(1))
        arrays = {
            # With another mode than "clip", numpy would write into an array of its own first.
            name: [
                array.take(slots, axis=0, out=into, mode="clip")
                for array, into in zip(mine, outs[name], strict=True)
            ]
            for name, mine in self._arrays.items()
        }
        if self._observations is not None:
            flat = slots.reshape(-1)
            now, after = (
                [None if o is None else o.reshape(len(flat), *o.shape[slots.ndim :]) for o in into]
                for into in (outs["observation"], outs["next_observation"])
            )
            pair = self._observations.read(flat, now, after)
            if slots.ndim > 1:
                pair = map_arrays(lambda leaf: leaf.reshape(slots.shape + leaf.shape[1:]), pair)
            arrays["observation"], arrays["next_observation"] = pair
        if self._has_text:
            for name, layout in self._layouts.items():
                arrays[name] = [
                    self._texts.get(array) if leaf.text else array
                    for leaf, array in zip(layout.leaves, arrays[name], strict=True)
                ]
        return {name: layout.unflatten(arrays[name]) for name, layout in self._layouts.items()}

    def column(self, name: str) -> Array:
        """Returns one column of a single leaf, by position among the stored transitions, [n].

        Raises:
            KeyError: There is no such column.
        """
        (array,) = self._arrays[name]
        rows: Array = array[: self._used]
        return rows if not self._holes else rows[self.slots_of(np.arange(self.size))]

    def starts(self, length: int, allowed: npt.NDArray[np.bool_] | None = None) -> Slots:
        """Returns the positions of transitions that begin `length` of one episode, in order.

        Args:
            length: How many, at least 1.
            allowed: Which transitions may be among them, by position; all if None.
        """
        rows = self.data_use_counter >= 0
        if allowed is not None:
            rows = np.zeros_like(rows)
            rows[self.slots_of(np.flatnonzero(allowed))] = True
        begin = window(rows, length) & window(self._follows, length - 1)
        return self.positions_of(np.flatnonzero(begin))

    def following(self, positions: Slots, length: int) -> Slots:
        """Returns the slots of transitions and of those that follow them, [n, length]."""
        slots: Slots = self.slots_of(positions)[:, np.newaxis] + np.arange(length)
        return slots % self.capacity

    def get_data(self) -> dict[str, Any]:
        """Returns all transitions, in the order of their slots; {} before the first push."""
        if self.unit == "episode":
            registry = self.episode_registry
            return self.read_slots(ranges(registry.starts, registry.lengths))
        data: dict[str, Any] = self.read(slice(None))
        return data

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
