"""The learner's side of a buffer server: batches that are fetched ahead."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import Self

from rlightning.buffer.insert_client import SERVICE
from rlightning.buffer.parts import read_batch
from rlightning.buffer.where import Where
from rlightning.errors import (
    DeadlineExceededError,
    RemoteError,
    ReplayError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.rpc.channel import connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.status import from_error_status
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, ChunkJoiner, Reader

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
# Acks of the last batches are sent again after a cut, in which they may have been lost: these, and
# one for each batch that may have been on its way here then.
_ACKS_KEPT = 8


class _Fetched(NamedTuple):
    """A batch that nobody asked for yet."""

    ack_id: int
    """Under which number to ack it; 0 if its server needs no ack, or does not know it any more."""
    batch: Batch
    size: int
    """How many transitions were asked for; 0 for as many as the session said."""


class SampleClient:
    """Takes batches from a buffer server, one of them ahead.

    The rows of a rollout leave the server when its batch is acked, which asking for the next one
    does. After a cut, what was not acked comes again, and after a restart of a server that keeps
    it, too; else whatever it has then. Belongs to one event loop.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        table: Which table; empty means `default`.
        batch_size: Transitions in a batch; 0 for whole rollouts. With a `prefetch` of 0,
            `next_batch` may ask for others.
        where: What a transition must be to be in a batch, where the table samples transitions.
        fractions: The part of each batch that comes from each of several tables, by name, instead
            of `table`; they sum to 1. The batch's metadata then have `tables` and `table_index`,
            int32 [B]: which of them each row is of.
        rank: Which of `world_size` learners this is, from 0.
        world_size: Learners that share the data: of a rollout each gets an equal part of the rows
            (columns [T, N / world_size, ...]), and a table that samples draws for each by itself.
        prefetch: Batches that are fetched ahead.
        max_batch_bytes: How large a batch may be.
        client_id: Who this is, `[A-Za-z0-9._-]{1,64}`; default: a random one.
        rpc: Limits and times.
        auth: Token and certificates.

    Raises:
        ValueError: `where` allows no action source.
    """

    def __init__(
        self,
        address: str,
        *,
        table: str = "",
        batch_size: int = 0,
        where: Where | None = None,
        fractions: Mapping[str, float] | None = None,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 1,
        max_batch_bytes: int = 2**31 - 1,
        client_id: str | None = None,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        if where is not None and where.sources is not None and not where.sources:
            raise ValueError("where: sources allows no transition; None allows any")
        self._channel = connect(address, rpc=rpc, auth=auth)
        self._table = table
        self._batch_size = batch_size
        self._where = where
        self._fractions = fractions
        self._rank = rank
        self._world_size = world_size
        self._prefetch = prefetch
        self._max_batch_bytes = max_batch_bytes
        self._client_id = client_id or f"learner-{uuid.uuid4().hex[:16]}"
        self._session: SessionClient[pb.SampleRequest, pb.SampleResponse] | None = None
        self._storage_id = ""
        self._fetched: deque[_Fetched] = deque()
        self._ahead = prefetch
        # Sizes of the batches that were asked for and are not here, the oldest first.
        self._asked: deque[int] = deque()
        self._joining = 0
        self._joiner: ChunkJoiner | None = None
        self._lent = 0
        self._acks: deque[int] = deque(maxlen=_ACKS_KEPT + prefetch)
        # Batches that may come once more after a cut without being asked for, and acked ones that
        # the server lent anew, since it does not know of their acks.
        self._resent: set[int] = set()
        self._lent_anew: deque[int] = deque()
        self._progress = asyncio.Event()
        self._failure: RemoteError | None = None
        self._complaint: RemoteError | None = None

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._channel.address

    @property
    def away_s(self) -> float:
        """For how long there has been no connection, in seconds; 0 while there is one."""
        session = self._session
        if session is None or session.connected:
            return 0.0
        return (time.monotonic_ns() - session.lost_ns) / 1e9

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Opens the session. May be called again after it failed.

        Raises:
            InvalidRequestError: The table never serves such batches; the message names the field.
            NotFoundError: There is no such table.
            PreconditionError: The rows of a rollout do not divide by `world_size`, or the learners
                that are there disagree on it.
            AlreadyExistsError: Another learner is there under this rank.
            UnavailableError: No server answered in time.
        """
        self._failure = None
        self._session = SessionClient(
            self._channel,
            f"/{SERVICE}/Sample",
            request_type=pb.SampleRequest,
            response_type=pb.SampleResponse,
            client_id=self._client_id,
            prepare_hello=self._prepare_hello,
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_failure=self._on_failure,
        )
        await self._session.start(timeout_s)

    async def close(self) -> None:
        """Ends the session and closes the connection; what was not acked is for another learner."""
        if self._session is not None:
            await self._session.close()
        self._on_failure(UnavailableError("the client was closed", peer=self.address))
        await self._channel.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def next_batch(self, timeout_s: float | None = None, *, batch_size: int = 0) -> Batch:
        """Waits for the next batch; the one before it is acked by that.

        Args:
            timeout_s: How long, in seconds; None: for ever.
            batch_size: Transitions in this batch, where nothing is prefetched; 0 for as many as the
                session said.

        Returns:
            The batch; its arrays are read-only, and valid for as long as they are kept.

        Raises:
            DeadlineExceededError: There was none in time.
            UnavailableError: A producer has sent nothing for the server's `producer_timeout_s`, and
                no batch is complete without it; the message names it, the reason is
                `PRODUCER_SILENT`. Or another rank has not used its share for so long, and the
                reason is `RANK_SILENT`. The next call waits on.
            PreconditionError: Inserts wait for samples, and samples for inserts; the reason is
                `BLOCKED`, and the message has the counters. The next call waits on.
            RemoteError: The session ended for good.
        """
        session = self._session
        if session is None:
            raise ReplayError("next_batch needs a session: await start() first")
        await self.ack()
        await self._ask(session, batch_size)
        if not self._fetched or self._fetched[0].size != batch_size:
            try:
                await wait_within(self._some(session, batch_size), timeout_s)
            except asyncio.TimeoutError:
                raise DeadlineExceededError(
                    f"no batch within {timeout_s:g} s", peer=self.address
                ) from None
        fetched = self._fetched.popleft()
        self._lent = fetched.ack_id
        try:
            await self._request(session, self._prefetch)
        except asyncio.CancelledError:  # nobody has seen it; it needs no ack if that was seen to
            self._fetched.appendleft(fetched._replace(ack_id=self._lent))
            self._lent = 0
            raise
        return fetched.batch

    async def ack(self) -> None:
        """Tells the server that the last batch was used: its rows may go. Safe to repeat."""
        session = self._session
        if session is None:
            return
        await session.settled()
        lent, self._lent = self._lent, 0
        if lent:
            self._acks.append(lent)
            await self._send(session, self._ack(session, lent))

    async def _ask(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], size: int
    ) -> None:
        """Asks for a batch of a size unless it is here or on its way, and for those ahead."""
        while self._lent_anew:
            await self._send(session, self._ack(session, self._lent_anew.popleft()))
        if size:
            await self._request_size(session, size)
        else:
            await self._request(session, max(1, self._prefetch))

    async def _some(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], size: int
    ) -> None:
        """Returns when there is a batch of a size, or raises what keeps it from coming."""
        while True:
            while self._fetched and self._fetched[0].size != size:
                self._fetched.popleft()  # nobody waits for it any more
            if self._fetched:
                return
            if self._failure is not None:
                raise self._failure
            if self._complaint is not None:
                complaint, self._complaint = self._complaint, None
                raise complaint
            self._progress.clear()
            if self._lent_anew:
                await self._ask(session, size)
            await self._progress.wait()

    async def _request(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], ahead: int
    ) -> None:
        """Asks for as many batches as are missing to have `ahead` of them here or on their way.

        Not before half of them are: a message costs much the same however many it asks for.
        """
        self._ahead = ahead
        missing = ahead - len(self._fetched) - len(self._asked)
        if missing > 0 and 2 * missing >= ahead and session.connected:
            self._asked.extend([0] * missing)
            await self._send(session, self._credit(session, missing))

    async def _request_size(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], size: int
    ) -> None:
        """Asks for a batch of a size unless it is on its way."""
        if size in self._asked or any(fetched.size == size for fetched in self._fetched):
            return
        self._asked.append(size)
        await self._send(session, self._credit(session, 1, size))

    async def _send(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], request: bytes
    ) -> None:
        try:
            await session.send(request)
        except asyncio.CancelledError:
            # It may not have gone out, but counts as sent: the next stream begins with what counts.
            session.renew(UnavailableError("a request was interrupted", peer=self.address))
            raise

    def _ack(
        self, session: SessionClient[pb.SampleRequest, pb.SampleResponse], batch_id: int
    ) -> bytes:
        request = session.new_request()
        request.ack.batch_id = batch_id
        return request.SerializeToString()

    def _credit(
        self,
        session: SessionClient[pb.SampleRequest, pb.SampleResponse],
        batches: int,
        size: int = 0,
    ) -> bytes:
        request = session.new_request()
        request.credit.batches = batches
        request.credit.batch_size = size
        request.credit.SetInParent()
        return request.SerializeToString()

    def _prepare_hello(self, request: pb.SampleRequest) -> None:
        request.hello.table = self._table
        request.hello.batch_size = self._batch_size
        request.hello.rank = self._rank
        request.hello.world_size = self._world_size
        for name, fraction in (self._fractions or {}).items():
            request.hello.fractions.add(table=name, fraction=fraction)
        where = self._where
        if where is not None:
            chosen = request.hello.where
            chosen.SetInParent()
            if where.min_version is not None:
                chosen.min_version = where.min_version
            if where.max_version is not None:
                chosen.max_version = where.max_version
            sources: Any = map(int, where.sources or ())  # the numbers equal those on the wire
            chosen.sources.extend(sources)

    async def _on_welcome(self, reader: Reader[pb.SampleResponse]) -> None:
        session = self._session
        assert session is not None
        storage_id = reader.message.welcome.storage_id
        if not session.resumed:
            self._begin_session(restarted=storage_id != self._storage_id)
        self._storage_id = storage_id
        if self._joiner is not None:
            logger.warning(
                "%s: the connection broke in the middle of a batch, which comes again from its "
                "beginning; if the line is too slow for it, raise rpc.keepalive_timeout_s and "
                "rpc.lease_s of services.buffer on both sides",
                self.address,
            )
        self._joining, self._joiner = 0, None
        self._resent = set(self._here) if session.resumed else set()
        self._lent_anew.clear()
        for batch_id in self._acks:
            await session.send_now(self._ack(session, batch_id))
        # Unacked batches come again by themselves, and none before a credit, be it of 0.
        if any(self._asked):
            for size in tuple(self._asked):
                await session.send_now(self._credit(session, 1, size))
            return
        self._asked = deque([0] * max(0, self._ahead - len(self._fetched)))
        await session.send_now(self._credit(session, len(self._asked)))

    def _begin_session(self, *, restarted: bool) -> None:
        """Takes note that the server does not know which batches are here."""
        if restarted:  # they exist here alone
            self._fetched = deque(fetched._replace(ack_id=0) for fetched in self._fetched)
            self._acks.clear()
        else:  # it gave them back: what is not used yet comes again, here or to another learner
            self._fetched.clear()
            if self._lent:
                self._acks.append(self._lent)
        self._lent = 0

    def _on_message(self, reader: Reader[pb.SampleResponse]) -> None:
        body = reader.message.WhichOneof("body")
        if body == "chunk":
            self._join(reader)
        elif body == "error":
            self._complaint = from_error_status(reader.message.error, peer=self.address)
            self._progress.set()

    def _join(self, reader: Reader[pb.SampleResponse]) -> None:
        chunk = reader.message.chunk
        known = chunk.batch_id in self._here or chunk.batch_id in self._acks
        if known and not chunk.stays:
            if not chunk.offset:
                self._drop(chunk.batch_id)
            return
        if chunk.batch_id != self._joining:
            if chunk.total_bytes > self._max_batch_bytes:
                raise ResourceExhaustedError(
                    f"a batch of {chunk.total_bytes} bytes passes max_batch_bytes, "
                    f"{self._max_batch_bytes}: raise it, or make batches smaller",
                    peer=self.address,
                )
            self._joining = chunk.batch_id
            self._joiner = ChunkJoiner(chunk.total_bytes, max_bytes=self._max_batch_bytes)
        assert self._joiner is not None
        whole = self._joiner.add(chunk.offset, reader.content(chunk.data))
        if whole is None:
            return
        self._joiner = None
        batch = read_batch(whole, self._max_batch_bytes)
        size = self._asked.popleft() if self._asked else 0
        self._fetched.append(_Fetched(0 if chunk.stays else batch.batch_id, batch, size))
        self._complaint = None
        self._progress.set()

    @property
    def _here(self) -> tuple[int, ...]:
        """Numbers of the batches that are here, and not acked."""
        return self._lent, *(fetched.ack_id for fetched in self._fetched)

    def _drop(self, batch_id: int) -> None:
        """Takes note that a batch comes once more that is here, or was used."""
        if batch_id in self._resent:  # after a cut, also if it was acked meanwhile
            self._resent.remove(batch_id)
        elif batch_id in self._acks:  # as one that was asked for
            self._lent_anew.append(batch_id)
            if self._asked:
                self._asked.popleft()
            self._progress.set()

    def _on_failure(self, error: RemoteError) -> None:
        self._failure = error
        self._progress.set()
