"""The state of a storage and its sampler as nested values, and back.

This module, and `leaving` beside it, know what of each object outlives the process, so that it is
read in one place; a test compares their lists with the attributes that the objects have. Columns
come as `Frozen`, which costs nothing now; what is small is copied. The values hold nothing else but
dicts, lists, numbers, text, None and arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlightning.buffer.assembly import Group
from rlightning.buffer.checks import Schema
from rlightning.buffer.columns import Column, Counters
from rlightning.buffer.episodes import EpisodeGroup
from rlightning.buffer.sampler import PrioritisedSampler, Sampler
from rlightning.buffer.utils.compressed import CompressedRows
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.frozen import Frozen, FrozenBlobs
from rlightning.buffer.utils.layout import Array, Layout, Leaf
from rlightning.buffer.utils.observations import Observations
from rlightning.buffer.utils.pool import Pool
from rlightning.buffer.utils.storage import Storage
from rlightning.buffer.utils.texts import Texts
from rlightning.wire import decode_env_meta, encode_env_meta

State = dict[str, Any]


class Stored(Protocol):
    """The rows of a `Frozen` array, on disk."""

    @property
    def rows(self) -> int:
        """How many there are."""
        ...

    def read_into(self, array: Array) -> None:
        """Reads them into the first rows of an array."""
        ...


# Storage and sampler.


def dump_storage(storage: Storage) -> State:
    """Returns what a storage holds, open episodes included; rollouts are in `leaving`."""
    groups = [group for group in storage._groups.values() if isinstance(group, EpisodeGroup)]
    return {
        "container": _dump_container(storage.container),
        "groups": [_dump_episodes(group) for group in groups],
        "removed": storage._removed.to_dict(),
        "outcomes": storage._pipeline.outcomes,
    }


def load_storage(storage: Storage, state: State) -> None:
    """Puts into an empty storage what `dump_storage` returned of another."""
    storage._pipeline.outcomes = state.get("outcomes", False)  # format 1 has none
    _load_container(storage.container, state["container"])
    for one in state["groups"]:
        group = _load_episodes(storage, one)
        storage._groups[group.env_id] = group
    _load_counters(storage._removed, state["removed"])


def dump_sampler(sampler: Sampler) -> State:
    """Returns what a sampler knows."""
    state: State = {
        "entropy": f"{sampler._entropy:x}",
        "rng": dump_rng(sampler._rng),
        "streams": [[*key, dump_rng(stream)] for key, stream in sampler._streams.items()],
    }
    if isinstance(sampler, PrioritisedSampler):
        state |= {
            "values": sampler._tree.values.copy(),
            "held": sampler._held.copy(),
            "highest": sampler._highest,
        }
    return state


def load_sampler(sampler: Sampler, state: State) -> None:
    """Tells a sampler what `dump_sampler` returned of another."""
    sampler._entropy = int(state["entropy"], 16)
    load_rng(sampler._rng, state["rng"])
    for world_size, rank, numbers in state["streams"]:
        load_rng(sampler.generator(rank, world_size), numbers)
    if isinstance(sampler, PrioritisedSampler):
        values = np.array(state["values"], np.float64)
        sampler._tree.set(np.arange(len(values)), values)
        sampler._held[:] = state["held"]
        sampler._highest = state["highest"]


def dump_rng(rng: np.random.Generator) -> list[str]:
    """Returns the state of a generator."""
    state: Any = rng.bit_generator.state
    numbers = (state["state"]["state"], state["state"]["inc"], state["has_uint32"])
    return [f"{number:x}" for number in (*numbers, state["uinteger"])]


def load_rng(rng: np.random.Generator, numbers: Sequence[str]) -> None:
    """Sets the state of a generator."""
    state, inc, has_uint32, uinteger = (int(number, 16) for number in numbers)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": inc},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }


# Finished transitions.


def _dump_container(container: DataContainer) -> State:
    used = container._used
    registry = container.episode_registry
    observations = container._observations
    return {
        "layouts": _dump_layouts(container._layouts),
        "pointer": container.pointer,
        "pushed_total": container.pushed_total,
        "used": used,
        "holes": container._holes,
        "uses": container.data_use_counter[:used].copy(),
        "generation": container.generation[:used].copy(),
        "follows": container._follows[:used].copy(),
        "starts": registry.starts.astype(np.int64),
        "lengths": registry.lengths.astype(np.int64),
        "total": registry.total,
        "texts": _dump_texts(container._texts),
        "arrays": _frozen_by_name(container._arrays, used),
        "observations": None if observations is None else _dump_observations(observations, used),
    }


def _load_container(container: DataContainer, state: State) -> None:
    used = state["used"]
    if state["layouts"]:
        container._allocate(_load_layouts(state["layouts"]))
        container.generation[:used] = state["generation"]
        container._follows[:used] = state["follows"]
    container.data_use_counter[:used] = state["uses"]
    container.pointer = state["pointer"]
    container.pushed_total = state["pushed_total"]
    container._used = used
    container._holes = state["holes"]
    for start, length in zip(state["starts"].tolist(), state["lengths"].tolist(), strict=True):
        container.episode_registry.append(start, np.array([length], np.intp))
    container.episode_registry.total = state["total"]
    _load_texts(container._texts, state["texts"])
    _read_by_name(container._arrays, state["arrays"])
    if state["observations"] is not None:
        assert container._observations is not None  # it follows from the layouts
        _load_observations(container._observations, state["observations"])


def _dump_observations(observations: Observations, used: int) -> State:
    return {
        "ring": [_frozen(array, used) for array in observations._ring],
        "next": observations._next[:used].copy(),
        "nexts": _dump_pool(observations._nexts),
        "depth": observations._depth[:used].copy(),
        "whole": observations._whole[:used].copy(),
        "wholes": _dump_pool(observations._wholes),
    }


def _load_observations(observations: Observations, state: State) -> None:
    _read(observations._ring, state["ring"])
    for name in ("next", "depth", "whole"):
        values = state[name]
        getattr(observations, f"_{name}")[: len(values)] = values
    _load_pool(observations._nexts, state["nexts"])
    _load_pool(observations._wholes, state["wholes"])


def _dump_pool(pool: Pool) -> State:
    return {
        "arrays": [Frozen(array, pool._used) for array in pool._arrays],
        "used": pool._used,
        "free": np.array(pool._free, np.int64),
    }


def _load_pool(pool: Pool, state: State) -> None:
    if state["used"]:
        pool._grow(state["used"])
    pool._used = state["used"]
    pool._free = state["free"].tolist()
    _read(pool._arrays, state["arrays"])


# Open episodes.


def _dump_episodes(group: EpisodeGroup) -> State:
    steps = group.highest + 1 if group.rows else 0
    apart = group._apart[:steps].copy()
    return {**dump_group(group, steps), "last": group._last.copy(), "apart": apart}


def _load_episodes(storage: Storage, state: State) -> Group:
    group = storage._staged(decode_env_meta(state["meta"]))
    assert isinstance(group, EpisodeGroup)
    load_group(group, state)
    group._last[...] = state["last"]
    group._apart = np.zeros((group._length, group.rows), np.bool_)
    if "apart" in state:
        group._apart[: len(state["apart"])] = state["apart"]
    else:  # an older version wrote all of the next observations
        group._apart[:] = True
    return group


def dump_group(group: Group, steps: int) -> State:
    """Returns the rows of an env, with the first steps of their columns."""
    answers = group._answers
    return {
        "meta": encode_env_meta(group.meta),
        "schema": None if group.schema is None else _dump_schema(group.schema),
        "rows": group.rows,
        "length": group._length,
        "columns": {
            name: {
                "layout": _dump_layout(column.layout),
                "arrays": [_frozen(array, steps) for array in column.arrays],
            }
            for name, column in group.columns.items()
        },
        "answers": "all" if isinstance(answers, slice) else answers,
        "own_action": group._own_action,
        "warned": group._warned,
        "positions": group.positions.copy(),
        "state": group._state.copy(),
        "tail": group._tail.copy(),
        "episode": group._episode.copy(),
        "step": group._step.copy(),
        "next_episode": group._next_episode,
        "counters": group.counters.to_dict(),
        "nbytes": group.nbytes,
    }


def load_group(group: Group, state: State) -> None:
    """Puts into a new group what `dump_group` returned of another."""
    group._set_rows(state["rows"])
    group._length = state["length"]
    group.schema = None if state["schema"] is None else _load_schema(state["schema"])
    for name, one in state["columns"].items():
        column = Column(_load_layout(one["layout"]), (group._length, group.rows))
        _read(column.arrays, one["arrays"])
        group.columns[name] = column
    answers = state["answers"]
    group._answers = slice(None) if isinstance(answers, str) else answers
    group._own_action = state["own_action"]
    group._warned = state["warned"]
    if group.rows:
        group._move(np.arange(group.rows), state["positions"])
    for name in ("state", "tail", "episode", "step"):
        getattr(group, f"_{name}")[...] = state[name]
    group._next_episode = state["next_episode"]
    group.nbytes = state["nbytes"]
    _load_counters(group.counters, state["counters"])


def _dump_schema(schema: Schema) -> State:
    return {
        "rows": schema.rows,
        "batched": schema.batched,
        "observation": _dump_layout(schema.observation),
        "extras": _dump_layouts(schema.extras),
        "outputs": None if schema.outputs is None else _dump_layouts(schema.outputs),
        "agents": None if schema.agents is None else list(schema.agents),
        "executed": None if schema.executed is None else _dump_layout(schema.executed),
        "plain": schema.plain,
        "scalar": schema.scalar,
        "aged": schema.aged,
        "outcomes": dict(schema.outcomes),
    }


def _load_schema(state: State) -> Schema:
    outputs, agents, executed = state["outputs"], state["agents"], state["executed"]
    return Schema(
        rows=state["rows"],
        batched=state["batched"],
        observation=_load_layout(state["observation"]),
        extras=_load_layouts(state["extras"]),
        outputs=None if outputs is None else _load_layouts(outputs),
        agents=None if agents is None else tuple(agents),
        executed=None if executed is None else _load_layout(executed),
        plain=state["plain"],
        scalar=state["scalar"],
        aged=state["aged"],
        outcomes=state.get("outcomes", {}),  # format 1 has none
    )


# Parts.


def _dump_layouts(layouts: Mapping[str, Layout]) -> State:
    return {name: _dump_layout(layout) for name, layout in layouts.items()}


def _load_layouts(state: State) -> dict[str, Layout]:
    return {name: _load_layout(one) for name, one in state.items()}


def _dump_layout(layout: Layout) -> State:
    return {"path": layout.path, "tree": _dump_tree(layout._tree)}


def _load_layout(state: State) -> Layout:
    return Layout(_load_tree(state["tree"]), state["path"])


def _dump_tree(tree: Any) -> list[Any]:
    if isinstance(tree, Leaf):
        kind = [tree.dtype.str, list(tree.shape), tree.bfloat16, tree.text, tree.max_length]
        return ["leaf", tree.path, *kind]
    if isinstance(tree, dict):
        return ["dict", list(tree), [_dump_tree(branch) for branch in tree.values()]]
    return ["tuple", [_dump_tree(branch) for branch in tree]]


def _load_tree(state: Sequence[Any]) -> Any:
    if state[0] == "leaf":
        return Leaf(state[1], np.dtype(state[2]), tuple(state[3]), *state[4:])
    if state[0] == "dict":
        return dict(zip(state[1], map(_load_tree, state[2]), strict=True))
    return tuple(map(_load_tree, state[1]))


def _load_counters(counters: Counters, state: Mapping[str, int]) -> None:
    for name, count in state.items():
        setattr(counters, name, count)


def _frozen_by_name(arrays: Mapping[str, Sequence[Array]], rows: int) -> State:
    return {name: [_frozen(array, rows) for array in mine] for name, mine in arrays.items()}


def _read_by_name(arrays: Mapping[str, Sequence[Array]], state: State) -> None:
    for name, stored in state.items():
        _read(arrays[name], stored)


def _frozen(array: Any, rows: int) -> Any:
    """Returns the first rows of what stands where an array stands."""
    if isinstance(array, CompressedRows):
        blobs = array._rows[:rows]
        lengths = np.array([-1 if blob is None else len(blob) for blob in blobs], np.int64)
        return {"lengths": lengths, "blobs": FrozenBlobs([blob for blob in blobs if blob])}
    if array.dtype.kind == "O":
        return {"strings": _dump_strings(array[:rows].reshape(-1).tolist())}
    return Frozen(array, rows)


def _read(arrays: Sequence[Any], stored: Sequence[Any]) -> None:
    for array, one in zip(arrays, stored, strict=True):
        if isinstance(array, CompressedRows):
            _load_compressed(array, one["lengths"].tolist(), one["blobs"])
        elif array.dtype.kind == "O":
            strings = _load_strings(one["strings"])
            array.reshape(-1)[: len(strings)] = strings
        else:
            one.read_into(array)


def _load_compressed(rows: CompressedRows, lengths: Sequence[int], stored: Stored) -> None:
    data = np.empty(stored.rows, np.uint8)
    stored.read_into(data)
    at = 0
    for slot, length in enumerate(lengths):
        if length >= 0:
            rows.restore(slot, data[at : at + length].tobytes())
            at += length


# Text. What was never written in an array of strings is none.


def _dump_texts(texts: Texts) -> State:
    return {
        "numbers": np.array([*texts._ids.values()], np.int64),
        "strings": _dump_strings([*texts._ids]),
    }


def _load_texts(texts: Texts, state: State) -> None:
    texts.restore(zip(_load_strings(state["strings"]), state["numbers"].tolist(), strict=True))


def _dump_strings(strings: Sequence[Any]) -> State:
    parts = [one.encode(errors="surrogatepass") if isinstance(one, str) else b"" for one in strings]
    return {
        "lengths": np.array([len(part) for part in parts], np.int64),
        "data": np.frombuffer(b"".join(parts), np.uint8),
    }


def _load_strings(state: State) -> list[str]:
    data, at, strings = state["data"].tobytes(), 0, []
    for length in state["lengths"].tolist():
        strings.append(data[at : at + length].decode(errors="surrogatepass"))
        at += length
    return strings


def frozen_in(value: Any) -> Iterator[Frozen | FrozenBlobs]:
    """Yields the frozen arrays in a state."""
    if isinstance(value, (Frozen, FrozenBlobs)):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from frozen_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from frozen_in(part)
