"""Observations of a ring of transitions, each stored once.

The `next_observation` of a transition mostly is the `observation` of the one in the next slot, and
the older frames of a stack mostly are the newest ones of the slots before. Both are compared, byte
for byte, when rows are written; what is not found there lies whole in a pool beside the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.compressed import Codec, CompressedRows
from rlightning.buffer.utils.frozen import before_write
from rlightning.buffer.utils.layout import Array, Layout, Leaf
from rlightning.buffer.utils.pool import Pool
from rlightning.errors import ConfigError

Slots = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Outs: TypeAlias = "list[Array | None]"

LINK_BYTES = 4
"""What is kept of each transition to find its next observation, in bytes."""

_SMALL_BYTES = 1 << 14  # up to here, rows are compared as one string of bytes first
_WORDS = tuple(np.dtype(f"u{size}") for size in (8, 4, 2, 1))

REFERENCE_BYTES = 8
"""What is kept of each row that is compressed, in bytes, beside what it is compressed to."""

STACK_BYTES = 5
"""What is kept of each transition beside, where frames are stacked, in bytes."""


class Place(NamedTuple):
    """Where some consecutive new rows go."""

    where: slice | Slots
    """Their slots in the ring; a slice where they lie side by side, with which numpy is faster."""
    rows: slice
    """Which of the new rows."""
    breaks: Mask | None
    """After which of the rows the next one does not lie in the next slot, [n]; None: the last."""

    @property
    def slots(self) -> Slots:
        """Their slots in the ring, [n]."""
        where = self.where
        return np.arange(where.start, where.stop) if isinstance(where, slice) else where

    @property
    def last(self) -> int:
        """The slot of the last row."""
        where = self.where
        return where.stop - 1 if isinstance(where, slice) else int(where[-1])

    @staticmethod
    def run(start: int, rows: slice, capacity: int) -> Place:
        """Returns a place of one slot after the other, from the end of a ring to its start too."""
        count = rows.stop - rows.start
        if start + count > capacity:
            return Place.of(np.arange(start, start + count) % capacity, rows, capacity)
        return Place(slice(start, start + count), rows, None)

    @staticmethod
    def of(slots: Slots, rows: slice, capacity: int) -> Place:
        """Returns a place of any slots of a ring."""
        breaks = np.ones(len(slots), np.bool_)
        breaks[:-1] = (slots[:-1] + 1) % capacity != slots[1:]
        return Place(slots, rows, breaks)


class _Stack(NamedTuple):
    """One leaf of which the ring holds the newest frame only."""

    leaf: int
    axis: int  # among the axes of one row, not negative
    depth: int  # frames in a stack


class Observations:
    """Columns `observation` and `next_observation` of a ring.

    Args:
        layout: Of one observation.
        capacity: Slots of the ring.
        frame_stack: The axis of frames, the oldest first, by path of the array: `observation`, or
            `observation.camera` in a dict.
        compression: How to compress arrays, by path, likewise.

    Raises:
        ConfigError: There is no such array or axis.
    """

    def __init__(
        self,
        layout: Layout,
        capacity: int,
        frame_stack: Mapping[str, int] | None = None,
        compression: Mapping[str, Codec] | None = None,
    ) -> None:
        self.layout = layout
        self._capacity = capacity
        self._stacks = _stacks(layout, frame_stack or {})
        self._deepest = max((stack.depth for stack in self._stacks), default=1)
        stored = list(layout.leaves)
        for stack in self._stacks:
            leaf = stored[stack.leaf]
            shape = (*leaf.shape[: stack.axis], *leaf.shape[stack.axis + 1 :])
            stored[stack.leaf] = Leaf(leaf.path, leaf.dtype, shape, leaf.bfloat16)
        codecs = _codecs(layout, compression or {})
        self._ring: list[Any] = [
            CompressedRows(capacity, leaf)
            if i in codecs
            else np.zeros((capacity, *leaf.shape), leaf.dtype)
            for i, leaf in enumerate(stored)
        ]
        self._compressed = [self._ring[i] for i in codecs]
        # Number of the next observation in the pool; -1 where it is that of the next slot.
        self._next = np.full(capacity, -1, np.int32)
        self._nexts = Pool(layout.leaves)
        # Of how many slots before it the frames of a stack are found, and where those are that are
        # not: number of the whole stack of the first of these slots.
        slots = capacity if self._stacks else 0
        self._depth = np.zeros(slots, np.uint8)
        self._whole = np.full(slots, -1, np.int32)
        self._wholes = Pool([layout.leaves[stack.leaf] for stack in self._stacks])

    @property
    def nbytes(self) -> int:
        """Memory that it has allocated, in bytes."""
        ring: int = sum(array.nbytes for array in self._ring)
        own = self._next.nbytes + self._depth.nbytes + self._whole.nbytes
        return ring + own + self._nexts.nbytes + self._wholes.nbytes

    @property
    def pooled_bytes(self) -> int:
        """Memory that grows with what comes, in bytes: what lies whole or is compressed."""
        packed: int = sum(rows.held_bytes for rows in self._compressed)
        return self._nexts.nbytes + self._wholes.nbytes + packed

    @staticmethod
    def row_bytes(
        layout: Layout,
        frame_stack: Mapping[str, int] | None = None,
        compression: Mapping[str, Codec] | None = None,
    ) -> int:
        """Returns what the ring takes for one transition, in bytes, without what grows."""
        stacks = _stacks(layout, frame_stack or {})
        total = layout.nbytes + LINK_BYTES + (STACK_BYTES if stacks else 0)
        whole = {i: leaf.nbytes for i, leaf in enumerate(layout.leaves)}
        for stack in stacks:
            total -= whole[stack.leaf] - whole[stack.leaf] // stack.depth
            whole[stack.leaf] //= stack.depth
        for leaf in _codecs(layout, compression or {}):
            total -= whole[leaf] - REFERENCE_BYTES
        return total

    def arrays_of(self, leaf: int) -> Iterator[Array]:
        """Yields the arrays in which a leaf lies that is neither stacked nor compressed."""
        yield self._ring[leaf]
        yield self._nexts.array(leaf)

    def clear(self) -> None:
        """Forgets all rows."""
        self._next.fill(-1)
        self._nexts.clear()
        if self._stacks:
            self._depth.fill(0)
            self._whole.fill(-1)
            self._wholes.clear()

    def write(
        self,
        place: Place,
        observation: Sequence[Array],
        following: Sequence[Array],
        apart: Mask | None,
        own: Mask | None = None,
    ) -> None:
        """Writes rows; `forget` was called for what the slots held.

        Args:
            place: Their slots.
            observation: One array [n, ...] per leaf.
            following: Next observations, likewise.
            apart: Which rows do not have the next one in the next slot for as long as they stay,
                [n]; None: the last.
            own: Which rows have a next observation that is not the observation of the next row,
                [n], the last among them: `following` has these only. None: it has all.
        """
        if own is not None:
            apart = own if apart is None else apart | own
            self._put_nexts(place, apart, _nexts_of(apart, observation, following, own))
        elif (found := _apart(observation, following, apart)) is None:
            self._next[place.last] = self._nexts.put_one([after[-1] for after in following])
        else:
            rows = found.nonzero()[0]
            self._put_nexts(place, found, [after.take(rows, axis=0) for after in following])
        before_write(self._ring, place.where)
        if not self._stacks:
            for leaf, now in enumerate(observation):
                self._ring[leaf][place.where] = now
            return
        stacked = {stack.leaf: stack for stack in self._stacks}
        for i, (mine, now) in enumerate(zip(self._ring, observation, strict=True)):
            mine[place.where] = now.take(-1, axis=stacked[i].axis + 1) if i in stacked else now
        self._write_depths(place.slots, place.breaks, observation)

    def _put_nexts(self, place: Place, apart: Mask, nexts: Sequence[Array]) -> None:
        rows = apart.nonzero()[0]
        where = place.where
        slots = rows + where.start if isinstance(where, slice) else where[rows]
        self._next.put(slots, self._nexts.put(nexts))

    def _write_depths(
        self, slots: Slots, breaks: Mask | None, observation: Sequence[Array]
    ) -> None:
        follows = np.ones(len(slots), np.bool_)
        follows[0] = False
        if breaks is not None:
            follows[1:] = ~breaks[:-1]
        for leaf, axis, _ in self._stacks:
            frames = np.moveaxis(observation[leaf], axis + 1, 1)
            same = _same(frames[1:, :-1], frames[:-1, 1:])
            if same is not None:
                follows[1:] &= same
        steps = np.arange(len(slots))
        depth = steps - np.maximum.accumulate(np.where(follows, 0, steps))
        self._depth[slots] = np.minimum(depth, self._deepest - 1)
        roots = ~follows
        self._whole[slots] = -1
        self._whole[slots[roots]] = self._wholes.put(
            [observation[stack.leaf][roots] for stack in self._stacks]
        )

    def forget(self, where: slice | Slots, uses: npt.NDArray[np.int32]) -> None:
        """Lets slots be written anew: what other rows need of them is stored whole first.

        Args:
            where: The slots, at least one, as of `Place`.
            uses: Of each slot of the ring; not negative where it holds a row, [capacity].
        """
        # The row before a run mostly needs nothing of it.
        if self._stacks or not isinstance(where, slice) or self._next.item(where.start - 1) < 0:
            self._keep(Place(where, slice(0), None).slots, uses)
        held = self._next[where]
        if isinstance(where, slice):  # mostly one of them, the last of an episode, has its own
            highest = held.argmax()
            if (number := held.item(highest)) < 0:
                return
            self._nexts.free_one(number)
            held[highest] = -1
            if held.item(held.argmax()) < 0:
                return
        numbers = held[held >= 0]
        self._nexts.free(numbers)
        self._next[where] = -1

    def _keep(self, slots: Slots, uses: npt.NDArray[np.int32]) -> None:
        """Stores whole what other rows need of slots."""
        breaks = np.flatnonzero((slots[:-1] + 1) % self._capacity != slots[1:])
        first, last = slots[:1], slots[-1:]
        if len(breaks):
            first = np.concatenate([first, slots[breaks + 1]])
            last = np.concatenate([slots[breaks], last])
        before = (first - 1) % self._capacity
        before = before[(uses[before] >= 0) & (self._next[before] < 0) & _outside(before, last)]
        if len(before):
            self._next[before] = self._nexts.put(self._observed((before + 1) % self._capacity))
        if self._stacks:
            self._keep_stacks(first, last, uses)
            self._wholes.free(self._whole[slots][self._whole[slots] >= 0])
            self._whole[slots] = -1
            self._depth[slots] = 0

    def _keep_stacks(self, first: Slots, last: Slots, uses: npt.NDArray[np.int32]) -> None:
        after = (last + 1) % self._capacity
        after = after[(uses[after] >= 0) & (self._depth[after] > 0) & _outside(after, first)]
        if not len(after):
            return
        whole = self._observed(after)
        self._whole[after] = self._wholes.put([whole[stack.leaf] for stack in self._stacks])
        for depth in range(self._deepest - 1):
            later = (after + depth) % self._capacity
            self._depth[later] = np.minimum(self._depth[later], depth)

    def read(
        self, slots: Slots, now: Outs | None = None, after: Outs | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Returns copies of the observations and next observations of slots, [n, ...] per leaf.

        Args:
            slots: The slots, [n].
            now: Arrays to write the observations into, likewise; None makes new ones.
            after: The same for the next observations.
        """
        numbers = self._next.take(slots)
        apart = (~numbers).nonzero()[0]  # those that are not -1
        nexts = slots + 1
        if self._stacks:
            nexts[apart] = slots[apart]  # any slot that holds a row
        following = self._observed(nexts, after)
        if len(apart):
            numbers = numbers.take(apart)
            for leaf, array in enumerate(following):
                array[apart] = self._nexts.get(leaf, numbers)
        return self._observed(slots, now), following

    def _observed(self, slots: Slots, out: Outs | None = None) -> list[Array]:
        outs = [None] * len(self._ring) if out is None else out
        pairs = zip(self._ring, outs, strict=True)
        if not self._stacks:
            return [mine.take(slots, axis=0, mode="wrap", out=into) for mine, into in pairs]
        arrays: list[Array] = [
            np.empty(0) if self._is_stack(i) else mine.take(slots, axis=0, mode="wrap", out=into)
            for i, (mine, into) in enumerate(pairs)
        ]
        slots = slots % self._capacity
        for i, stack in enumerate(self._stacks):
            arrays[stack.leaf] = self._stack(i, stack, slots, outs[stack.leaf])
        return arrays

    def _is_stack(self, leaf: int) -> bool:
        return any(stack.leaf == leaf for stack in self._stacks)

    def _stack(self, pool: int, stack: _Stack, slots: Slots, out: Array | None) -> Array:
        leaf = self.layout.leaves[stack.leaf]
        stacks = np.empty((len(slots), *leaf.shape), leaf.dtype) if out is None else out
        frames = np.moveaxis(stacks, stack.axis + 1, 1)
        depth = self._depth[slots].astype(np.intp)
        for back in range(stack.depth):
            found = self._ring[stack.leaf].take((slots - back) % self._capacity, axis=0)
            frames[:, stack.depth - 1 - back] = found
        short = depth < stack.depth - 1
        if short.any():
            roots = self._whole[(slots[short] - depth[short]) % self._capacity]
            wholes = np.moveaxis(self._wholes.get(pool, roots), stack.axis + 1, 1)
            # Frame j of a row is frame j + depth of the whole stack `depth` rows before it.
            frame = np.arange(stack.depth) + depth[short][:, np.newaxis]
            rows, places = np.nonzero(frame < stack.depth)
            frames[np.flatnonzero(short)[rows], places] = wholes[rows, frame[rows, places]]
        return stacks


