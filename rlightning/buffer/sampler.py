"""How a buffer chooses the rows of a batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.sum_tree import SumTree
from rlightning.errors import BufferEmptyError, InvalidRowError
from rlightning.utils.config import SamplerConfig

Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float32]


class Sampler(ABC):
    """Chooses rows with a generator of its own.

    Args:
        seed: Seed of the generator; None draws one.

    Attributes:
        length: How many consecutive transitions of one episode begin at each row that it chooses.
        scale: What the weights of the last draw were divided by.
    """

    length = 1
    scale = 1.0

    def __init__(self, seed: int | None = None) -> None:
        self.seed(seed)

    @property
    def rng(self) -> np.random.Generator:
        """The generator."""
        return self._rng

    def seed(self, seed: int | None) -> None:
        """Starts the generator anew, and those of `stream`."""
        root = np.random.SeedSequence(seed)
        self._entropy = root.entropy
        self._rng = np.random.default_rng(root)
        self._streams: dict[tuple[int, int], np.random.Generator] = {}

    @contextmanager
    def stream(self, rank: int, world_size: int) -> Iterator[None]:
        """Draws for one of several learners meanwhile, with a generator of its own.

        Seed, rank and `world_size` decide what it draws, whenever the others draw theirs. A lone
        learner has the generator of the sampler.
        """
        common, self._rng = self._rng, self.generator(rank, world_size)
        try:
            yield
        finally:
            self._rng = common

    def generator(self, rank: int, world_size: int) -> np.random.Generator:
        """Returns the generator of one of several learners."""
        if world_size == 1:
            return self._rng
        key = (world_size, rank)
        if key not in self._streams:
            seeds = np.random.SeedSequence(self._entropy, spawn_key=key)
            self._streams[key] = np.random.default_rng(seeds)
        return self._streams[key]

    def sample(self, size: int, batch_size: int | None, *, shuffle: bool = True) -> Indices:
        """Returns the rows of a batch.

        Args:
            size: Number of stored rows.
            batch_size: How many are wanted; None leaves it to the sampler.
            shuffle: Whether their order may be any.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: The sampler cannot give such a batch.
        """
        if size == 0:
            raise BufferEmptyError("nothing is stored to sample from")
        return self._choose(size, batch_size, shuffle)

    def draw(
        self,
        container: DataContainer,
        batch_size: int | None,
        *,
        shuffle: bool = True,
        allowed: Mask | None = None,
    ) -> tuple[Indices, Weights | None]:
        """Returns which rows of a container make up a batch, and the factors of their losses.

        Args:
            container: What is stored.
            batch_size: As of `sample`.
            shuffle: As of `sample`.
            allowed: Which transitions may be in it, by position; all if None.

        Returns:
            Positions, and weights, float32; None where all count the same.

        Raises:
            BufferEmptyError: Nothing is stored, or nothing of it may be in the batch.
            ValueError: The sampler cannot give such a batch.
        """
        if allowed is None:
            return self.sample(len(container), batch_size, shuffle=shuffle), None
        rows = np.flatnonzero(allowed)
        return rows[self.sample(len(rows), batch_size, shuffle=shuffle)], None

    def choices(self, container: DataContainer, allowed: Mask | None = None) -> int:
        """Returns how many rows `draw` chooses from."""
        return len(container) if allowed is None else int(np.count_nonzero(allowed))

    @abstractmethod
    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        """Returns the rows; `size` is at least 1."""


class UniformSampler(Sampler):
    """Rows at random, with replacement."""

    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        return self._rng.integers(0, size, _wanted(batch_size, "uniform"), dtype=np.intp)


class BatchSampler(Sampler):
    """Rows at random, without replacement."""

    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        count = _wanted(batch_size, "batch")
        if count > size:
            raise ValueError(f"a batch of {count} without replacement from {size} stored rows")
        return self._rng.choice(size, count, replace=False).astype(np.intp, copy=False)


class AllDataSampler(Sampler):
    """All rows, in their order or shuffled."""

    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        if batch_size is not None and batch_size != size:
            warnings.warn(
                f"the sampler 'all' is designed to sample all data: {size} rows, not {batch_size}",
                UserWarning,
                stacklevel=7,
            )
        indices = np.arange(size, dtype=np.intp)
        if shuffle:
            self._rng.shuffle(indices)
        return indices


class SequenceSampler(Sampler):
    """Rows that begin consecutive transitions of one episode; at random, with replacement.

    Args:
        length: Number of transitions.
        seed: Seed of the generator; None draws one.
    """

    def __init__(self, length: int, seed: int | None = None) -> None:
        super().__init__(seed)
        self.length = length
        self._begins = np.zeros(0, np.intp)
        self._seen = (-1, -1)

    def draw(
        self,
        container: DataContainer,
        batch_size: int | None,
        *,
        shuffle: bool = True,
        allowed: Mask | None = None,
    ) -> tuple[Indices, Weights | None]:
        """Returns the rows that sequences begin at; see `Sampler.draw`."""
        begins = self._all_begins(container, allowed)
        return begins[self.sample(len(begins), batch_size, shuffle=shuffle)], None

    def choices(self, container: DataContainer, allowed: Mask | None = None) -> int:
        """Returns how many rows a sequence can begin at."""
        return len(self._all_begins(container, allowed))

    def _all_begins(self, container: DataContainer, allowed: Mask | None) -> Indices:
        if allowed is not None:
            return container.starts(self.length, allowed)
        state = (id(container), container.changes)
        if state != self._seen:
            self._begins, self._seen = container.starts(self.length), state
        return self._begins

    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        return self._rng.integers(0, size, _wanted(batch_size, "sequence"), dtype=np.intp)


class PrioritisedSampler(Sampler):
    """Rows with chances proportional to a power of their priorities, with replacement.

    It has to be the `watcher` of the container that it draws from.

    New rows get the highest priority that any row had (Schaul et al., arXiv:1511.05952). Each of
    equal parts of the sum of all chances is drawn from once, which spreads a batch.

    Args:
        capacity: Slots of the container.
        alpha: The power; 0 is uniform.
        beta: How far weights make up for the chances: they are (chance * rows)^-beta, divided by
            the largest of the batch.
        seed: Seed of the generator; None draws one.
    """

    def __init__(
        self, capacity: int, alpha: float = 0.6, beta: float = 0.4, seed: int | None = None
    ) -> None:
        super().__init__(seed)
        self.alpha = alpha
        self.beta = beta
        self._tree = SumTree(capacity)
        self._held = np.zeros(capacity, np.bool_)
        self._highest = 1.0

    def draw(
        self,
        container: DataContainer,
        batch_size: int | None,
        *,
        shuffle: bool = True,
        allowed: Mask | None = None,
    ) -> tuple[Indices, Weights | None]:
        """Returns rows and their weights; see `Sampler.draw`."""
        count = _wanted(batch_size, "prioritised")
        if allowed is None:
            rows, size, total = None, len(container), self._tree.total
        else:
            rows = np.flatnonzero(allowed)
            sums = np.cumsum(self._tree.values[container.slots_of(rows)])
            size, total = len(rows), float(sums[-1]) if len(sums) else 0.0
        self.scale = 1.0
        if total <= 0.0:  # nothing is there, or all priorities are 0
            drawn = self.sample(size, count)
            return drawn if rows is None else rows[drawn], np.ones(count, np.float32)
        parts = (np.arange(count) + self._rng.random(count)) * (total / max(count, 1))
        parts = np.minimum(parts, np.nextafter(total, 0.0))
        if rows is None:
            slots = self._tree.find(parts)
            drawn = container.positions_of(slots)
        else:
            drawn = rows[np.searchsorted(sums, parts, side="right")]
            slots = container.slots_of(drawn)
        weights = (self._tree.values[slots] / total * size) ** -self.beta
        if count:
            self.scale = float(weights.max())
        return drawn, (weights / self.scale).astype(np.float32)

    def _choose(self, size: int, batch_size: int | None, shuffle: bool) -> Indices:
        return self._rng.integers(0, size, batch_size, dtype=np.intp)

    @staticmethod
    def check(priorities: npt.NDArray[np.float64]) -> None:
        """Checks priorities.

        Raises:
            InvalidRowError: One is not finite, or negative.
        """
        if not np.isfinite(priorities).all() or (priorities < 0).any():
            raise InvalidRowError("priorities: expected finite numbers, none of them negative")

    def update(self, slots: Indices, priorities: npt.NDArray[np.float64]) -> None:
        """Sets priorities of rows, finite and not negative; of repeated ones the last counts.

        Raises:
            InvalidRowError: One is not; nothing was changed.
        """
        self.check(priorities)
        self._highest = max(self._highest, float(priorities.max(initial=0.0)))
        self._tree.set(slots, priorities**self.alpha)

    def wrote(self, slots: Indices) -> None:
        """Gives new rows the highest priority that any had."""
        self._held[slots] = True
        self._tree.set(slots, np.full(len(slots), self._highest**self.alpha))

    def released(self, slots: Indices) -> None:
        """Lets nothing be drawn from slots."""
        self._held[slots] = False
        self._tree.set(slots, np.zeros(len(slots)))

    def lowest(self, count: int) -> Indices:
        """Returns the slots of the rows of lowest priority."""
        held = np.flatnonzero(self._held)
        values = self._tree.values[held]
        if count >= len(held):
            return held
        return np.sort(held[np.argpartition(values, count)[:count]])


def _wanted(batch_size: int | None, name: str) -> int:
    if batch_size is None:
        raise ValueError(f"the sampler '{name}' needs a batch_size")
    return batch_size


_SAMPLERS: dict[str, type[Sampler]] = {
    "all": AllDataSampler,
    "batch": BatchSampler,
    "uniform": UniformSampler,
}


def build_sampler(config: SamplerConfig, capacity: int = 0) -> Sampler:
    """Returns the sampler that a config names.

    Args:
        config: The config.
        capacity: Slots of the container, for a sampler that keeps something of each.
    """
    if config.type == "prioritised":
        return PrioritisedSampler(capacity, config.alpha, config.beta, config.seed)
    if config.type == "sequence":
        return SequenceSampler(config.length or 1, config.seed)
    return _SAMPLERS[config.type](config.seed)


def deal(indices: Indices, workers: int, *, drop_last: bool) -> list[Indices]:
    """Deals rows out to train workers, one after the other.

    Args:
        indices: The rows of a batch.
        workers: Number of train workers.
        drop_last: Drop what does not divide by their number, rather than give the first rows twice.
    """
    rest = len(indices) % workers
    if rest and drop_last:
        indices = indices[:-rest]
    elif rest:
        indices = np.concatenate([indices, np.resize(indices, workers - rest)])
    return [indices[rank::workers] for rank in range(workers)]
