"""How a buffer chooses the rows of a batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from rlightning.errors import BufferEmptyError
from rlightning.utils.config import SamplerConfig

Indices = npt.NDArray[np.intp]


class Sampler(ABC):
    """Chooses rows with a generator of its own.

    Args:
        seed: Seed of the generator; None draws one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)

    def seed(self, seed: int | None) -> None:
        """Starts the generator anew."""
        self._rng = np.random.default_rng(seed)

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
                stacklevel=5,
            )
        indices = np.arange(size, dtype=np.intp)
        if shuffle:
            self._rng.shuffle(indices)
        return indices


def _wanted(batch_size: int | None, name: str) -> int:
    if batch_size is None:
        raise ValueError(f"the sampler '{name}' needs a batch_size")
    return batch_size


_SAMPLERS: dict[str, type[Sampler]] = {
    "all": AllDataSampler,
    "batch": BatchSampler,
    "uniform": UniformSampler,
}


def build_sampler(config: SamplerConfig) -> Sampler:
    """Returns the sampler that a config names."""
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