def _codecs(layout: Layout, compression: Mapping[str, Codec]) -> dict[int, Codec]:
    """Returns how to compress leaves, by number."""
    codecs: dict[int, Codec] = {}
    for path, codec in compression.items():
        index = next((i for i, leaf in enumerate(layout.leaves) if leaf.path == path), None)
        if index is None:
            known = ", ".join(leaf.path for leaf in layout.leaves)
            raise ConfigError(f"storage.compression: no array {path!r}; there are {known}")
        if not layout.leaves[index].shape:
            raise ConfigError(f"storage.compression: {path!r} is one value, and no array")
        codecs[index] = codec
    return codecs


def _stacks(layout: Layout, frame_stack: Mapping[str, int]) -> list[_Stack]:
    stacks = []
    for path, axis in frame_stack.items():
        index = next((i for i, leaf in enumerate(layout.leaves) if leaf.path == path), None)
        if index is None:
            known = ", ".join(leaf.path for leaf in layout.leaves)
            raise ConfigError(f"storage.frame_stack: no array {path!r}; there are {known}")
        shape = layout.leaves[index].shape
        if not -len(shape) <= axis < len(shape) or not shape[axis]:
            raise ConfigError(
                f"storage.frame_stack.{path}.axis: shape {list(shape)} has no axis {axis}"
            )
        stacks.append(_Stack(index, axis % len(shape), shape[axis]))
    return stacks


