"""One table: what happens to it, as records; what it holds, as a state; and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.leaving import (
    dump_lending,
    dump_rollouts,
    load_lending,
    load_rollouts,
)
from rlightning.buffer.durable.log import Log
from rlightning.buffer.durable.records import Kind, encode
from rlightning.buffer.durable.state import (
    dump_rng,
    dump_sampler,
    dump_storage,
    load_rng,
    load_sampler,
    load_storage,
)
from rlightning.buffer.lending import RolloutLending
from rlightning.buffer.taken import Taken
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta
from rlightning.wire import decode_env_meta, encode_env_meta

logger = logging.getLogger(__name__)


class TableJournal:
    """Writes down what happens to one table; see `BufferTable.journal`.

    Args:
        log: Where.
        table: The table.
    """

    def __init__(self, log: Log, table: BufferTable) -> None:
        self._log = log
        self._table = table

    def _append(self, kind: Kind, data: bytes = b"", **fields: Any) -> None:
        self._log.append(kind, encode({"table": self._table.name, **fields}, data))

    def opens(self, meta: EnvMeta, writer_id: str) -> None:
        """A writer will bring the rows of an env, unless that fails."""
        self._append(Kind.OPEN, encode_env_meta(meta), writer=writer_id)

    def closes(self, env_id: str, writer_id: str) -> None:
        """It will not bring any more."""
        self._append(Kind.CLOSE, env=env_id, writer=writer_id)

    def cuts(self, env_id: str) -> None:
        """The open episodes of an env are about to be ended from outside."""
        self._append(Kind.CUT, env=env_id)

    def cleared(self) -> None:
        """The table was emptied."""
        self._append(Kind.CLEAR)

    def prioritised(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Priorities were set."""
        arrays = [np.asarray(indices, np.int64), np.asarray(priorities, np.float64)]
        if generations is not None:
            arrays.append(np.asarray(generations, np.int64))
        data = b"".join(array.tobytes() for array in arrays)
        self._append(Kind.PRIORITIES, data, count=len(arrays[0]))

    def drawn(self, rank: int, world_size: int) -> None:
        """A batch that stays was drawn, for one of several learners."""
        table = self._table
        self._append(
            Kind.DRAWN,
            rank=rank,
            world_size=world_size,
            sampled=table.sampled_total,
            limiter=None if table.limiter is None else table.limiter.sampled,
            rng=dump_rng(table.sampler.generator(rank, world_size)),
        )

    def lent(self, taken: Taken) -> None:
        """A batch that leaves was lent to a learner."""
        self._append(
            Kind.LEND,
            count=taken.units,
            rank=taken.rank,
            world_size=taken.world_size,
            learner=taken.learner,
        )

    def used(self, rank: int, world_size: int, batch_id: int, *, returned: bool) -> None:
        """It was used, perhaps after it was given back."""
        self._append(Kind.USED, rank=rank, world_size=world_size, batch=batch_id, returned=returned)

    def given_back(self, taken: Taken) -> None:
        """It was given back."""
        self._append(Kind.RETURN, rank=taken.rank, batch=taken.batch_id)


def apply(table: BufferTable, kind: int, fields: Mapping[str, Any], data: memoryview) -> None:
    """Does to a table what a record of it tells; but for inserts, which come with their writer."""
    if kind in (Kind.OPEN, Kind.CLOSE, Kind.CUT):
        _apply_ending(table, kind, fields, data)
    elif kind == Kind.CLEAR:
        table.clear()
    elif kind == Kind.DISCARD:
        table.discard(fields["env"])
    elif kind == Kind.DRAWN:
        load_rng(table.sampler.generator(fields["rank"], fields["world_size"]), fields["rng"])
        table.sampled_total = fields["sampled"]
        if table.limiter is not None and fields["limiter"] is not None:
            table.limiter.sampled = fields["limiter"]
    elif kind in (Kind.LEND, Kind.USED, Kind.RETURN):
        _apply_lending(table, kind, fields)
    elif kind == Kind.PRIORITIES:
        count = fields["count"]
        numbers = np.frombuffer(data, np.int64)
        generations = numbers[2 * count :] if len(numbers) > 2 * count else None
        priorities = numbers[count : 2 * count].view(np.float64)
        table.update_priorities(numbers[:count], priorities, generations)
    else:
        raise ValueError(f"no record of a table: {kind}")


