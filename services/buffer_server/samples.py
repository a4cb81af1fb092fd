"""Sample: batches for the credits of a learner, in two phases where they leave the buffer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlightning.buffer.buffer_table import BufferTable, Taken
from rlightning.buffer.where import Where
from rlightning.errors import InvalidRequestError, NotFoundError, UnavailableError
from rlightning.latency import LatencyStats
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.status import to_error_status
from rlightning.types import ActionSource
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Reader, encode_batch

from .chunks import sample_responses
from .inserts import DEFAULT_TABLE

_LOG = logging.getLogger(__name__)

_MAX_CREDITS = 1024
# From this size on, a batch is encoded in a thread: copying it would hold the loop up.
_THREAD_BYTES = 2**20


@dataclass
class _Sent:
    """A batch that its learner has not acked."""

    taken: Taken
    data: bytes = b""


@dataclass(eq=False)
class Learner:
    """One session of a learner.

    Attributes:
        table: What it samples.
        batch_size: Transitions in a batch; 0 for whole rollouts.
        where: What a transition must be to be in a batch; None for anything.
        credits: Batches that may still be sent: how many transitions each has, 0 for `batch_size`.
        credited: Set when there are credits.
        unacked: Batches that leave the buffer with their ack, by number.
        sending: Sends batches; None before the first credit of a stream.
        present: Whether it has a stream.
        patience: Runs while it has none and its batches are kept for it alone.
        deprived: Whether they were given to others while it was away.
    """

    table: BufferTable
    batch_size: int
    where: Where | None = None
    credits: deque[int] = field(default_factory=deque)
    credited: asyncio.Event = field(default_factory=asyncio.Event)
    unacked: dict[int, _Sent] = field(default_factory=dict)
    sending: asyncio.Task[None] | None = None
    present: bool = True
    patience: asyncio.TimerHandle | None = None
    deprived: bool = False


class SampleHandler(SessionHandler[pb.SampleRequest, pb.SampleResponse]):
    """Serves the sessions of `Sample`.

    Args:
        tables: The tables by name.
        storage_id: Identifies what is stored.
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
        tables: Mapping[str, BufferTable],
        storage_id: str,
        producer_timeout_s: float,
        lease_s: float,
    ) -> None:
        self.batches_total = 0
        self.latency = LatencyStats()
        self._tables = tables
        self._storage_id = storage_id
        self._producer_timeout_s = producer_timeout_s
        self._lease_s = lease_s
        self._learners: list[Learner] = []
        self._numbers = itertools.count(1)

    async def on_open(
        self, session: Session, reader: Reader[pb.SampleRequest]
    ) -> pb.SampleResponse:
        """Lets a learner ask for batches; those it has not acked come again at its first credit."""
        hello = reader.message.hello
        if not isinstance(session.state, Learner):
            session.state = self._learner(hello)
            self._learners.append(session.state)
        learner: Learner = session.state
        learner.present = True
        if learner.patience is not None:
            learner.patience.cancel()
            learner.patience = None
        if learner.deprived:  # to its client this is a new session, in which any batch may come
            learner.deprived = session.resumed = False
        self._reclaim(learner.table)
        response = pb.SampleResponse()
        response.welcome.storage_id = self._storage_id
        return response

    def _learner(self, hello: pb.SampleHello) -> Learner:
        name = hello.table or DEFAULT_TABLE
        table = self._tables.get(name)
        if table is None:
            raise NotFoundError(f"no table '{name}'; there are {sorted(self._tables)}")
        if hello.rank or hello.world_size > 1:
            raise InvalidRequestError(
                f"rank {hello.rank} of {hello.world_size}: one learner takes all batches here"
            )
        if table.serves_rollouts and hello.batch_size:
            raise InvalidRequestError(
                f"batch_size {hello.batch_size}: table '{name}' sends whole rollouts, ask for 0"
            )
        if not table.serves_rollouts and hello.batch_size < 1:
            raise InvalidRequestError(f"table '{name}' needs a batch_size of at least 1")
        return Learner(table, hello.batch_size, self._where(hello, table))

    @staticmethod
    def _where(hello: pb.SampleHello, table: BufferTable) -> Where | None:
        if not hello.HasField("where"):
            return None
        if not table.samples_transitions:
            raise InvalidRequestError(
                f"where: table '{table.name}' does not sample single transitions"
            )
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
            _give_back(learner)

    def _lose_patience(self, learner: Learner) -> None:
        learner.patience = None
        self._reclaim(learner.table)

    def _reclaim(self, table: BufferTable) -> None:
        """Takes the batches of learners that are away too long, if another one is there for them.

        A learner that was killed would else keep the next one waiting for its resume window.
        """
        learners = [learner for learner in self._learners if learner.table is table]
        if any(learner.present for learner in learners):
            for learner in learners:
                if not learner.present and learner.patience is None and learner.unacked:
                    _give_back(learner)
                    learner.deprived = True

    async def on_message(self, session: Session, reader: Reader[pb.SampleRequest]) -> None:
        """Takes credits and acks."""
        message = reader.message
        body = message.WhichOneof("body")
        learner: Learner = session.state
        if body == "credit":
            batches, size = message.credit.batches, message.credit.batch_size
            if not 0 <= batches <= _MAX_CREDITS - len(learner.credits):
                raise InvalidRequestError(f"credits: expected 0 to {_MAX_CREDITS} in all")
            if size < 0 or (size and learner.table.serves_rollouts):
                raise InvalidRequestError(
                    f"credit.batch_size {size}: expected 0, or of a table that does not send "
                    "rollouts a number of transitions"
                )
            learner.credits.extend([size] * batches)
            learner.credited.set()
            if learner.sending is None:
                learner.sending = asyncio.create_task(self._send_batches(learner, session))
                learner.sending.add_done_callback(lambda task: _report(task, session))
        elif body == "ack":
            batch_id = message.ack.batch_id
            sent = learner.unacked.pop(batch_id, None)
            if sent is not None:
                learner.table.release(sent.taken)
            else:  # it may have got the batch in a session that is gone
                learner.table.release_ready(batch_id - 1)
        else:
            raise InvalidRequestError("expected a credit or an ack")

    async def _send_batches(self, learner: Learner, session: Session) -> None:
        for batch_id, sent in tuple(learner.unacked.items()):
            await self._send(session, batch_id, await self._encoded(batch_id, sent, learner.table))
        while True:
            while not learner.credits:
                learner.credited.clear()
                await learner.credited.wait()
            taken = await self._next(learner, session)
            learner.credits.popleft()
            sent = _Sent(taken)
            if taken.rollout is None:
                batch_id = next(self._numbers)
            else:  # the same for every learner and session, so that no ack can mean another one
                batch_id = taken.rollout.index + 1
                learner.unacked[batch_id] = sent  # first of all, so that it cannot be lost
            await self._send(session, batch_id, await self._encoded(batch_id, sent, learner.table))
            self.batches_total += 1

    async def _next(self, learner: Learner, session: Session) -> Taken:
        """Waits for a batch; tells the learner of producers that keep it waiting."""
        patience_s = 0.0
        while True:
            try:
                return await learner.table.next(
                    batch_size=learner.credits[0] or learner.batch_size or None,
                    where=learner.where,
                    patience_s=patience_s,
                )
            except UnavailableError as error:
                _LOG.warning("%s", error)
                response = pb.SampleResponse()
                response.error.CopyFrom(to_error_status(error))
                await session.send(response)
                patience_s = self._producer_timeout_s

    async def _encoded(self, batch_id: int, sent: _Sent, table: BufferTable) -> bytes:
        """Returns the encoded batch, the same bytes every time."""
        if not sent.data:
            begun = time.perf_counter()
            if sent.taken.nbytes < _THREAD_BYTES:
                sent.data = _encode(batch_id, sent.taken)
            else:
                sent.data = await asyncio.to_thread(_encode, batch_id, sent.taken)
            table.copied(sent.taken)
            self.latency.record("encode", time.perf_counter() - begun)
        return sent.data

    async def _send(self, session: Session, batch_id: int, data: bytes) -> None:
        begun = time.perf_counter()
        for response in sample_responses(batch_id, data):
            if not await session.send(response):
                return  # the stream is over; what was not acked is sent again on the next one
        self.latency.record("send", time.perf_counter() - begun)


def _give_back(learner: Learner) -> None:
    for sent in reversed(learner.unacked.values()):
        learner.table.give_back(sent.taken)
    learner.unacked.clear()


def _encode(batch_id: int, taken: Taken) -> bytes:
    return encode_batch(Batch(batch_id, taken.columns(), dict(taken.metadata)))


def _report(task: asyncio.Task[None], session: Session) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        owner = session.owner
        if owner is not None and isinstance(error, Exception):
            owner.end(error)  # the learner must not wait for batches that never come
