"""Columns of a ring that are allocated once, and how rows of them are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.compressed import Codec
from rlightning.buffer.utils.episode_registry import EpisodeRegistry, ranges
from rlightning.buffer.utils.fitting import outputs, stored_leaf, window
from rlightning.buffer.utils.indexing import Index, locate
from rlightning.buffer.utils.layout import Array, Layout, map_arrays
from rlightning.buffer.utils.observations import Observations
from rlightning.buffer.utils.texts import Texts
from rlightning.buffer.utils.watcher import Slots, Watcher
from rlightning.errors import ConfigError

Mode = Literal["circular", "fixed"]
Unit = Literal["transition", "episode"]
Removal = Literal["fifo", "lifo", "priority"]

USE_BYTES = 4
"""What is kept for each transition before the first one is stored, in bytes."""

_OWN_BYTES = USE_BYTES + 8 + 1  # afterwards also its generation, and whether another follows

_NO_SLOTS = np.zeros(0, np.intp)


class StoredRows:
    """What a `DataContainer` holds, for those who read it.

    Arguments and attributes are those of `DataContainer`.
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
        self._fitting: Mapping[str, Layout] | None = None  # what was last found to fit these
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
    def names(self) -> Set[str]:
        """Names of its columns; none before the first push."""
        return self._layouts.keys()

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
        self._fitting = None
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
        if not self.size:  # perhaps nothing is allocated yet
            return np.zeros(0, np.intp)
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