def _apart(
    observation: Sequence[Array], following: Sequence[Array], apart: Mask | None
) -> Mask | None:
    """Tells of which rows the next observation is not that of the next row; None: of the last."""
    for leaf, now in enumerate(observation):
        same = _same(following[leaf][:-1], now[1:])
        if same is not None:
            apart = last_of(len(now)) if apart is None else apart.copy()
            apart[:-1] |= ~same
    return apart


def _nexts_of(
    apart: Mask, observation: Sequence[Array], following: Sequence[Array], own: Mask
) -> Sequence[Array]:
    """Returns the next observations of rows, of which some are those of the row after them."""
    rows = apart.nonzero()[0]
    if len(rows) == len(following[0]):
        return following
    nexts = [now.take(rows + 1, axis=0, mode="clip") for now in observation]
    for mine, some in zip(nexts, following, strict=True):
        mine[own[rows]] = some
    return nexts


def last_of(count: int) -> Mask:
    """Returns a mask of so many rows in which the last one is set."""
    mask = np.zeros(count, np.bool_)
    mask[-1] = True
    return mask


def _outside(slots: Slots, others: Slots) -> Mask:
    """Tells which slots are not among others."""
    outside: Mask = slots != others[0] if len(others) == 1 else ~np.isin(slots, others)
    return outside


def _same(mine: Array, other: Array) -> Mask | None:
    """Tells which rows are equal byte for byte, so that NaN and -0.0 come back as they were.

    None if all of them are.
    """
    if mine.nbytes <= _SMALL_BYTES and mine.tobytes() == other.tobytes():
        return None
    row_bytes = mine.nbytes // len(mine)
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    bits = [
        np.ascontiguousarray(part).reshape(len(part), -1).view(np.ndarray).view(word)
        for part in (mine, other)
    ]
    same: Mask = (bits[0] == bits[1]).all(axis=1)
    return same
