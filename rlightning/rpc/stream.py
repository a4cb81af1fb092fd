"""One stream of a session, and the session that outlives it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.message import Message

from rlightning.errors import ResourceExhaustedError, UnavailableError
from rlightning.latency import ClockOffset
from rlightning.latency.ways import left_at
from rlightning.rpc import status
from rlightning.rpc.handlers import Context
from rlightning.rpc.protocol import Arrival, stamp
from rlightning.types import EnvMeta
from rlightning.types.sent import WhenLeft
from rlightning.utils.config.rpc import RpcConfig

if TYPE_CHECKING:
    from rlightning.rpc.session import SessionHandler

# What a write raises when the call has ended meanwhile.
BROKEN = (grpc.aio.BaseError, asyncio.InvalidStateError)


@dataclass(slots=True)
class Messages:
    """How many messages there were in all streams of a method."""

    received: int = 0
    sent: int = 0


class Stream:
    """One gRPC stream; made in the task that serves it.

    Attributes:
        messages: Counts those of the method.
        context: The call.
        handler: What the service does with it.
        session: The session that it claimed; None before its hello.
        previous: `gone` of the stream that held the session before; None if there was none.
        error: With what it was ended from outside; None if it was not.
        heard_ns: When the peer was last heard, by the monotonic clock.
        busy: The service is at work on a message, so that nothing is read: no sign of a dead peer.
        opened: The service has accepted it.
        heard_more: Something came after the hello.
        left: The client has said that it ends the session.
        write_since_ns: Since when a write has been waiting for the peer to read; 0 if none is.
        stuck: A write of it was given up while gRPC still waits for the peer to read.
        gone: Set once the service has taken note of its end.
    """

    def __init__(
        self, context: Context, handler: SessionHandler[Any, Any], messages: Messages
    ) -> None:
        task = asyncio.current_task()
        assert task is not None  # gRPC runs each handler in a task of its own
        self._task = task
        self._lock = asyncio.Lock()
        self._ending = False
        self._writer: asyncio.Task[Any] | None = None
        self._released: asyncio.Task[Any] | None = None
        self.messages = messages
        self.context = context
        self.handler = handler
        self.session: Session | None = None
        self.previous: asyncio.Event | None = None
        self.error: Exception | None = None
        self.heard_ns = time.monotonic_ns()
        self.busy = False
        self.opened = False
        self.heard_more = False
        self.left = False
        self.write_since_ns = 0
        self.stuck = False
        self.gone = asyncio.Event()

    def end(self, error: Exception) -> None:
        """Ends the stream with the status of `error`, unless it is ending already."""
        if not self._ending:
            self._ending = True
            self.error = error
            self._task.cancel()
            if self._writer is not None and self._writer is not self._task:
                self._released = self._writer
                self._writer.cancel()  # `write` catches that

    def mark_ending(self) -> None:
        """Keeps `end` from disturbing the clean-up, which is at work from now on."""
        self._ending = True

    async def write(self, data: bytes) -> bool:
        """Sends one message after those that wait already; gRPC allows one write at a time.

        Returns:
            Whether gRPC took it; False once the stream is broken.
        """
        async with self._lock:
            if self._ending:
                return False
            self.write_since_ns = time.monotonic_ns()
            self._writer = asyncio.current_task()
            try:
                await self.context.write(data)
                self.messages.sent += 1
            except BROKEN:
                return False
            except asyncio.CancelledError:
                # The write goes on inside gRPC, where another operation beside it is an error.
                self.stuck = True
                if self._writer is self._task:
                    raise  # ended from outside, or the peer has gone
                if self._released is self._writer and not _still_cancelled(self._writer):
                    return False
                self._writer = None
                self.end(UnavailableError("a write was interrupted"))
                raise
            finally:
                self.write_since_ns = 0
                self._writer = None
            return True


def _still_cancelled(task: asyncio.Task[Any] | None) -> bool:
    """Takes one cancellation back; tells whether another one is meant for the task itself."""
    uncancel = getattr(task, "uncancel", None)  # Python >= 3.11
    return uncancel is not None and uncancel() > 0


class Session:
    """What the server knows of one client of one method; outlives its streams.

    Attributes:
        handler: What the service does with it.
        id: For logs.
        client_id: Name that the client gave.
        token: Proves the right to take the session over.
        epoch: How often it was opened or taken over, from 1.
        resumed: The current stream took over an earlier one's `state`.
        spec: Env that the client declared; None if it did not.
        state: The service's own; kept while the session lives.
        peer: Address of the client.
        arrival: Stamps of the message that `on_message` is given.
        offset: The client's clock against this one, as far as its heartbeats tell.
        seq: Number of the last one that had one; 0 before.
        client_state: What the client said it does, a `ClientState`.
        rpc: Limits and times of the server.
        busy_since_ns: Since when the client has been busy with one thing, by its clock; 0 if not.
        owner: Stream that holds it; None while its client is away.
        latest_gone: `gone` of the latest stream.
        heard_ns: When an earlier stream last heard its client; counts while there is no owner.
        detached_ns: When that stream ended.
    """

    def __init__(
        self, client_id: str, handler: SessionHandler[Any, Any], method: str, rpc: RpcConfig
    ) -> None:
        self.handler = handler
        self.rpc = rpc
        self.id = secrets.token_hex(8)
        self.client_id = client_id
        self.token = secrets.token_urlsafe(24)
        self.epoch = 1
        self.resumed = False
        self.spec: EnvMeta | None = None
        self.state: Any = None
        self.peer = ""
        self.arrival = Arrival(0, 0, 0)
        self.offset = ClockOffset()
        self.seq = 0
        self.client_state = 0
        self.busy_since_ns = 0
        self.owner: Stream | None = None
        self.latest_gone: asyncio.Event | None = None
        self.heard_ns = 0
        self.detached_ns = 0
        self._method = method
        self._cap = rpc.max_message_bytes
        self._writable: Stream | None = None

    def attach(self, stream: Stream) -> None:
        """Lets `send` use a stream; its welcome has been sent."""
        if self.owner is stream:
            self._writable = stream

    def detach(self, stream: Stream) -> None:
        """Keeps `send` off a stream that ends."""
        if self._writable is stream:
            self._writable = None

    @property
    def connected(self) -> bool:
        """Whether the client can be sent to right now."""
        return self._writable is not None

    def when_left(self, message: Any) -> WhenLeft:
        """Returns what tells when the message at hand left the client, as `mark_left` takes it.

        Args:
            message: That whose stamps `arrival` holds.
        """
        sent_ns, received_ns, _ = self.arrival
        known = message.timing.clock_id == self.offset.clock_id
        bounds = self.offset.bounds(received_ns) if known else (math.nan, math.nan)
        return partial(left_at, sent_ns, received_ns, *bounds)

    async def send(self, message: Message | bytes, *, answers: Arrival | None = None) -> bool:
        """Sends one message on the session's current stream.

        Safe to call from any task of the loop; messages go out in the order of the calls.

        Args:
            message: Response of the method, stamped here, or such a response encoded and stamped by
                `protocol.stamp` already.
            answers: Stamps of the request that it answers, for the client's clock estimate.

        Returns:
            False if there is no stream, or it broke: the message is lost then, and what the client
            still needs is asked for again when it resumes.

        Raises:
            ResourceExhaustedError: The message passes the transport cap.
        """
        stream = self._writable
        if stream is None:
            return False
        if isinstance(message, bytes):
            data = message
        else:
            stamp(message, answers)
            data = message.SerializeToString()
        if len(data) > self._cap:
            raise ResourceExhaustedError(
                status.too_large(len(data), self._cap, self._method), reason="MESSAGE_TOO_LARGE"
            )
        return await stream.write(data)
