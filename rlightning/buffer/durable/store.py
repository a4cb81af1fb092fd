"""What a buffer server keeps on disk: its tables, and how far each writer got."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.checkpoint import write_checkpoint
from rlightning.buffer.durable.directory import POSITION, DataDirectory
from rlightning.buffer.durable.journal import Journal
from rlightning.buffer.durable.log import Log
from rlightning.buffer.durable.records import Kind, encode
from rlightning.buffer.durable.recovery import Discard, Recovery, WriterMark
from rlightning.buffer.durable.tables import TableJournal, dump_table, saved_config
from rlightning.buffer.pipeline import Item
from rlightning.errors import PreconditionError, ResourceExhaustedError, UnavailableError
from rlightning.latency.histogram import EDGES_S
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.status import DISK_FULL, NO_DATA_DIR
from rlightning.utils.config import BufferConfig
from rlightning.utils.failpoints import failpoint
from rlightning.utils.waiting import in_thread

logger = logging.getLogger(__name__)

# A checkpoint is made when the journal since the last one takes this, or what the tables take.
_LEAST_JOURNAL_BYTES = 64 * 2**20
_LOOK_EVERY_S = 0.5
# Requests whose answer is known if they come again.
_MAX_DISCARDS = 4096
_CLOSES = "the server stops, and makes no checkpoint any more"

_T = TypeVar("_T")


class DurableStore:
    """Journal and checkpoints of some tables, as their configuration wants them.

    `open` it before the tables are used, then `begin`. With durability `none` it makes checkpoints
    only, and without a data directory nothing.

    Args:
        config: Section `buffer`: `durability`, `data_dir`, `restore`, and the keys of checkpoints.
        tables: The tables by name, empty.
        read_items: Returns the items of an encoded Insert message of an env.

    Attributes:
        storage_id: Identifies what is stored: the same as before if nothing of it was lost.
        writers: How far the writers are that may come back; who stores on keeps it up to date.
        discards: Requests to discard episodes that were done, by their id, the oldest first.
    """

    def __init__(
        self,
        config: BufferConfig,
        tables: Mapping[str, BufferTable],
        read_items: Callable[[str, bytes], list[Item]],
    ) -> None:
        self.storage_id = uuid.uuid4().hex
        self.writers: dict[str, WriterMark] = {}
        self.discards: OrderedDict[str, Discard] = OrderedDict()
        self.durable = config.durability != "none"
        self._config = config
        self._tables = tables
        self._read_items = read_items
        self._directory: DataDirectory | None = None
        self._recovery: Recovery | None = None
        self._log: Log | None = None
        self._position = 0  # of the journal's end, where there is no log
        self._checkpointed = 0  # position of the last checkpoint
        self._saving = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # what makes checkpoints
        self._closing: asyncio.Task[None] | None = None

    # Lifecycle.

    def open(self) -> None:
        """Opens the data directory and loads from it what the configuration names; blocks.

        Raises:
            ConfigError: The directory cannot be used, or what it has does not fit.
            CorruptError: What it has is damaged; the message says where.
        """
        if self._config.data_dir is None:
            return
        self._directory = DataDirectory(Path(self._config.data_dir).expanduser())
        self._recovery = Recovery(
            self._directory,
            self._tables,
            self._read_items,
            durable=self.durable,
            power=self._config.durability == "power",
        )
        self._recovery.run(self._config.restore)
        self._position = self._checkpointed = self._recovery.end
        self.writers = self._recovery.writers
        self.discards = self._recovery.discards

    async def begin(
        self, *, on_full: Callable[[bool], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Writes down from now on what happens.

        Args:
            on_full: As of `Log`.
            on_lost: As of `Log`.

        Raises:
            OSError: The disk is full or broken.
        """
        directory, recovery = self._directory, self._recovery
        if directory is None or recovery is None:
            return
        if not recovery.storage_id:
            self.writers.clear()
            for table in self._tables.values():
                table.orphan()
        directory.upgrade()
        if self.durable:
            journal = Journal(
                directory.journal,
                recovery.end,
                power=self._config.durability == "power",
                fresh=recovery.needs_segment,
            )
            self._log = Log(journal, on_full=on_full, on_lost=on_lost)
            for table in self._tables.values():
                table.journal = TableJournal(self._log, table)
            if recovery.storage_id:
                self.storage_id = recovery.storage_id
            config = {name: saved_config(table) for name, table in self._tables.items()}
            self._append(Kind.START, {"storage_id": self.storage_id, "config": config})
        if recovery.left_behind and self.durable:
            await self.checkpoint()  # so that the journal that was left behind is never read again
        await self.settled()
        self._spawn(self._save_from_time_to_time(directory))

    async def close(self) -> None:
        """Ends checkpoints, writes what is left and lets others use the directory.

        That goes on if the wait for it is cancelled, as when a disk is slow: nobody else may have
        the directory while a thread still writes into it. Safe to repeat.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            try:
                if self._log is not None:
                    await self._log.close()
            finally:
                if self._directory is not None:
                    self._directory.close()
                    self._directory = None

    def _spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begins what `close` ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What happens to writers; what happens to tables they write down themselves.

    def know_writer(self, writer_id: str, env_id: str, next_seq: int) -> None:
        """Writes down that a writer is here."""
        self.writers[writer_id] = WriterMark(env_id, next_seq)
        self._append(Kind.WRITER, {"writer": writer_id, "env": env_id, "next": next_seq})

    def forget_writer(self, writer_id: str) -> None:
        """Forgets how far a writer was."""
        self.writers.pop(writer_id, None)

    def insert(
        self, tables: Sequence[str], writer_id: str, env_id: str, seq: int, data: bytes
    ) -> None:
        """Writes down that a message will be stored in tables, before anything of it is."""
        self.writers[writer_id] = WriterMark(env_id, seq + 1)
        fields = {"tables": tables, "writer": writer_id, "env": env_id, "seq": seq}
        self._append(Kind.INSERT, fields, data)
        failpoint("insert.journaled")

    def refuse(self, tables: Sequence[str], writer_id: str, env_id: str, seq: int) -> None:
        """Writes down that a message was not stored."""
        self.writers[writer_id] = WriterMark(env_id, seq + 1)
        fields = {"tables": tables, "writer": writer_id, "env": env_id, "seq": seq}
        self._append(Kind.REFUSE, fields)

    def discard(self, request_id: str, table: str, env_id: str, discarded: int) -> None:
        """Writes down that a request to discard an episode was done."""
        self.discards[request_id] = Discard(table, env_id, discarded)
        while len(self.discards) > _MAX_DISCARDS:
            self.discards.popitem(last=False)
        fields = {"table": table, "env": env_id, "request": request_id, "discarded": discarded}
        self._append(Kind.DISCARD, fields)

    def _append(self, kind: Kind, fields: dict[str, Any], data: bytes = b"") -> None:
        if self._log is not None:
            self._log.append(kind, encode(fields, data))

    def check(self) -> None:
        """Checks that something can be stored.

        Raises:
            ResourceExhaustedError: It could not be written down; reason `DISK_FULL`.
        """
        if self._log is not None:
            self._log.check()

    @property
    def behind(self) -> bool:
        """Whether so much waits to be written that writers should wait for it."""
        return self._log is not None and self._log.behind

    async def settled(self) -> None:
        """Returns once everything that happened is written as safely as the mode promises."""
        if self._log is not None:
            await self._log.settled()

    # Checkpoints.

    async def checkpoint(self, keep: Collection[str] | None = None) -> tuple[str, int]:
        """Writes a checkpoint while inserts and samples go on; one at a time.

        Args:
            keep: Names of others that are kept with this one, however old they get, until the next
                call that has this argument; None leaves those of the last such call.

        Returns:
            Its name, for `buffer.restore`, and its size in bytes.

        Raises:
            PreconditionError: There is no data directory.
            ResourceExhaustedError: The disk is full or broken; what was there before still is.
            UnavailableError: The store closes.
        """
        if self._closing is not None:
            raise UnavailableError(_CLOSES)
        directory = self._directory
        if directory is None:
            raise PreconditionError(
                "checkpoints need a folder: set buffer.data_dir", reason=NO_DATA_DIR
            )
        task = self._spawn(self._save_alone(directory, keep))
        try:
            await asyncio.wait({task})
        finally:  # a caller that is cancelled goes on once nothing is written any more
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():  # and the caller is not
            raise UnavailableError(_CLOSES)
        return task.result()

    async def _save_alone(
        self, directory: DataDirectory, keep: Collection[str] | None = None
    ) -> tuple[str, int]:
        async with self._saving:
            # Writers are held up while so much is written.
            with nullcontext() if self._log is None else self._log.sparing_loop():
                return await self._save(directory, keep)

    async def _save(
        self, directory: DataDirectory, keep: Collection[str] | None
    ) -> tuple[str, int]:
        begun = time.monotonic()
        position = self._position if self._log is None else self._log.end
        state = {
            "position": position,
            "storage_id": self.storage_id if self.durable else "",
            "created_ns": time.time_ns(),
            "config": {name: saved_config(table) for name, table in self._tables.items()},
            "tables": {name: dump_table(table) for name, table in self._tables.items()},
            "writers": [[name, *mark] for name, mark in self.writers.items()],
            "discards": [[one, *done] for one, done in self.discards.items()],
        }
        failpoint("checkpoint.captured")
        name = directory.next_name()
        try:
            nbytes = await write_checkpoint(
                directory.checkpoints / name,
                state,
                notes={POSITION: str(position)},
                before_rename=self.settled,
                spare=directory.spare,
            )
        except OSError as error:
            raise ResourceExhaustedError(
                f"the checkpoint cannot be written: {error}", reason=DISK_FULL
            ) from error
        self._checkpointed = position
        if keep is not None:
            await in_thread(None, directory.hold, {name, *keep})
        await self._prune(directory)
        logger.info("%s: %d bytes in %.2f s", name, nbytes, time.monotonic() - begun)
        return name, nbytes

    async def _prune(self, directory: DataDirectory) -> None:
        """Removes checkpoints, and those parts of the journal that none of the others needs."""
        position = await in_thread(None, directory.prune, self._config.checkpoint_keep)
        failpoint("checkpoint.pruned")
        if self._log is not None:
            await self._log.run(lambda journal: journal.forget(position))

    async def _save_from_time_to_time(self, directory: DataDirectory) -> None:
        interval_s = self._config.checkpoint_interval_s
        last = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, interval_s or _LOOK_EVERY_S))
            due = interval_s is not None and time.monotonic() - last >= interval_s
            if self._log is not None:
                grown = self._log.end - self._checkpointed
                due |= grown > max(_LEAST_JOURNAL_BYTES, self._nbytes())
            if due:
                last = time.monotonic()
                try:
                    await self._save_alone(directory)
                except Exception:
                    logger.exception("a checkpoint failed; the next one is tried later")

    def _nbytes(self) -> int:
        return sum(
            storage.nbytes
            for table in self._tables.values()
            for storage in table.buffer.storages.values()
        )

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now: of the journal, if there is one."""
        if self._log is None:
            return
        text = "How long writing the journal took, syncing included."
        metrics.histogram("journal_write_seconds", text, EDGES_S, self._log.writes.classic())
        text = "How long the disk took to confirm it (durability: power)."
        metrics.histogram("wal_fsync_seconds", text, EDGES_S, self._log.syncs.classic())

    def stats(self) -> dict[str, Any]:
        """Returns figures about it, for people."""
        stats: dict[str, Any] = {"durability": self._config.durability}
        if self._directory is not None:
            stats["checkpoints"] = self._directory.names()
        if self._log is not None:
            stats |= {
                "journal_position": self._log.end,
                "journal_pending_bytes": self._log.pending_bytes,
                "journal_since_checkpoint_bytes": self._log.end - self._checkpointed,
                "disk_full": self._log.failure is not None,
            }
        return stats
