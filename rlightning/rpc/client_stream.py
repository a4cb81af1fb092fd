"""The client's side of one stream: a gRPC call that is written to by one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from rlightning.errors import RemoteError, UnavailableError
from rlightning.latency import ClockOffset, boot_id
from rlightning.rpc.channel import Channel, own_cancellation
from rlightning.v1.session_pb2 import Timing, Welcome

# What a write raises when the call has ended meanwhile.
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class ClientStream:
    """One call, what was agreed for it, and its lease.

    Args:
        channel: Where to.
        method: Full name of the method that is called.

    Attributes:
        call: The call.
        cap: The largest message in bytes that may be written.
        heartbeat_s: How often to send a heartbeat, in seconds.
        lease_s: After how much silence the server is taken for dead, in seconds.
        same_clock: Whether the server's machine is this one.
        heard_ns: When the server was last heard, by the monotonic clock.
        heard: When the server sent its last message, by its clock, and when that was here.
        ready: Set once the welcome has been dealt with, or the stream is over.
        beaten: Set by an answer to a heartbeat, and when the stream is over.
        half_closed: This side has ended it in order.
        lost: Why it was given up; None if it was not.
        connection_lost: The connection may be dead, too.
    """

    def __init__(self, channel: Channel, method: str) -> None:
        self.call: Any = channel.stream_stream(method)()
        self.cap = channel.rpc.max_message_bytes
        self.heartbeat_s = 1.0
        self.lease_s = 10.0
        self.same_clock = False
        self.heard_ns = time.monotonic_ns()
        self.heard = (0, 0)
        self.ready = asyncio.Event()
        self.beaten = asyncio.Event()
        self.half_closed = False
        self.lost: RemoteError | None = None
        self.connection_lost = False
        self._channel = channel
        self._connection = channel.connection
        self._lock = asyncio.Lock()
        self._closed = False
        self._given_up = False

    @property
    def connection_given_up(self) -> bool:
        """Whether its connection was, by whoever shares the channel: that has ended the call."""
        return self._channel.connection != self._connection

    @property
    def writing(self) -> bool:
        """Whether a write is on its way, or waits."""
        return self._lock.locked()

    async def write(self, data: bytes) -> bool:
        """Writes one message; False once the stream is broken."""
        async with self._lock:  # gRPC allows one write at a time
            if self._closed or self.half_closed:
                return False
            try:
                await self.call.write(data)
            except _BROKEN:
                return False  # the reader gets the reason
            except asyncio.CancelledError:
                if not own_cancellation(self._given_up or self.connection_given_up):
                    return False
                # The write goes on inside gRPC, and a second one beside it would be an error there.
                self.lose(UnavailableError("a write was interrupted"))
                raise
            return True

    def lose(self, error: RemoteError, *, with_connection: bool = False) -> None:
        """Gives the stream up, and its connection where that is said; its reader raises `error`."""
        if self.lost is None:
            self.lost = error
        self.connection_lost |= with_connection
        self._given_up = True
        self.call.cancel()

    async def give_up_connection(self) -> None:
        """Has the channel make another connection, unless it has one already."""
        await self._channel.renew(self._connection)

    def accept(self, welcome: Welcome) -> None:
        """Takes note of what the server agrees to."""
        self.cap = min(welcome.max_message_bytes or self.cap, self.cap)
        self.heartbeat_s = max(0.01, welcome.heartbeat_ms / 1000)
        self.lease_s = max(2 * self.heartbeat_s, welcome.lease_ms / 1000)
        self.same_clock = bool(welcome.boot_id) and welcome.boot_id == boot_id()

    def measure(self, timing: Timing, offset: ClockOffset, encoded: tuple[int, int]) -> None:
        """Learns of the server's clock from the message that was read last.

        Args:
            timing: Its stamps.
            offset: That clock against this one.
            encoded: Stamp of a request, and when it left if that was later.
        """
        self.heard = timing.sent_ns, self.heard_ns
        sent_ns = timing.echo_sent_ns
        if sent_ns:
            if timing.clock_id != offset.clock_id or self.same_clock != offset.same_clock:
                offset.set_peer(timing.clock_id, same_clock=self.same_clock)
            stamped_ns, encoded_ns = encoded
            if sent_ns == stamped_ns:
                sent_ns = encoded_ns
            offset.update(sent_ns, timing.received_ns, timing.sent_ns, self.heard_ns)

    async def keep_lease(self, heartbeat: Callable[[], bytes], peer: str) -> None:
        """Sends heartbeats; gives the stream up, and returns, when the server falls silent.

        Args:
            heartbeat: Makes the message.
            peer: Address of the server.
        """
        while True:
            due_ns = time.monotonic_ns() + int(self.heartbeat_s * 1e9)
            await asyncio.sleep(self.heartbeat_s)
            now = time.monotonic_ns()
            if now - due_ns > self.lease_s * 0.25e9:
                # This loop stood still, so what the server sent has not been read yet.
                self.heard_ns += now - due_ns
            silence_s = (now - self.heard_ns) / 1e9
            if silence_s > self.lease_s:
                # TCP may try a link that is back only after as long as it was down: dial anew.
                self.lose(
                    UnavailableError(f"nothing heard for {silence_s:.1f} s", peer=peer),
                    with_connection=True,
                )
                return
            if self.writing:
                continue  # behind a write that waits for the server to read; silence tells the rest
            await self.write(heartbeat())

    async def half_close(self, farewell: bytes) -> None:
        """Tells the server that nothing more comes than a last message."""
        self.half_closed = True
        try:
            await asyncio.wait({asyncio.ensure_future(self._done_writing(farewell))}, timeout=1.0)
        finally:
            self._closed = True

    async def _done_writing(self, farewell: bytes) -> None:
        async with self._lock:
            with contextlib.suppress(*_BROKEN):  # over already
                await self.call.write(farewell)
                await self.call.done_writing()

    def close(self) -> None:
        """Cancels the call; one that is only dropped is never collected."""
        self._closed = True
        self._given_up = True
        self.call.cancel()
