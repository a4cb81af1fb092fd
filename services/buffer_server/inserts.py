"""Insert: numbered messages, each stored once and acked when it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlightning.buffer.buffer_table import BufferTable, insert_into
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.rendezvous import BLOCKED
from rlightning.errors import (
    AlreadyExistsError,
    CodecError,
    ConfigError,
    InvalidRequestError,
    InvalidRowError,
    NotFoundError,
    PreconditionError,
    ReplayError,
    UnavailableError,
)
from rlightning.latency import LatencyStats
from rlightning.latency.stages import STORE
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.status import to_error_status
from rlightning.utils.failpoints import failpoint
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Reader

from .tables import Tables
from .writers import WaitingInsert, Writer, items_of

_LOG = logging.getLogger(__name__)

# A client that keeps to a window never has so many unacked; one that does not is read no further.
_MAX_WAITING = 64
_MAX_WAITING_BYTES = 64 * 2**20
# What a value takes once it is read, beside its bytes.
_VALUE_BYTES = 256
# Names are kept for as long as their writer is known, and logged.
_MAX_NAME = 128
# The first number of a writer that goes on; those after it have to fit in 64 bits, too.
_MAX_BASE = 2**62
# An ack costs as much as an insert of small rows, so one stands for several items: at once for this
# many, and after this long for less.
_ACK_EVERY = 4
_ACK_AFTER_S = 0.001
# Writers whose session is over, and whose numbers are known if they come back.
_MAX_GONE = 4096


@dataclass
class InsertCounts:
    """Counters of the method, since the start."""

    messages_total: int = 0
    duplicates_total: int = 0
    gaps_total: int = 0
    refused_total: int = 0
    writers_rebased_total: int = 0


class InsertHandler(SessionHandler[pb.InsertRequest, pb.InsertResponse]):
    """Serves the sessions of `Insert`.

    Args:
        tables: The tables.
        store: Where what is acked is kept.

    Attributes:
        counts: Counters.
        latency: In seconds: `store` (checking and copying a message), and `withheld` (how long an
            ack waited for room, where it did).
    """

    request_type = pb.InsertRequest
    response_type = pb.InsertResponse

    def __init__(self, tables: Tables, store: DurableStore) -> None:
        self.counts = InsertCounts()
        self.latency = LatencyStats()
        self._tables = tables
        self._durable = store
        self.shares_memory = not store.durable  # a journal needs messages that have everything
        self._writers: OrderedDict[str, Writer] = OrderedDict()
        self._leaving = False

    # What was before.

    def take_over(self) -> None:
        """Takes note of the writers of before, which may come back."""
        for writer_id, (env_id, next_seq) in self._durable.writers.items():
            tables = tuple(
                table
                for table in self._tables.values()
                if table.producers.of(env_id, writer_id) is not None
            )
            default = tuple(self._tables.values())[:1]
            self._writers[writer_id] = Writer(writer_id, env_id, tables or default, next_seq)
        self._forget_writers()

    def close_absent(self) -> None:
        """Ends what writers of before left open that did not come back."""
        for table in self._tables.values():
            for env_id, producer in tuple(table.producers.items()):
                writer = self._writers.get(producer.writer_id)
                if writer is None or writer.session is None:
                    table.close_writer(env_id, producer.writer_id)

    def leave(self) -> None:
        """Takes note that the server stops: writers go on with what is open once it is back."""
        self._leaving = self._durable.durable

    @property
    def waiting(self) -> int:
        """Messages that wait for room, of all writers."""
        return sum(len(writer.waiting) for writer in self._writers.values())

    # Sessions.

    async def on_open(
        self, session: Session, reader: Reader[pb.InsertRequest]
    ) -> pb.InsertResponse:
        """Lets a writer bring the rows of its env, from the first message that is not stored."""
        self._durable.check()
        hello = reader.message.hello
        meta = session.spec
        if meta is None or not meta.env_id:
            raise InvalidRequestError("hello needs a spec with the id of the env that is written")
        names = {"writer_id": hello.writer_id, "spec.env_id": meta.env_id}
        for name, value in {**names, "storage_id": hello.storage_id}.items():
            if len(value) > _MAX_NAME or (not value and name in names):
                raise InvalidRequestError(
                    f"hello needs a {name} of at most {_MAX_NAME} characters, got {len(value)}"
                )
        tables = self._tables.all_named(hello.tables)
        self._refuse_rival(hello.writer_id, meta.env_id, tables, session)
        writer = self._writer_of(hello, meta.env_id, tables)
        self._stop(writer)
        for table in writer.tables:
            if table not in tables:
                table.close_writer(writer.env_id, writer.writer_id)
        writer.tables = tables
        try:
            # Another writer's pending rows of this env are not joined to what this one brings.
            for table in tables:
                table.open_writer(meta, writer.writer_id)
        except (ConfigError, ReplayError):
            self._close(writer)
            raise
        writer.session = session
        session.state = writer
        self._durable.know_writer(writer.writer_id, writer.env_id, writer.next_seq)
        try:
            await self._durable.settled()
        except BaseException:
            if not session.resumed:  # it is forgotten, and so nobody says that it has ended
                writer.session = None
                loop, window_s = asyncio.get_running_loop(), session.rpc.resume_window_s
                loop.call_later(window_s, self._close_if_absent, writer)
            raise
        self._start(writer, self._send_acks(writer, session))
        response = pb.InsertResponse()
        response.welcome.storage_id = self._durable.storage_id
        # What was refused comes again, for its client to be told so.
        response.welcome.next_seq = min(writer.refused, default=writer.next_seq)
        bounds = [table.max_items for table in tables if table.max_items]
        response.welcome.max_items = min(bounds, default=0)
        return response

    def _close_if_absent(self, writer: Writer) -> None:
        """Ends what a writer left open that has not come back."""
        if writer.session is None and not self._leaving:
            self._close(writer)

    @staticmethod
    def _close(writer: Writer) -> None:
        for table in writer.tables:
            table.close_writer(writer.env_id, writer.writer_id)

    def _refuse_rival(
        self, writer_id: str, env_id: str, tables: tuple[BufferTable, ...], session: Session
    ) -> None:
        """Refuses to mix the rows of two clients that are both here."""
        producers = (table.producers.get(env_id) for table in tables)
        names = {writer_id, *(producer.writer_id for producer in producers if producer is not None)}
        for writer in filter(None, map(self._writers.get, names)):
            rival = writer.session
            if rival is not None and rival is not session and rival.owner is not None:
                raise AlreadyExistsError(
                    f"client {rival.client_id} at {rival.peer} writes the rows of env "
                    f"{writer.env_id!r}; give each env server an env.name of its own"
                )

    def _writer_of(
        self, hello: pb.InsertHello, env_id: str, tables: tuple[BufferTable, ...]
    ) -> Writer:
        writer = self._writers.get(hello.writer_id)
        if writer is None:
            writer = self._writers[hello.writer_id] = Writer(hello.writer_id, env_id, tables)
            self._forget_writers()
            if hello.storage_id:
                # It has written before, to a storage that is gone, or it was forgotten since: the
                # oldest message that it has no ack for becomes the base.
                writer.next_seq = 0
                self.counts.writers_rebased_total += 1
                _LOG.warning(
                    "what writer %s of env %s wrote before, to storage %s, is not here",
                    *(hello.writer_id, env_id, hello.storage_id),
                )
        elif writer.env_id != env_id:
            raise PreconditionError(
                f"writer {hello.writer_id} is that of env {writer.env_id!r}, not {env_id!r}"
            )
        self._writers.move_to_end(hello.writer_id)
        return writer

    def _forget_writers(self) -> None:
        surplus = len(self._writers) - _MAX_GONE
        if surplus > 0:
            gone = [key for key, writer in self._writers.items() if writer.session is None]
            for key in gone[:surplus]:
                del self._writers[key]
                self._durable.forget_writer(key)

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Forgets what waits, which comes again; and the rows of a writer that does not."""
        writer: Writer = session.state
        if writer.session is session:
            self._stop(writer)
            if not resumable:
                writer.session = None
            if not resumable and not self._leaving:
                self._close(writer)

    def _start(self, writer: Writer, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        writer.tasks.add(task)
        task.add_done_callback(lambda done: self._finished(writer, done))

    def _finished(self, writer: Writer, task: asyncio.Task[None]) -> None:
        writer.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            session = writer.session
            if session is not None and session.owner is not None and isinstance(error, Exception):
                session.owner.end(error)  # the client must not wait for acks that never come

    def _stop(self, writer: Writer) -> None:
        for task in writer.tasks:
            task.cancel()
        writer.transit.give_back(sum(message.nbytes for message in writer.waiting))
        writer.waiting.clear()
        writer.moved.set()
        self._note_waiting(writer)

    # Messages.

    async def on_message(self, session: Session, reader: Reader[pb.InsertRequest]) -> None:
        """Stores a message, or keeps it until there is room for it."""
        if reader.message.WhichOneof("body") != "insert":
            raise InvalidRequestError("expected an insert")
        writer: Writer = session.state
        if writer.session is not session:
            raise PreconditionError("another session writes under this writer_id", reason="FENCED")
        self._durable.check()
        if self._durable.behind:
            await self._durable.settled()
        seq = reader.message.insert.seq
        self.counts.messages_total += 1
        if writer.next_seq == 0 and seq > 0:
            if seq > _MAX_BASE:
                raise InvalidRequestError(f"seq: expected at most {_MAX_BASE}, got {seq}")
            writer.next_seq = seq
        expected = writer.next_seq + len(writer.waiting)
        if seq != expected:
            await self._out_of_turn(writer, session, seq, expected)
            return
        message = self._read(writer, reader, session)
        if writer.waiting or not self._store(writer, message):
            self._keep(writer, message)
        while (
            len(writer.waiting) >= _MAX_WAITING
            or len(writer.refused) >= _MAX_WAITING
            or (
                len(writer.waiting) > 1
                and sum(message.nbytes for message in writer.waiting) >= _MAX_WAITING_BYTES
            )
        ):
            writer.moved.clear()
            await writer.moved.wait()

    def _keep(self, writer: Writer, message: WaitingInsert) -> None:
        """Lets a message wait for room.

        Raises:
            UnavailableError: Too much waits already, of all writers; this one sends it again.
        """
        transit = writer.transit
        if not transit.take(message.nbytes):
            raise UnavailableError(
                f"a message of {message.nbytes} bytes has to wait for room, and {transit.used} of "
                f"{transit.max_bytes} bytes for that are in use (half of buffer.max_bytes)",
                reason="NO_ROOM",
            )
        writer.waiting.append(message)
        self._note_waiting(writer)
        if len(writer.waiting) == 1:
            self._start(writer, self._store_waiting(writer))

    async def _out_of_turn(self, writer: Writer, session: Session, seq: int, expected: int) -> None:
        if seq < expected:
            self.counts.duplicates_total += 1
            writer.progress.set()
            return
        self.counts.gaps_total += 1
        response = pb.InsertResponse()
        response.ack.seq = writer.next_seq - 1
        response.ack.expected_seq = expected
        await session.send(response)

    @staticmethod
    def _mark(writer: Writer, message: WaitingInsert) -> tuple[list[str], str, str, int]:
        """Returns how a message whose turn it is is written down."""
        names = [table.name for table in message.tables]
        return names, writer.writer_id, writer.env_id, writer.next_seq

    def _read(
        self, writer: Writer, reader: Reader[pb.InsertRequest], session: Session
    ) -> WaitingInsert:
        name, data = reader.message.insert.table, bytes(reader.data)
        message = WaitingInsert(writer.tables, [], None, data, session.arrival, reader.nbytes)
        try:
            if name:
                table = self._tables.named(name)
                if table not in writer.tables:
                    told = [one.name for one in writer.tables]
                    raise InvalidRowError(
                        f"table: expected one of the hello's, {told}, got '{name}'"
                    )
                message.tables = (table,)
            # Rows wait for the steps that complete them, long after their ack.
            reader.copies_shared = True
            message.items = items_of(writer.env_id, reader)
            left = session.when_left(reader.message)
            for item in message.items:
                if item.env_ret is not None:
                    item.env_ret.mark_left(left)
            message.nbytes = reader.nbytes + _VALUE_BYTES * reader.used()[0]
        except (CodecError, NotFoundError, InvalidRowError) as error:
            message.refusal = error
        return message

    def _store(self, writer: Writer, message: WaitingInsert) -> bool:
        """Stores or refuses a message whose turn it is.

        Returns:
            False if there is no room for it yet.
        """
        refusal = message.refusal
        if refusal is None:
            begun_ns = time.monotonic_ns()
            try:
                journal = partial(self._durable.insert, *self._mark(writer, message), message.data)
                full = insert_into(message.tables, writer.env_id, message.items, journal)
                if full is not None:
                    writer.held_by = full.rendezvous
                    return False
                failpoint("insert.stored")
                self.latency.record_stamps(STORE, (time.monotonic_ns(), begun_ns))
            except ReplayError as error:
                refusal = error
            except (TypeError, ValueError) as error:  # what the documented API raises for bad data
                refusal = InvalidRowError(str(error))
        if refusal is not None:
            self.counts.refused_total += 1
            for table in message.tables:
                table.refuse(writer.env_id)
            self._durable.refuse(*self._mark(writer, message))
            writer.refused[writer.next_seq] = to_error_status(refusal)
        writer.next_seq += 1
        writer.unacked += len(message.items)
        writer.arrival = message.arrival
        if writer.unacked >= _ACK_EVERY or refusal is not None:
            writer.progress.set()
        elif writer.alarm is None:
            loop = asyncio.get_running_loop()
            writer.alarm = loop.call_later(_ACK_AFTER_S, writer.progress.set)
        return True

    async def _store_waiting(self, writer: Writer) -> None:
        while writer.waiting:
            message = writer.waiting[0]
            if not self._store(writer, message):
                assert writer.held_by is not None
                self._note_waiting(writer)
                if writer.held_by.blocked and writer.held_by.blocked_total != writer.told:
                    writer.progress.set()  # tells the client
                await writer.held_by.wait_room()
                continue
            self.latency.record(
                "withheld", (time.monotonic_ns() - message.arrival.received_ns) / 1e9
            )
            writer.waiting.popleft()
            writer.transit.give_back(message.nbytes)
            writer.moved.set()
            self._note_waiting(writer)

    @staticmethod
    def _note_waiting(writer: Writer) -> None:
        count = len(writer.waiting)
        if not count:
            writer.held_by, writer.told = None, 0
        for table in writer.tables:
            table.rendezvous.hold(writer.env_id, writer.writer_id, count, writer.held_by)

    async def _send_acks(self, writer: Writer, session: Session) -> None:
        """Acks everything that was stored since the last ack, as fast as the client reads.

        It awaits what the server's durability promises first; meanwhile more is stored, which is
        written together.
        """
        while True:
            await writer.progress.wait()
            writer.progress.clear()
            writer.unacked = 0
            if writer.alarm is not None:
                writer.alarm.cancel()
                writer.alarm = None
            stored, refused = writer.next_seq - 1, sorted(writer.refused)
            await self._durable.settled()
            failpoint("insert.settled")
            for seq in refused:
                response = pb.InsertResponse()
                response.ack.seq = seq - 1
                response.ack.error.CopyFrom(writer.refused[seq])
                if await session.send(response):
                    writer.refused.pop(seq, None)
                    writer.moved.set()
            response = pb.InsertResponse()
            response.ack.seq = stored
            response.ack.withheld = len(writer.waiting)
            holder = writer.held_by
            if holder is not None and holder.blocked:
                writer.told = holder.blocked_total
                blocked = PreconditionError(holder.blocked, reason=BLOCKED)
                response.ack.blocked.CopyFrom(to_error_status(blocked))
            answers, writer.arrival = writer.arrival, None
            await session.send(response, answers=answers)
