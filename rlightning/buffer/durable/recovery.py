"""Loading what a data directory holds: a checkpoint, then what the journal has after it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlightning.buffer.buffer_table import BufferTable, insert_into
from rlightning.buffer.durable.checkpoint import read_checkpoint
from rlightning.buffer.durable.directory import DataDirectory
from rlightning.buffer.durable.files import CorruptError
from rlightning.buffer.durable.journal import JournalReader, Record, journal_limit
from rlightning.buffer.durable.records import Kind, decode
from rlightning.buffer.durable.tables import apply, check_config, load_table
from rlightning.buffer.pipeline import Item
from rlightning.errors import ConfigError, ReplayError

logger = logging.getLogger(__name__)


class WriterMark(NamedTuple):
    """How far a writer is.

    Attributes:
        env_id: Id of the env whose rows it writes.
        next_seq: Number of its next message; 0 if whatever comes first is taken.
    """

    env_id: str
    next_seq: int


class Discard(NamedTuple):
    """A request to discard an episode that was done.

    Attributes:
        table: Name of the table.
        env_id: Id of the env.
        discarded: How many transitions were.
    """

    table: str
    env_id: str
    discarded: int


class Recovery:
    """Loads a data directory into empty tables.

    Args:
        directory: The directory.
        tables: The tables by name.
        read_items: Returns the items of an encoded Insert message of an env.
        durable: Whether what comes will be written down, so that nothing is lost in between.
        power: Whether the disk has confirmed what the journal has, so that no crash can cut it.

    Attributes:
        storage_id: The one of before, if nothing of what was acked is lost; else empty.
        writers: How far the writers were.
        discards: Requests to discard episodes that were done, by their id.
        end: Position at which the journal goes on.
        needs_segment: Whether it goes on in a segment of its own.
        left_behind: Whether it has records that were not done again and never shall be.
    """

    def __init__(
        self,
        directory: DataDirectory,
        tables: Mapping[str, BufferTable],
        read_items: Callable[[str, bytes], list[Item]],
        *,
        durable: bool,
        power: bool = False,
    ) -> None:
        self.storage_id = ""
        self.writers: dict[str, WriterMark] = {}
        self.discards: OrderedDict[str, Discard] = OrderedDict()
        self.end = 0
        self.needs_segment = False
        self.left_behind = False
        self._directory = directory
        self._tables = tables
        self._read_items = read_items
        self._durable = durable
        self._power = power
        # An insert that failed when it was done again, as it has to if it was refused then.
        self._failed: tuple[str, int, Exception] | None = None

    def run(self, restore: str) -> None:
        """Loads what `buffer.restore` names.

        Raises:
            ConfigError: It cannot be loaded into these tables, or must not be.
            CorruptError: It is damaged.
        """
        begun = time.monotonic()
        if restore == "none":
            self._load_nothing()
        elif restore == "latest":
            position = self._load_latest()
            count = self._replay(position)
            logger.info(
                "loaded %s in %.2f s: %d transitions, after %d records of the journal",
                self._directory.path,
                time.monotonic() - begun,
                sum(table.buffer.num_transitions() for table in self._tables.values()),
                count,
            )
        else:
            self._load_named(restore)
        if not self._durable:
            self.storage_id = ""

    def _load_nothing(self) -> None:
        limit = journal_limit(self._directory.journal)
        if self._durable and (limit or self._directory.names()):
            raise ConfigError(
                f"buffer.restore: {self._directory.path} holds data already; 'latest' goes on with "
                "it, another buffer.data_dir begins anew"
            )
        self.end, self.needs_segment = limit, True

    def _load_latest(self) -> int:
        """Loads the newest checkpoint that is whole; returns where the journal goes on."""
        damaged = []
        for name in self._directory.names():
            try:
                return self._load(name)
            except CorruptError as error:
                damaged.append(name)
                logger.warning("%s is damaged, the one before is taken: %s", name, error)
                self._empty()
        if damaged and not self._begins_at_0():
            raise CorruptError(
                f"{self._directory.path}: all checkpoints are damaged: {', '.join(damaged)}"
            )
        return 0

    def _begins_at_0(self) -> bool:
        try:
            next(iter(JournalReader(self._directory.journal, 0)), None)
        except CorruptError:
            return False
        return journal_limit(self._directory.journal) > 0

    def _load_named(self, name: str) -> None:
        names = self._directory.names()
        if name not in names:
            raise ConfigError(
                f"buffer.restore: no checkpoint '{name}' in {self._directory.path}; there are "
                f"{', '.join(names) or 'none'}"
            )
        self._load(name)
        self.storage_id = ""  # what was acked after it is not here
        self.end, self.needs_segment = journal_limit(self._directory.journal), True
        self.left_behind = True

    def _load(self, name: str) -> int:
        state = read_checkpoint(self._directory.checkpoints / name)
        missing = sorted(state["tables"].keys() - self._tables.keys())
        if missing:
            raise ConfigError(
                f"buffer: {name} has the table '{missing[0]}', which is not configured"
            )
        self._check_configs(state["config"], name)
        for table, one in state["tables"].items():
            load_table(self._tables[table], one)
        self.storage_id = state["storage_id"]
        self.writers = {writer: WriterMark(env, seq) for writer, env, seq in state["writers"]}
        self.discards = OrderedDict((one, Discard(*done)) for one, *done in state["discards"])
        position: int = state["position"]
        return position

    def _check_configs(self, saved: Mapping[str, Any], where: str) -> None:
        for name, config in saved.items():
            if name in self._tables:
                check_config(self._tables[name], config, where)

    def _empty(self) -> None:
        for table in self._tables.values():
            table.reset()
        self.writers = {}
        self.discards.clear()

    # The journal.

    def _replay(self, position: int) -> int:
        reader = JournalReader(self._directory.journal, position)
        count = 0
        for record in reader:
            try:
                self._apply(record)
            except ConfigError:
                raise
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise CorruptError(
                    f"{self._directory.journal}: the record at {record.position} cannot be done "
                    f"again: {type(error).__name__}: {error}"
                ) from error
            count += 1
        if self._failed is not None:  # that it was refused is not written down, nor acked
            writer, seq, _ = self._failed
            self.writers[writer] = self.writers[writer]._replace(next_seq=seq)
        if reader.end is None or reader.end < position:
            self._take_note_of_cut(reader.end, position)
            self.end, self.needs_segment = position, True
        else:
            self.end = reader.end
        return count

    def _take_note_of_cut(self, end: int | None, position: int) -> None:
        """Refuses a journal that ends before the checkpoint that was loaded, or warns of it.

        Raises:
            CorruptError: The disk had confirmed what is missing.
        """
        if not self.storage_id:  # whoever wrote the checkpoint kept no journal
            return
        ends = "has nothing" if end is None else f"ends at {end}"
        said = (
            f"{self._directory.journal}: the journal {ends}, before the newest checkpoint, which "
            f"was written at {position}"
        )
        if self._power:
            raise CorruptError(
                f"{said}: what was acked after it may be lost; buffer.restore with the name of the "
                "checkpoint loads that"
            )
        logger.warning("%s: what was acked after it is lost, if anything was", said)

    def _apply(self, record: Record) -> None:
        fields, data = decode(record.payload)
        kind = record.kind
        failed, self._failed = self._failed, None
        if failed is not None and (kind, *failed[:2]) != (
            Kind.REFUSE,
            fields.get("writer"),
            fields.get("seq"),
        ):
            raise ConfigError(
                f"a message that was stored before cannot be stored now: {failed[2]}"
            ) from failed[2]
        if kind == Kind.START:
            self._check_configs(fields["config"], "the journal")
            if fields["storage_id"] != self.storage_id:
                self.writers = {}
                for table in self._tables.values():
                    table.orphan()
            self.storage_id = fields["storage_id"]
        elif kind == Kind.WRITER:
            self.writers[fields["writer"]] = WriterMark(fields["env"], fields["next"])
        elif kind in (Kind.INSERT, Kind.REFUSE):
            self._apply_message(kind, fields, data)
        else:
            apply(self._table(fields["table"]), kind, fields, data)
        if kind == Kind.DISCARD:
            done = Discard(fields["table"], fields["env"], fields["discarded"])
            self.discards[fields["request"]] = done

    def _apply_message(self, kind: int, fields: Mapping[str, Any], data: memoryview) -> None:
        tables, env_id = [self._table(name) for name in fields["tables"]], fields["env"]
        writer, seq = fields["writer"], fields["seq"]
        self.writers[writer] = WriterMark(env_id, seq + 1)
        if kind == Kind.REFUSE:
            for table in tables:
                table.refuse(env_id)
            return
        try:
            insert_into(tables, env_id, self._read_items(env_id, bytes(data)), again=True)
        except (ReplayError, TypeError, ValueError) as error:
            self._failed = (writer, seq, error)

    def _table(self, name: str) -> BufferTable:
        table = self._tables.get(name)
        if table is None:
            raise ConfigError(
                f"buffer: the journal has the table '{name}', which is not configured"
            )
        return table