def _apply_lending(table: BufferTable, kind: int, fields: Mapping[str, Any]) -> None:
    """Does what becomes of batches that leave the table."""
    if table.lending is None:
        raise ValueError("no batch leaves this table")
    if kind == Kind.LEND:
        lent = table.lend(fields["count"], fields["rank"], fields["world_size"], fields["learner"])
        if lent is None:
            raise ValueError("there is no such batch")
    elif kind == Kind.USED and fields["returned"]:
        shares = table.lending.shares if isinstance(table.lending, RolloutLending) else None
        # Format 1 does not say it: whoever shared then could ack.
        world_size = fields.get("world_size", 1 if shares is None else shares.world_size)
        table.release_returned(fields["rank"], world_size, fields["batch"], None)
    else:
        taken = table.lending.lent[fields["rank"], fields["batch"]]
        (table.release if kind == Kind.USED else table.give_back)(taken)


def _apply_ending(
    table: BufferTable, kind: int, fields: Mapping[str, Any], data: memoryview
) -> None:
    """Does what ends open episodes, and is written down before: it may have failed.

    It does in a storage that is full and does not overwrite, and where a function of the user
    raises; in the same way each time.
    """
    meta = decode_env_meta(bytes(data)) if kind == Kind.OPEN else None
    try:
        if meta is not None:
            table.open_writer(meta, fields["writer"])
        elif kind == Kind.CLOSE:
            table.close_writer(fields["env"], fields["writer"])
        else:
            table.truncate(fields["env"])
    except Exception as error:
        logger.warning("table '%s': %s failed again: %s", table.name, Kind(kind).name, error)


def dump_table(table: BufferTable) -> dict[str, Any]:
    """Returns what a table holds; its columns are `Frozen`."""
    return {
        "storage": dump_storage(table.buffer.storages[0]),
        "rollouts": dump_rollouts(table.buffer.storages[0]),
        "lending": None if table.lending is None else dump_lending(table.lending),
        "sampler": dump_sampler(table.sampler),
        "sampled_total": table.sampled_total,
        "limiter": table.limiter_state(),
        "producers": {env_id: one.writer_id for env_id, one in table.producers.items()},
    }


def load_table(table: BufferTable, state: Mapping[str, Any]) -> None:
    """Puts into an empty table what `dump_table` returned of another."""
    load_storage(table.buffer.storages[0], state["storage"])
    load_rollouts(table.buffer.storages[0], state.get("rollouts"))
    if table.lending is not None:
        load_lending(table.lending, state["lending"])
    load_sampler(table.sampler, state["sampler"])
    table.sampled_total = state["sampled_total"]
    table.restore_limiter(state["limiter"])
    for env_id, writer_id in state["producers"].items():
        table.producers.add(env_id, writer_id)


def saved_config(table: BufferTable) -> dict[str, Any]:
    """Returns those keys of its configuration that what it holds depends on."""
    config = table.buffer.config
    sampler = config.sampler
    assert sampler is not None  # the config's validator sets one
    limiter = table.limiter
    leaves: dict[str, Any] = {}
    if table.serves_rollouts:
        leaves = {"rollout_length": config.rollout_length, "max_rollouts": config.max_rollouts}
    elif table.queue is not None:
        leaves = {"rate_limiter.queue_size": "a queue"}  # of any size
    return {
        **leaves,
        "type": config.type,
        "capacity": config.capacity,
        "auto_truncate_episode": config.auto_truncate_episode,
        "columns": sorted(config.columns),
        "rate_limiter.samples_per_insert": None if limiter is None else limiter.samples_per_insert,
        "sampler.type": sampler.type,
        "sampler.alpha": sampler.alpha,
        "storage.mode": config.storage.mode,
        "storage.unit": config.storage.unit,
        "storage.removal": config.storage.removal,
        "storage.compression": dict(sorted(config.storage.compression.items())),
        "storage.frame_stack": {
            path: stack.axis for path, stack in sorted(config.storage.frame_stack.items())
        },
        **{f"functions.{key}": name for key, name in config.functions.to_dict().items()},
    }


def check_config(table: BufferTable, saved: Mapping[str, Any], where: str) -> None:
    """Checks that a table is configured as the one that was saved.

    Raises:
        ConfigError: It is not; the message names the key.
    """
    mine = saved_config(table)
    for key in sorted({*mine, *saved}):
        if mine.get(key) != saved.get(key):
            raise ConfigError(
                f"buffer.{key}: {mine.get(key)!r}, but {where} was written with {saved.get(key)!r} "
                f"(table '{table.name}'): set it back, or begin with another buffer.data_dir"
            )
