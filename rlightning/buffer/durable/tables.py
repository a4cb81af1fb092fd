"""One table: what happens to it, as records; what it holds, as a state; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlightning.buffer.buffer_table import BufferTable, Producer
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
from rlightning.buffer.sampler import Sampler
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta
from rlightning.wire import decode_env_meta, encode_env_meta


class TableJournal:
    """Writes down what happens to one table; see `BufferTable.journal`.

    Args:
        log: Where.
        table: Name of the table.
    """

    def __init__(self, log: Log, table: str) -> None:
        self._log = log
        self._table = table

    def _append(self, kind: Kind, data: bytes = b"", **fields: Any) -> None:
        self._log.append(kind, encode({"table": self._table, **fields}, data))

    def opened(self, meta: EnvMeta, writer_id: str) -> None:
        """A writer may bring the rows of an env."""
        self._append(Kind.OPEN, encode_env_meta(meta), writer=writer_id)

    def closed(self, env_id: str, writer_id: str) -> None:
        """It will not bring any more."""
        self._append(Kind.CLOSE, env=env_id, writer=writer_id)

    def cut(self, env_id: str) -> None:
        """The open episodes of an env were ended from outside."""
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

    def drawn(self, sampler: Sampler, sampled_total: int) -> None:
        """A batch was drawn."""
        self._append(Kind.DRAWN, sampled=sampled_total, rng=dump_rng(sampler))


def apply(table: BufferTable, kind: int, fields: Mapping[str, Any], data: memoryview) -> None:
    """Does to a table what a record of it tells; but for inserts, which come with their writer."""
    if kind == Kind.OPEN:
        table.open_writer(decode_env_meta(bytes(data)), fields["writer"])
    elif kind == Kind.CLOSE:
        table.close_writer(fields["env"], fields["writer"])
    elif kind == Kind.CUT:
        table.truncate(fields["env"])
    elif kind == Kind.CLEAR:
        table.clear()
    elif kind == Kind.DRAWN:
        load_rng(table.sampler, fields["rng"])
        table.sampled_total = fields["sampled"]
    elif kind == Kind.PRIORITIES:
        count = fields["count"]
        numbers = np.frombuffer(data, np.int64)
        generations = numbers[2 * count :] if len(numbers) > 2 * count else None
        priorities = numbers[count : 2 * count].view(np.float64)
        table.update_priorities(numbers[:count], priorities, generations)
    else:
        raise ValueError(f"no record of a table: {kind}")


def dump_table(table: BufferTable) -> dict[str, Any]:
    """Returns what a table holds; its columns are `Frozen`."""
    return {
        "storage": dump_storage(table.buffer.storages[0]),
        "sampler": dump_sampler(table.sampler),
        "sampled_total": table.sampled_total,
        "producers": {env_id: one.writer_id for env_id, one in table.producers.items()},
    }


def load_table(table: BufferTable, state: Mapping[str, Any]) -> None:
    """Puts into an empty table what `dump_table` returned of another."""
    load_storage(table.buffer.storages[0], state["storage"])
    load_sampler(table.sampler, state["sampler"])
    table.sampled_total = state["sampled_total"]
    table.take_over(Producer(env_id, writer) for env_id, writer in state["producers"].items())


def saved_config(table: BufferTable) -> dict[str, Any]:
    """Returns those keys of its configuration that what it holds depends on."""
    config = table.buffer.config
    sampler = config.sampler
    assert sampler is not None  # the config's validator sets one
    return {
        "type": config.type,
        "capacity": config.capacity,
        "auto_truncate_episode": config.auto_truncate_episode,
        "columns": sorted(config.columns),
        "sampler.type": sampler.type,
        "sampler.alpha": sampler.alpha,
        "storage.mode": config.storage.mode,
        "storage.unit": config.storage.unit,
        "storage.removal": config.storage.removal,
        "storage.frame_stack": {
            path: stack.axis for path, stack in sorted(config.storage.frame_stack.items())
        },
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
