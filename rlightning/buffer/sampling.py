"""Batches out of one storage, and priorities back into it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlightning.buffer.sampler import PrioritisedSampler, Sampler, deal
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.indexing import as_index, locate
from rlightning.buffer.utils.layout import Array, as_array
from rlightning.buffer.utils.storage import Storage
from rlightning.buffer.where import Where
from rlightning.errors import InvalidRowError, ReplayError


def draw_batches(
    storage: Storage,
    sampler: Sampler,
    batch_size: int | None,
    *,
    workers: int,
    shuffle: bool,
    drop_last: bool,
    where: Where | None,
) -> list[Any]:
    """Returns the part of a batch for each train worker; see `DataBuffer.sample`."""
    container = storage.container
    allowed = None
    if where is not None:
        if container.unit == "episode":
            raise ValueError("where: chooses transitions, and the unit here is the episode")
        allowed = where.allowed(container)
    indices, weights = sampler.draw(container, batch_size, shuffle=shuffle, allowed=allowed)
    batches = []
    parts: list[Any] = [slice(None)]
    if workers > 1:
        parts = deal(np.arange(len(indices)), workers, drop_last=drop_last)
    for part in parts:
        batch = storage.read_rows(indices[part], sampler.length)
        if weights is not None:
            batch["sample_index"] = indices[part]
            batch["sample_generation"] = container.generation_of(indices[part])
            batch["sample_weight"] = weights[part]
        batches.append(batch)
    return batches


def set_priorities(
    container: DataContainer, sampler: Sampler, indices: Any, priorities: Any, generations: Any
) -> int:
    """Sets priorities of transitions; see `DataBuffer.update_priorities`."""
    if not isinstance(sampler, PrioritisedSampler):
        raise ReplayError("update_priorities needs the sampler 'prioritised'")
    where = np.atleast_1d(locate(as_index(indices), len(container)))
    values = _numbers(priorities, "priorities").astype(np.float64)
    if values.shape != where.shape:
        raise InvalidRowError(f"priorities: expected {len(where)}, got {list(values.shape)}")
    sampler.check(values)
    if generations is not None:
        numbers = _numbers(generations, "generations")
        if numbers.shape != where.shape:
            raise InvalidRowError(f"generations: expected {len(where)}, got {list(numbers.shape)}")
        same = container.generation_of(where) == numbers
        where, values = where[same], values[same]
    sampler.update(container.slots_of(where), values)
    return len(where)


def _numbers(value: Any, name: str) -> Array:
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    return np.atleast_1d(as_array(value, name))
