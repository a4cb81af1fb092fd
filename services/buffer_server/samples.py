"""Sample: batches for the credits of a learner, in two phases where they leave the buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.feeds import Feed, MixedFeed, TableFeed
from rlightning.buffer.parts import pieces_of
from rlightning.buffer.rendezvous import BLOCKED
from rlightning.buffer.shares import indivisible
from rlightning.buffer.taken import Taken
from rlightning.buffer.where import Where
from rlightning.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from rlightning.latency import LatencyStats
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.status import to_error_status
from rlightning.types import ActionSource
from rlightning.utils.failpoints import failpoint
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Reader

from .chunks import sample_responses
from .tables import Tables

_LOG = logging.getLogger(__name__)

_MAX_CREDITS = 1024
_MAX_RANKS = 2**16
# Acks that came while another learner had the batch, which may come back to who sent them.
_MAX_EARLY = 64
# From this size on, a batch is encoded in a thread: putting it together could hold the loop up.
_THREAD_BYTES = 2**20


@dataclass
class _Sent:
    """A batch that its learner has not acked."""

    taken: Taken
    pieces: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Learner:
    """One session of a learner, or what was lent to one before the server started again.

    Attributes:
        feed: What its batches come from.
        client_id: Who it is.
        credits: Batches that may still be sent: how large each is, 0 for the size of the feed.
        credited: Set when there are credits.
        unacked: Batches that leave the buffer with their ack, by number.
        early: Numbers of batches that it used, and acked while another learner had them.
        sending: Sends batches; None before the first credit of a stream.
        present: Whether it has a stream.
        patience: Runs while it has none and its batches are kept for it alone.
        deprived: Whether they were given to others while it was away.
        left_behind: Whether it had its session with the server of before.
    """

    feed: Feed
    client_id: str
    credits: deque[int] = field(default_factory=deque)
    credited: asyncio.Event = field(default_factory=asyncio.Event)
    unacked: dict[int, _Sent] = field(default_factory=dict)
    early: deque[int] = field(default_factory=partial(deque, maxlen=_MAX_EARLY))
    sending: asyncio.Task[None] | None = None
    present: bool = True
    patience: asyncio.TimerHandle | None = None
    deprived: bool = False
    left_behind: bool = False

    def takes_over(self, other: Learner) -> bool:
        """Whether the batches that another one leaves behind are for this one."""
        mine, theirs = self.feed, other.feed
        shared = not set(mine.tables).isdisjoint(theirs.tables)
        return shared and (mine.rank == theirs.rank or mine.world_size != theirs.world_size)


class SampleHandler(SessionHandler[pb.SampleRequest, pb.SampleResponse]):
    """Serves the sessions of `Sample`.

    Args:
        tables: The tables.
        store: Knows what identifies what is stored.
        producer_timeout_s: How often a learner is told of a silent producer, in seconds.
        lease_s: For how long the batches of a learner that is away are kept from others that ask,
            in seconds.

    Attributes:
        batches_total: Batches sent.
        latency: `encode` and `send` of a batch, in seconds.
    """

    request_type = pb.SampleRequest
    response_type = pb.SampleResponse

    def __init__(
        self,
        tables: Tables,
        store: DurableStore,
        producer_timeout_s: float,
        lease_s: float,
    ) -> None:
        self.batches_total = 0
        self.latency = LatencyStats()
        self._tables = tables
        self._store = store
        self._producer_timeout_s = producer_timeout_s
        self._lease_s = lease_s
        self._learners: list[Learner] = []
        self._numbers = itertools.count(1)
        self._leaving = False

    def take_over(self) -> None:
        """Keeps what was lent before the start for those who had it, for as long as a lease."""
        loop = asyncio.get_running_loop()
        for table in self._tables.values():
            if table.lending is None:
                continue
            for taken in tuple(table.lending.lent.values()):
                learner = self._left_behind(table, taken)
                learner.unacked[taken.batch_id] = _Sent(taken)
                if learner.patience is None:
                    learner.patience = loop.call_later(self._lease_s, self._lose_patience, learner)

    def _left_behind(self, table: BufferTable, taken: Taken) -> Learner:
        """Returns whom a batch was lent to before the start."""
        rank, world_size = taken.rank, taken.world_size
        for learner in self._learners:
            same = learner.feed.tables == (table,) and learner.feed.rank == rank
            if same and learner.client_id == taken.learner:
                return learner
        batch_size = 0 if table.serves_rollouts else 1
        feed = TableFeed(table, batch_size, None, rank, world_size, taken.learner)
        learner = Learner(feed, taken.learner, present=False, left_behind=True)
        self._learners.append(learner)
        return learner

    def leave(self) -> None:
        """Takes note that the server stops: what is lent stays lent until it is back."""
        self._leaving = self._store.durable

    async def on_open(
        self, session: Session, reader: Reader[pb.SampleRequest]
    ) -> pb.SampleResponse:
        """Lets a learner ask for batches; those it has not acked come again at its first credit."""
        known = isinstance(session.state, Learner)
        learner = session.state if known else self._new(reader.message.hello, session.client_id)
        self._refuse_rival(learner)
        if not known:
            session.state = learner
            self._inherit(learner)
            self._learners.append(learner)
            for table in learner.feed.tables:
                table.rendezvous.readers += 1
        learner.present = True
        if learner.patience is not None:
            learner.patience.cancel()
            learner.patience = None
        if learner.deprived:  # to its client this is a new session, in which any batch may come
            learner.deprived = session.resumed = False
        self._reclaim(learner)
        response = pb.SampleResponse()
        response.welcome.storage_id = self._store.storage_id
        return response

    def _new(self, hello: pb.SampleHello, client_id: str) -> Learner:
        return Learner(self._feed(hello, client_id), client_id)

    def _inherit(self, learner: Learner) -> None:
        """Gives a client what it had before the server started again, for it to ack or get anew."""
        for other in tuple(self._learners):
            mine, theirs = learner.feed, other.feed
            same = mine.tables == theirs.tables and mine.rank == theirs.rank
            same &= mine.world_size == theirs.world_size
            if other.left_behind and same and other.client_id == learner.client_id:
                learner.unacked |= other.unacked
                self._dismiss(other)

    def _dismiss(self, learner: Learner) -> None:
        if learner.patience is not None:
            learner.patience.cancel()
            learner.patience = None
        self._learners.remove(learner)

    def _feed(self, hello: pb.SampleHello, client_id: str) -> Feed:
        rank, world_size = hello.rank, hello.world_size or 1
        if not 1 <= world_size <= _MAX_RANKS:
            raise InvalidRequestError(f"world_size: expected 1 to {_MAX_RANKS}, got {world_size}")
        if not 0 <= rank < world_size:
            raise InvalidRequestError(
                f"rank: expected 0 to {world_size - 1} with world_size {world_size}, got {rank}"
            )
        where = self._where(hello) if hello.HasField("where") else None
        if not hello.fractions:
            table = self._tables.named(hello.table)
            if table.rollout_rows % world_size:
                raise PreconditionError(indivisible(table.rollout_rows, world_size))
            return TableFeed(table, hello.batch_size, where, rank, world_size, client_id)
        if hello.table:
            raise InvalidRequestError(f"table: expected none beside fractions, got '{hello.table}'")
        fractions = [(self._tables.named(one.table), one.fraction) for one in hello.fractions]
        return MixedFeed(fractions, hello.batch_size, where, rank, world_size)

    def _refuse_rival(self, learner: Learner) -> None:
        """Refuses a learner that does not fit those that are here."""
        mine = learner.feed
        for other in self._learners:
            theirs = other.feed
            if other is learner or not other.present:
                continue
            shared = [table for table in mine.tables if table in theirs.tables]
            if not shared:
                continue
            name = shared[0].name
            several = min(mine.world_size, theirs.world_size) > 1
            if mine.world_size != theirs.world_size and (several or shared[0].serves_rollouts):
                raise PreconditionError(
                    f"world_size {mine.world_size}: learner {other.client_id} samples table "
                    f"'{name}' as one of {theirs.world_size}; all have to agree"
                )
            if several and mine.rank == theirs.rank:
                raise AlreadyExistsError(
                    f"rank {mine.rank}: learner {other.client_id} samples table '{name}' under "
                    f"this rank of {mine.world_size}"
                )

    @staticmethod
    def _where(hello: pb.SampleHello) -> Where:
        asked = hello.where
        try:
            sources = [ActionSource(source) for source in asked.sources]
        except ValueError as error:
            raise InvalidRequestError(f"where.sources: {error}") from None
        return Where(
            asked.min_version if asked.HasField("min_version") else None,
            asked.max_version if asked.HasField("max_version") else None,
            sources or None,
        )

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Stops to send; what was not acked is for another learner if this one does not return."""
        learner: Learner = session.state
        if learner.sending is not None:
            learner.sending.cancel()
            await asyncio.wait({learner.sending})
            learner.sending = None
        learner.credits.clear()
        learner.present = False
        if resumable:
            loop = asyncio.get_running_loop()
            learner.patience = loop.call_later(self._lease_s, self._lose_patience, learner)
        else:
            self._learners.remove(learner)
            for table in learner.feed.tables:
                table.rendezvous.readers -= 1
            if not self._leaving:
                self._give_back(learner)

    def _lose_patience(self, learner: Learner) -> None:
        learner.patience = None
        if any(other.present and other.takes_over(learner) for other in self._learners):
            self._deprive(learner)

    def _reclaim(self, learner: Learner) -> None:
        """Takes the batches of those that are away too long, and that a learner is there for.

        A learner that was killed would else keep the next one waiting for its resume window.
        """
        for other in tuple(self._learners):
            # Shares of rollouts do not fit another number of learners.
            other_shares = other.feed.world_size != learner.feed.world_size
            away = not other.present and (other.patience is None or other_shares)
            if away and learner.takes_over(other):
                self._deprive(other)

    def _deprive(self, learner: Learner) -> None:
        if learner.unacked:
            self._give_back(learner)
            learner.deprived = True
        if learner.left_behind:
            self._dismiss(learner)

    @staticmethod
    def _give_back(learner: Learner) -> None:
        for sent in reversed(learner.unacked.values()):
            learner.feed.give_back(sent.taken)
        learner.unacked.clear()

    async def on_message(self, session: Session, reader: Reader[pb.SampleRequest]) -> None:
        """Takes credits and acks."""
        message = reader.message
        body = message.WhichOneof("body")
        learner: Learner = session.state
        if body == "credit":
            batches, size = message.credit.batches, message.credit.batch_size
            if not 0 <= batches <= _MAX_CREDITS - len(learner.credits):
                raise InvalidRequestError(f"credits: expected 0 to {_MAX_CREDITS} in all")
            if size:
                learner.feed.check(size)
            learner.credits.extend([size] * batches)
            learner.credited.set()
            if learner.sending is None:
                learner.sending = asyncio.create_task(self._send_batches(learner, session))
                learner.sending.add_done_callback(lambda task: _report(task, session))
        elif body == "ack":
            batch_id = message.ack.batch_id
            sent = learner.unacked.pop(batch_id, None)
            if sent is not None:
                learner.feed.release(sent.taken)
                failpoint("sample.released")
            elif not learner.feed.release_returned(batch_id) and learner.feed.had(batch_id):
                learner.early.append(batch_id)  # in a session that is gone; another has it now
        else:
            raise InvalidRequestError("expected a credit or an ack")

    async def _send_batches(self, learner: Learner, session: Session) -> None:
        for batch_id, sent in tuple(learner.unacked.items()):
            if batch_id not in learner.unacked:  # acked while one before it was sent
                continue
            if (again := self._again(learner, sent)) is not None:
                await self._send(session, batch_id, again, learner.feed)
        while True:
            while not learner.credits:
                learner.credited.clear()
                await learner.credited.wait()
            taken = await self._next(learner, session)
            if taken.leaves and taken.batch_id in learner.early:
                learner.feed.release(taken)
                continue
            learner.credits.popleft()
            sent = _Sent(taken)
            batch_id = taken.batch_id or next(self._numbers)
            if taken.leaves:
                learner.unacked[batch_id] = sent  # first of all, so that it cannot be lost
                # And known to be lent after a crash, as all that was acked before is to be used.
                await self._store.settled()
                failpoint("sample.lent")
            await self._send(session, batch_id, sent, learner.feed)
            self.batches_total += 1

    @staticmethod
    def _again(learner: Learner, sent: _Sent) -> _Sent | None:
        """Returns a batch that is sent again; None for one that is not all here any more."""
        taken = sent.taken
        if taken.queued is None or taken.sample:
            return sent
        (table,) = learner.feed.tables
        assert table.lending is not None
        if table.lending.has(taken):
            sent.taken = table.read_lent(taken)
            return sent
        del learner.unacked[taken.batch_id]
        table.give_back(taken)
        return None

    async def _next(self, learner: Learner, session: Session) -> Taken:
        """Waits for a batch; tells the learner of those who keep it waiting."""
        patience_s = 0.0
        while True:
            try:
                return await learner.feed.next(patience_s, batch_size=learner.credits[0])
            except (UnavailableError, PreconditionError) as error:
                if isinstance(error, PreconditionError) and error.reason != BLOCKED:
                    raise
                _LOG.warning("%s", error)
                response = pb.SampleResponse()
                response.error.CopyFrom(to_error_status(error))
                await session.send(response)
                patience_s = self._producer_timeout_s

    async def _encoded(self, batch_id: int, sent: _Sent) -> list[Any]:
        """Returns the encoded batch in pieces, the same bytes every time."""
        if not sent.pieces:
            begun = time.perf_counter()
            if sent.taken.nbytes < _THREAD_BYTES:
                sent.pieces = _encode(batch_id, sent.taken)
            else:
                sent.pieces = await asyncio.to_thread(_encode, batch_id, sent.taken)
            self.latency.record("encode", time.perf_counter() - begun)
        return sent.pieces

    async def _send(self, session: Session, batch_id: int, sent: _Sent, feed: Feed) -> None:
        pieces = await self._encoded(batch_id, sent)
        begun = time.perf_counter()
        for response in sample_responses(batch_id, pieces, stays=not sent.taken.leaves):
            if not await session.send(response):
                break  # the stream is over; what was not acked is sent again on the next one
        else:
            feed.copied(sent.taken)
        self.latency.record("send", time.perf_counter() - begun)


def _encode(batch_id: int, taken: Taken) -> list[Any]:
    return pieces_of(Batch(batch_id, taken.columns(), dict(taken.metadata)))


def _report(task: asyncio.Task[None], session: Session) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        owner = session.owner
        if owner is not None and isinstance(error, Exception):
            owner.end(error)  # the learner must not wait for batches that never come
