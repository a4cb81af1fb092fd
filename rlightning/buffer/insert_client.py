"""The writer's side of a buffer server: exactly-once inserts through cuts and restarts."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from rlightning.buffer.insert_message import InsertMessage
from rlightning.buffer.insert_window import Sent, Window
from rlightning.errors import (
    CodecError,
    ConfigError,
    DeadlineExceededError,
    PreconditionError,
    RemoteError,
    ReplayError,
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
)
from rlightning.latency import ClockOffset, LatencyStats
from rlightning.latency.stages import INSERT
from rlightning.rpc.channel import connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.spec import shared_bytes
from rlightning.rpc.status import from_error_status, too_large
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.v1.session_pb2 import Timing
from rlightning.wire import Limits, Reader, Writer, fill_env_ret, fill_policy_response

logger = logging.getLogger(__name__)

SERVICE = "rlightning.v1.BufferService"
"""Full name of the service."""

_METHOD = f"/{SERVICE}/Insert"
_START_TIMEOUT_S = 30.0

# An item waits for others, to be sent with them: for so many, so many bytes, and so long.
_ITEMS_PER_MESSAGE = 4
_MESSAGE_BYTES = 256 * 1024
_MESSAGE_WAIT_S = 0.002
_MAX_LEAVES = Limits().max_leaves


def items_per_message(window_items: int) -> int:
    """Returns how many items an `InsertClient` with such a window sends together at most."""
    return max(1, min(_ITEMS_PER_MESSAGE, window_items // 2))


class InsertClient:
    """Stores what one group of rows saw and was answered in a buffer server, exactly once.

    Items that come quickly share a message: the first waits for others for 2 ms, and for 3 of them
    or 256 KiB at most. What is not acked is kept in a bounded window, and sent again after a cut or
    a restart of the server; the server drops what it has already. A full window makes `insert`
    wait, and so does a full buffer, which withholds its acks. With a server on the same host, large
    tensors lie in memory that it reads until the ack. Belongs to one event loop.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        spec: The group: its id, spaces and number of rows.
        writer_id: Id of this writer, new per process and group, `[A-Za-z0-9._-]{1,64}`; default: a
            random one.
        tables: Where the rows go: a table, or several of them; empty means `default`.
        window_items: Items that may be unacked. They may be older than what the buffer has room
            for, so a learner that wants fresh rows wants few of them. A message holds half of them
            at most.
        window_bytes: Bytes that may be unacked, unless it is a single message.
        rpc: Limits and times.
        auth: Token and certificates.
        stats: Where durations are recorded; by default, those of this client alone.

    Attributes:
        stats: Durations in seconds: `insert_ack` from handing a message to the network until its
            ack, and `env_to_buffer` from when its first EnvRet left its env until the server has
            it, where the server's clock is known, with its uncertainty.
        acked: Items acked so far.
        resent: Messages sent again after a cut.
        rebased: Times that the server had lost what it had acked.

    Raises:
        ConfigError: The group has no id.
    """

    def __init__(
        self,
        address: str,
        *,
        spec: EnvMeta,
        writer_id: str | None = None,
        tables: str | Sequence[str] = "",
        window_items: int = 8,
        window_bytes: int = 16 * 2**20,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        stats: LatencyStats | None = None,
    ) -> None:
        if not spec.env_id:
            raise ConfigError("an InsertClient needs the id of its env in the spec")
        self.stats = LatencyStats() if stats is None else stats
        self.acked = 0
        self.resent = 0
        self.rebased = 0
        self._channel = connect(address, rpc=rpc, auth=auth)
        self._spec = spec
        self._writer_id = writer_id or f"writer-{uuid.uuid4().hex[:16]}"
        self._tables = [name for name in ([tables] if isinstance(tables, str) else tables) if name]
        self._per_message = 1
        self._session: SessionClient[pb.InsertRequest, pb.InsertResponse] | None = None
        self._key = 0
        self._left_ns = 0  # of the first item of the next message
        self._next = InsertMessage()
        self._window = Window(window_items, window_bytes)
        self._unsent: deque[Sent] = deque()
        self._sending = asyncio.Lock()
        self._alarm: asyncio.TimerHandle | None = None
        self._late: set[asyncio.Task[None]] = set()
        self._seq = 0
        self._cap = 0
        self._storage_id = ""
        self._progress = asyncio.Event()
        self._failure: RemoteError | None = None
        self._refusal: RemoteError | None = None
        self._blocked: RemoteError | None = None
        self._withheld = 0
        self._waits_for_room = True

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._channel.address

    @property
    def unacked(self) -> int:
        """Items that the server has not acked."""
        return self._window.items + self._next.items

    @property
    def offset(self) -> ClockOffset | None:
        """The server's clock against this one; None before `start`."""
        return None if self._session is None else self._session.offset

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Opens the session. May be called again after it failed.

        Raises:
            PreconditionError: The server does not take such a group.
            UnavailableError: No server answered in time.
        """
        self._failure = None
        self._session = SessionClient(
            self._channel,
            _METHOD,
            request_type=pb.InsertRequest,
            response_type=pb.InsertResponse,
            client_id=self._writer_id,
            spec=self._spec,
            prepare_hello=self._prepare_hello,
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_failure=self._on_failure,
            shared_bytes=shared_bytes(
                self._spec, self._channel.rpc, window_bytes=self._window.max_bytes
            ),
        )
        await self._session.start(timeout_s)

    async def close(self) -> None:
        """Ends the session, so that nobody waits for this group, and closes the connection.

        What is not acked may be lost: `flush` before.
        """
        if self._alarm is not None:
            self._alarm.cancel()
        if self._session is not None:
            await self._session.close()
        self._on_failure(UnavailableError("the client was closed", peer=self.address))
        await self._channel.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def insert(
        self,
        env_ret: EnvRet,
        response: PolicyResponse | None,
        *,
        new_segment: bool = False,
        table: str = "",
    ) -> None:
        """Takes one item, once there is room in the window; one call at a time.

        Args:
            env_ret: What the env returned. It is encoded before this returns.
            response: The policy's answer to it; None closes the rows that it ends.
            new_segment: Nothing before this item is joined to it.
            table: The one of the `tables` that it goes to; empty: all of them.

        Raises:
            InvalidRequestError: The server refused an earlier item, which does not fit; the error
                names the field. Nothing of its message was stored, this item was not sent, and
                later ones are not joined to those before.
            ResourceExhaustedError: The item passes the session's cap.
            CodecError: The item holds something that cannot be sent.
            StorageFullError: There is no room, and nobody waits for it: `stop_waiting_for_room`.
            PreconditionError: Inserts wait for samples, and samples for inserts; the reason is
                `BLOCKED`, and the message has the counters. This item was not sent; another call
                waits on.
            RemoteError: The session ended for good.
        """
        session = self._session
        if session is None:
            raise ReplayError("insert needs a session: await start() first")
        while self._window.is_full(self._next.items, self._next.nbytes):
            if not self._window:
                await self._send_next()
            await self._progressed()
        self._raise_errors()
        # Before the welcome of a new stream was dealt with, nothing goes to its memory.
        memory = self._window.memory
        if memory is not session.memory:
            memory = None
        self._key += 1
        if memory is not None:
            memory.begin(self._key)
        writer = Writer(memory=memory)
        item = pb.InsertItem(new_segment=new_segment)
        try:
            fill_env_ret(item.env_ret, env_ret, writer)
            if response is not None:
                fill_policy_response(item.response, response, writer)
            pieces = writer.pieces(item)
            nbytes = sum(memoryview(piece).nbytes for piece in pieces)
            shared = 0 if memory is None else memory.held_bytes(self._key)
            if table != self._next.table:
                self._close_message()
                self._next.table = table
            self._check_size(nbytes + shared)
        except (CodecError, ResourceExhaustedError):
            if memory is not None:
                memory.free(self._key)
            raise
        await self._put(pieces, nbytes, shared, writer.used()[0], env_ret.left_ns)

    def _check_size(self, nbytes: int) -> None:
        nbytes += self._next.envelope_bytes
        if nbytes > self._cap:
            own = self._cap < self._channel.rpc.max_message_bytes
            raise ResourceExhaustedError(
                too_large(nbytes, self._cap, _METHOD, session=own),
                peer=self.address,
                reason="MESSAGE_TOO_LARGE",
            )

    async def _put(
        self, item: list[Any], nbytes: int, shared: int, leaves: int, left_ns: int
    ) -> None:
        """Adds an item to the next message, and sends that if it is full."""
        message = self._next
        full = min(_MESSAGE_BYTES, self._cap) - message.envelope_bytes
        if message.items and (
            message.nbytes + nbytes + shared > full or message.leaves + leaves > _MAX_LEAVES
        ):
            self._close_message()
        if not message.items:
            self._left_ns = left_ns
        message.add(item, nbytes, leaves)
        if shared:
            message.share(self._key, shared)
        if message.items >= self._per_message or message.nbytes >= full:
            await self._send_next()
        else:
            message.freeze()
            if self._alarm is None:
                loop = asyncio.get_running_loop()
                self._alarm = loop.call_later(_MESSAGE_WAIT_S, self._send_late)

    def _close_message(self) -> None:
        """Gives the next message its number, and lets it be sent."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        message, session = self._next, self._session
        if not message.items:
            return
        assert session is not None
        self._seq += 1
        items, shared, keys = message.items, message.shared_bytes, tuple(message.keys)
        request = session.new_request()
        sent_ns = request.timing.sent_ns
        data = message.take(request, self._seq, session.epoch)
        nbytes, left_ns = len(data) + shared, self._left_ns or sent_ns
        sent = Sent(self._seq, session.epoch, items, data, nbytes, keys, sent_ns, left_ns)
        self._window.add(sent)
        self._unsent.append(sent)

    async def _send_next(self) -> None:
        """Sends what has come, in order."""
        self._close_message()
        try:
            async with self._sending:
                await self._send_closed()
        except asyncio.CancelledError:
            if self._unsent and self._alarm is None:  # nobody else may come
                self._alarm = asyncio.get_running_loop().call_later(0, self._send_late)
            raise

    async def _send_closed(self) -> None:
        session = self._session
        assert session is not None
        while self._unsent:
            sent = self._unsent.popleft()
            if sent.epoch != session.epoch:
                continue  # the welcome since then has sent it
            try:
                await session.send(sent.data)
            except asyncio.CancelledError:
                self._unsent.appendleft(sent)  # it may have waited for its turn to be written
                raise

    def _send_late(self) -> None:
        """Sends items that have waited long enough for others."""
        self._alarm = None
        task = asyncio.ensure_future(self._send_alone())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _send_alone(self) -> None:
        try:
            await self._send_next()
        except RemoteError as error:
            self._on_failure(error)

    def stop_waiting_for_room(self) -> None:
        """Lets `insert` and `flush` raise instead of waiting for room in a full buffer.

        For the end of a run, when who would make room may be gone. They still wait for the acks of
        what the buffer has room for.
        """
        self._waits_for_room = False
        self._progress.set()

    async def flush(self, timeout_s: float | None = None) -> None:
        """Returns when everything that was inserted is acked.

        Args:
            timeout_s: How long to wait, in seconds; None: for ever.

        Raises:
            DeadlineExceededError: It took longer.
            InvalidRequestError: The server refused an item, as in `insert`.
            StorageFullError: As in `insert`.
            PreconditionError: As in `insert`.
            RemoteError: The session ended for good.
        """
        try:
            await wait_within(self._flushed(), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(
                f"{self._window.items} items are not acked after {timeout_s:g} s",
                peer=self.address,
            ) from None

    async def _flushed(self) -> None:
        await self._send_next()
        while self._window:
            await self._progressed()
        self._raise_errors()

    async def _progressed(self) -> None:
        """Waits until the window may have changed."""
        self._raise_errors()
        if self._blocked is not None:
            blocked, self._blocked = self._blocked, None
            raise blocked
        if self._waits_for_room:
            self._progress.clear()
            await self._progress.wait()
        elif await self._is_full():
            raise StorageFullError(
                f"{self.address}: the buffer has no room for the last {self._window.items} items"
            )

    async def _is_full(self) -> bool:
        """Asks the server how far it is; returns whether it has no room for what is not acked.

        A number that comes again is answered with an ack at once.
        """
        await self._send_next()  # or the question would be taken for the message itself
        self._raise_errors()  # of what came meanwhile, which is not told again
        session, oldest = self._session, self._window.first
        if oldest is None:
            return False
        assert session is not None
        again = session.new_request()
        again.insert.seq = oldest.seq
        again.insert.epoch = session.epoch
        self._withheld = 0
        self._progress.clear()
        await session.send(again.SerializeToString())
        await self._progress.wait()  # for an ack, or for the welcome of the next connection
        return self._withheld > 0

    def _raise_errors(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    def _prepare_hello(self, request: pb.InsertRequest) -> None:
        request.hello.writer_id = self._writer_id
        request.hello.storage_id = self._storage_id
        request.hello.tables.extend(self._tables)

    async def _on_welcome(self, reader: Reader[pb.InsertResponse]) -> None:
        welcome = reader.message.welcome
        session = self._session
        assert session is not None
        self._cap = welcome.session.max_message_bytes
        self._per_message = items_per_message(self._window.max_items)
        if welcome.max_items:
            self._per_message = min(self._per_message, welcome.max_items)
        if welcome.next_seq > self._seq + 1:
            raise PreconditionError(
                f"the server has {welcome.next_seq - 1} messages of writer {self._writer_id}, "
                f"which sent {self._seq}: another writer has its id",
                peer=self.address,
            )
        oldest = self._window.first
        if self._storage_id and welcome.storage_id != self._storage_id:
            self.rebased += 1
            logger.warning(
                "%s lost what it held; env %s goes on from message %d",
                self.address,
                self._spec.env_id,
                self._seq + 1 if oldest is None else oldest.seq,
            )
        self._storage_id = welcome.storage_id
        self._forget(welcome.next_seq - 1)
        if self._window.memory is not None:
            self._next.take_out(self._window.memory)
        self._window.move_to(session.memory)
        # Fields that come twice are merged, and the last number counts.
        epoch = pb.InsertRequest(insert=pb.InsertItems(epoch=session.epoch)).SerializeToString()
        for sent in tuple(self._window):
            self.resent += 1
            await session.send_now(sent.data + epoch)

    def _on_message(self, reader: Reader[pb.InsertResponse]) -> None:
        if reader.message.WhichOneof("body") != "ack":
            return
        ack = reader.message.ack
        self._withheld = ack.withheld
        if self.stats.enabled:
            self._record(ack.seq, reader.message.timing)
        self._blocked = None
        if ack.HasField("blocked"):
            self._blocked = from_error_status(ack.blocked, peer=self.address)
        self._forget(ack.seq)
        if ack.expected_seq:
            raise PreconditionError(
                f"the server expects message {ack.expected_seq} of writer {self._writer_id}, which "
                "came before and was acked",
                peer=self.address,
            )
        if ack.HasField("error"):
            self._refusal = from_error_status(ack.error, peer=self.address)
            self._forget(ack.seq + 1)

    def _record(self, seq: int, timing: Timing) -> None:
        session = self._session
        if session is None:
            return
        heard_ns, echo_ns = session.heard_ns, timing.echo_sent_ns
        for number, _, _, _, _, _, sent_ns, left_ns in self._window:
            if number > seq:
                break
            received_ns = lower_ns = upper_ns = math.nan
            if sent_ns == echo_ns:
                received_ns = timing.received_ns
                lower_ns, upper_ns = session.offset.bounds(heard_ns)
            self.stats.record_stamps(
                INSERT, (heard_ns, sent_ns, left_ns, received_ns, lower_ns, upper_ns)
            )

    def _forget(self, seq: int) -> None:
        """Drops from the window what was seen by the server."""
        self.acked += self._window.forget(seq)
        self._progress.set()

    def _on_failure(self, error: RemoteError) -> None:
        self._failure = error
        self._progress.set()
