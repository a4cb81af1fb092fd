"""Batches out of the storages of this process, and priorities back into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlightning.buffer.sampler import (
    AllDataSampler,
    Indices,
    Mask,
    PrioritisedSampler,
    Sampler,
    Weights,
    build_sampler,
    deal,
)
from rlightning.buffer.shards import Split, merge, pack, split_counts, unpack
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.indexing import as_index, locate
from rlightning.buffer.utils.layout import Array, as_array
from rlightning.buffer.utils.storage import Storage
from rlightning.buffer.where import Where
from rlightning.errors import BufferEmptyError, InvalidRowError, ReplayError
from rlightning.utils.config import BufferConfig


class Shard(NamedTuple):
    """A storage in this process and who draws from it."""

    storage: Storage
    sampler: Sampler


class _Draw(NamedTuple):
    """What was drawn from one shard."""

    shard: int
    indices: Indices
    weights: Weights | None


def local_shards(storages: Sequence[Storage], config: BufferConfig, first: Sampler) -> list[Shard]:
    """Returns storages with a sampler for each; `first` is that of the first one."""
    assert config.sampler is not None  # the config's validator sets one
    more = [build_sampler(config.sampler, config.capacity) for _ in storages[1:]]
    shards = [*map(Shard, storages, [first, *more])]
    seed_shards(shards, config.sampler.seed)
    for storage, sampler in shards:
        if isinstance(sampler, PrioritisedSampler):
            storage.container.watcher = sampler
    return shards


def seed_shards(shards: Sequence[Shard], seed: int | None) -> None:
    """Starts the generators of all samplers anew, the first with the seed itself."""
    for i, shard in enumerate(shards):
        own = seed
        if i and seed is not None:  # or all shards would draw the same positions
            own = int(np.random.SeedSequence((seed, i)).generate_state(1)[0])
        shard.sampler.seed(own)


def draw_batches(
    shards: Sequence[Shard],
    batch_size: int | None,
    *,
    workers: int,
    shuffle: bool,
    drop_last: bool,
    where: Where | None,
    split: Split = "proportional",
    readers: Mapping[int, Sequence[int]] | None = None,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """Returns the part of a batch for each train worker; see `DataBuffer.sample`.

    Args:
        shards: What is drawn from.
        batch_size: As of `DataBuffer.sample`.
        workers: Train workers.
        shuffle: As of `DataBuffer.sample`.
        drop_last: As of `DataBuffer.sample`.
        where: As of `DataBuffer.sample`.
        split: How much of it each shard gives, as in the configuration.
        readers: Train workers by shard, where each reads one only; None if all read all.
        out: As of `DataBuffer.sample`.
    """
    if out is not None and len(out) != workers:
        raise ValueError(f"out: expected a batch for each of {workers} workers, got {len(out)}")
    draws = _draw(shards, batch_size, shuffle=shuffle, where=where, split=split)
    _weigh(shards, draws)
    if readers is None:
        drawn = _deal(draws, workers, drop_last)
    else:
        drawn = [[] for _ in range(workers)]
        for draw in draws:
            mine = readers[draw.shard]
            for worker, part in zip(mine, _deal([draw], len(mine), drop_last), strict=True):
                drawn[worker] = part
        if not all(drawn):
            raise BufferEmptyError("nothing is stored for some of the train workers")
    outs = [None] * workers if out is None else out
    return [_read(shards, part, into) for part, into in zip(drawn, outs, strict=True)]


def _draw(
    shards: Sequence[Shard],
    batch_size: int | None,
    *,
    shuffle: bool,
    where: Where | None,
    split: Split,
) -> list[_Draw]:
    masks = [None if where is None else _allowed(where, shard.storage) for shard in shards]
    if len(shards) == 1:
        storage, sampler = shards[0]
        drawn = sampler.draw(storage.container, batch_size, shuffle=shuffle, allowed=masks[0])
        return [_Draw(0, *drawn)]
    sizes = [
        len(shard.storage.container) if mask is None else int(mask.sum())
        for shard, mask in zip(shards, masks, strict=True)
    ]
    while any(sizes):
        counts = _counts(shards, batch_size, sizes, split)
        draws: list[_Draw] = []
        for i, count in enumerate(counts):
            if not sizes[i] or count == 0:
                continue
            storage, sampler = shards[i]
            try:
                drawn = sampler.draw(storage.container, count, shuffle=shuffle, allowed=masks[i])
            except BufferEmptyError:  # nothing in it is long enough for a sequence
                sizes[i] = 0
                break
            draws.append(_Draw(i, *drawn))
        else:
            return draws
    raise BufferEmptyError("nothing is stored to sample from")


def _counts(
    shards: Sequence[Shard], batch_size: int | None, sizes: Sequence[int], split: Split
) -> list[int | None]:
    """Returns what to ask each shard for."""
    if batch_size is None or (
        batch_size == sum(sizes) and isinstance(shards[0].sampler, AllDataSampler)
    ):
        return [None] * len(shards)
    if split == "proportional" and batch_size > sum(sizes):  # possible with replacement only
        times, batch_size = divmod(batch_size, sum(sizes))
        counts = split_counts(batch_size, sizes, split, shards[0].sampler.rng)
        return [times * size + count for size, count in zip(sizes, counts, strict=True)]
    return [*split_counts(batch_size, sizes, split, shards[0].sampler.rng)]


def _allowed(where: Where, storage: Storage) -> Mask:
    container = storage.container
    if container.unit == "episode":
        raise ValueError("where: chooses transitions, and the unit here is the episode")
    if not container.size:
        return np.zeros(0, np.bool_)
    return where.allowed(container)


def _weigh(shards: Sequence[Shard], draws: list[_Draw]) -> None:
    """Makes weights of several shards comparable: each divided by the largest of all of them."""
    scales = [
        shards[draw.shard].sampler.scale
        for draw in draws
        if draw.weights is not None and len(draw.weights)
    ]
    if len(scales) < 2:
        return
    for i, draw in enumerate(draws):
        if draw.weights is not None:
            scale = shards[draw.shard].sampler.scale / max(scales)
            draws[i] = draw._replace(weights=draw.weights * np.float32(scale))


def _deal(draws: Sequence[_Draw], workers: int, drop_last: bool) -> list[list[_Draw]]:
    """Deals what was drawn out to train workers, one after the other."""
    if workers == 1:
        return [list(draws)]
    numbers = np.arange(sum(len(draw.indices) for draw in draws))
    dealt = []
    for mine in deal(numbers, workers, drop_last=drop_last):
        parts, first = [], 0
        for draw in draws:
            own = mine[(mine >= first) & (mine < first + len(draw.indices))] - first
            first += len(draw.indices)
            weights = None if draw.weights is None else draw.weights[own]
            parts.append(_Draw(draw.shard, draw.indices[own], weights))
        dealt.append(parts)
    return dealt


def _read(shards: Sequence[Shard], draws: Sequence[_Draw], out: Any) -> Any:
    if len(draws) == 1:
        (draw,) = draws
        return _read_one(shards, draw, out)
    filled = [draw for draw in draws if len(draw.indices)] or list(draws[:1])
    return merge([_read_one(shards, draw, None) for draw in filled])


def _read_one(shards: Sequence[Shard], draw: _Draw, out: Any) -> Any:
    storage, sampler = shards[draw.shard]
    batch = storage.read_rows(draw.indices, sampler.length, out)
    if draw.weights is not None:
        batch["sample_index"] = pack(draw.shard, draw.indices) if len(shards) > 1 else draw.indices
        batch["sample_generation"] = storage.container.generation_of(draw.indices)
        batch["sample_weight"] = draw.weights
    return batch


def set_shard_priorities(
    shards: Sequence[Shard], indices: Any, priorities: Any, generations: Any
) -> int:
    """Sets priorities of transitions of several shards; see `DataBuffer.update_priorities`."""
    if len(shards) == 1:
        storage, sampler = shards[0]
        return set_priorities(storage.container, sampler, indices, priorities, generations)
    where = np.atleast_1d(as_index(indices)).astype(np.int64)
    values = _numbers(priorities, "priorities")
    if values.shape != where.shape:
        raise InvalidRowError(f"priorities: expected {len(where)}, got {list(values.shape)}")
    numbers = None if generations is None else _numbers(generations, "generations")
    if numbers is not None and numbers.shape != where.shape:
        raise InvalidRowError(f"generations: expected {len(where)}, got {list(numbers.shape)}")
    owners, positions = unpack(where)
    if len(owners) and not 0 <= owners.min() <= owners.max() < len(shards):
        raise IndexError(f"an index of shard {owners.max()} of {len(shards)}")
    mine = [np.flatnonzero(owners == i) for i in range(len(shards))]
    for (storage, sampler), rows in zip(shards, mine, strict=True):  # before anything is changed
        if not isinstance(sampler, PrioritisedSampler):
            raise ReplayError("update_priorities needs the sampler 'prioritised'")
        locate(positions[rows], len(storage.container))
        sampler.check(values[rows].astype(np.float64))
    return sum(
        set_priorities(
            storage.container,
            sampler,
            positions[rows],
            values[rows],
            None if numbers is None else numbers[rows],
        )
        for (storage, sampler), rows in zip(shards, mine, strict=True)
        if len(rows)
    )


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
