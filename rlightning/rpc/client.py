"""The client's side of a session: connects, keeps the lease, connects again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

from rlightning.errors import (
    AlreadyExistsError,
    CodecError,
    DeadlineExceededError,
    InvalidRequestError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.latency import ClockOffset, boot_id
from rlightning.rpc import status
from rlightning.rpc.activity import current_activity
from rlightning.rpc.auth import is_loopback
from rlightning.rpc.channel import Channel, own_cancellation
from rlightning.rpc.client_stream import ClientStream
from rlightning.rpc.handlers import EOF
from rlightning.rpc.protocol import (
    LIBRARY_VERSION,
    PROTOCOL_VERSION,
    hello_of,
    stamp,
    valid_client_id,
    welcome_of,
)
from rlightning.types import EnvMeta
from rlightning.utils.waiting import wait_within
from rlightning.v1.session_pb2 import CLIENT_STATE_LEAVING, Welcome
from rlightning.v1.session_pb2 import SharedMemory as Offer
from rlightning.wire import Limits, Reader, Writer, fill_env_meta
from rlightning.wire.shared import SharedMemory

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

# What ends a stream but not the session: after these the client connects again.
_RETRIED = (UnavailableError, AlreadyExistsError, DeadlineExceededError)
_WELCOME_TIMEOUT_S = 30.0


class SessionClient(Generic[RequestT, ResponseT]):
    """One session on one bidirectional method; survives cuts and restarts of the server.

    After a cut it connects again by itself, with the resume token, until it is closed or the server
    refuses it for good. A server that falls silent is dialled anew, since the connection to it may
    be dead; open calls over it end with UNAVAILABLE. The owner keeps what is not answered yet, in
    this order:

    1. record the request as unanswered;
    2. build it with `new_request()` and the current `epoch`, encode it, `await send(...)`, with no
       `await` in between;
    3. forget it when its answer comes.

    In `on_welcome` the owner sends every unanswered request again, with the new epoch. So a request
    may arrive twice, under one number; none is lost.

    Belongs to one event loop. Callbacks run in it and must not block.

    Args:
        channel: Where to; others may use it, too.
        method: Full name of the method, `/package.Service/Method`.
        request_type: Message of the client; has `hello` and `heartbeat` in a oneof `body`.
        response_type: Message of the server; has `welcome`, `heartbeat` and `drain`.
        client_id: Who this is: `[A-Za-z0-9._-]{1,64}`, unique among the clients of the method.
        spec: Env that asks or writes, where the method wants one.
        prepare_hello: Adds the method's own fields to the hello.
        on_welcome: Called after every welcome, while no `send` proceeds; sends with `send_now`.
            Answers to what it sent may reach `on_message` before it returns.
        on_message: Called with every message that is neither welcome nor heartbeat; arrays read
            from it are views. Must be quick: nothing is read meanwhile.
        on_failure: Called once if the session cannot go on; `failure` holds the error too.
        welcome_timeout_s: How long, in seconds, the server may take to answer a hello; each time
            that it does not, twice as long as before, up to 30.
        route: Asked before each attempt to connect where to go, instead of `channel`; whose channel
            it returns stays open for as long as the session is there.
        shared_bytes: How much memory to share with a server of this host, for the tensors of one
            stream's requests; 0: none.

    Attributes:
        offset: The server's clock against this one.
        encoded: Stamp of a request, and when it was encoded if that took its time: then it left.
        epoch: That of the current stream; 0 before the first welcome.
        resumed: Whether the server still held the session's state at the last welcome.
        lost_ns: When the last stream ended, by the monotonic clock; before the first one, when the
            session was made.
        draining: The server has announced its shutdown.
        failure: Why the session cannot go on; None while it can.
        memory: What the current stream shares with the server; None if it does not. What is put
            there for a request may be freed when its answer has come.
        activity: What heartbeats say this client does; by default that of the surroundings in which
            the session was made (see `Activity.told_by_sessions`).

    Raises:
        InvalidRequestError: `client_id` is not one.
    """

    def __init__(
        self,
        channel: Channel,
        method: str,
        *,
        request_type: type[RequestT],
        response_type: type[ResponseT],
        client_id: str,
        on_message: Callable[[Reader[ResponseT]], None],
        spec: EnvMeta | None = None,
        prepare_hello: Callable[[RequestT], None] | None = None,
        on_welcome: Callable[[Reader[ResponseT]], Awaitable[None]] | None = None,
        on_failure: Callable[[RemoteError], None] | None = None,
        welcome_timeout_s: float = _WELCOME_TIMEOUT_S,
        route: Callable[[], Awaitable[Channel]] | None = None,
        shared_bytes: int = 0,
    ) -> None:
        if not valid_client_id(client_id):
            raise InvalidRequestError(
                f"client id {client_id[:80]!r} does not match [A-Za-z0-9._-]{{1,64}}"
            )
        self.client_id = client_id
        self.offset = ClockOffset()
        self.encoded = (0, 0)
        self.epoch = 0
        self.resumed = False
        self.lost_ns = time.monotonic_ns()
        self.draining = False
        self.failure: RemoteError | None = None
        self.memory: SharedMemory | None = None
        self.activity = current_activity()
        self._channel = channel
        self._method = method
        self._request_type = request_type
        self._response_type = response_type
        self._spec = spec
        self._prepare_hello = prepare_hello
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._on_failure = on_failure
        self._welcome_timeout_s = self._patience_s = welcome_timeout_s
        self._route = route
        self._shared_bytes = shared_bytes
        self._limits = Limits(max_bytes=channel.rpc.max_message_bytes)
        self._pauses_ms = channel.rpc.reconnect_initial_ms, channel.rpc.reconnect_max_ms
        self._token = ""
        self._stream: ClientStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._welcomed = asyncio.Event()
        self._welcomes = 0
        self._last_error: RemoteError | None = None

    @property
    def peer(self) -> str:
        """Address of the server."""
        return self._channel.address

    @property
    def connected(self) -> bool:
        """Whether a stream is open and welcomed."""
        return self._stream is not None

    @property
    def heard_ns(self) -> int:
        """When the server was last heard, in monotonic nanoseconds; 0 while there is no stream."""
        return 0 if self._stream is None else self._stream.heard_ns

    @property
    def last_error(self) -> RemoteError | None:
        """Why the last attempt to connect failed, or the last stream broke; None while welcomed."""
        return self._last_error

    async def start(self, timeout_s: float) -> None:
        """Connects; returns after the first welcome.

        A server that is not there yet, or still holds another client's session under this id, is
        tried again until the time is up.

        Args:
            timeout_s: How long to try, in seconds.

        Raises:
            RemoteError: The server refused the session.
            UnavailableError: No connection within the time; says why.
        """
        self._closing = False
        self._task = asyncio.create_task(self._run())
        welcomed = asyncio.create_task(self._welcomed.wait())
        waiting = {welcomed, self._task}
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when="FIRST_COMPLETED")
        finally:
            welcomed.cancel()
        if self._welcomed.is_set() and self.failure is None:
            return
        last = self._last_error
        await self.close()
        if self.failure is not None:
            raise self.failure
        if last is not None:
            raise last
        raise UnavailableError(f"no answer within {timeout_s:g} s", peer=self.peer)

    async def close(self) -> None:
        """Ends the session in order. Safe to repeat.

        Waits at most a second until what is to be sent is, and another one for the server. Between
        two streams it comes back to a server that keeps its place, for a second at most.
        """
        self._closing = True
        stream, task = self._stream, self._task
        if stream is not None:
            await stream.half_close(self._heartbeat(CLIENT_STATE_LEAVING))
            if task is not None:
                await asyncio.wait({task}, timeout=1.0)
        if task is None:
            return
        away = stream is None and not task.done()
        task.cancel()
        await asyncio.wait({task})
        if away and self._token:
            with suppress(RemoteError, asyncio.TimeoutError):
                await wait_within(self._come_back_to_leave(), 1.0)

    def new_request(self) -> RequestT:
        """Returns an empty request that carries the stamps of now."""
        request = self._request_type()
        stamp(request)
        return request

    async def send(self, data: bytes) -> bool:
        """Sends one request after those that wait already.

        While a welcome is being dealt with, it waits for that to end.

        Args:
            data: The encoded request.

        Returns:
            Whether gRPC took it. False if there is no stream, or it broke: then `on_welcome` has to
            send it again.

        Raises:
            ResourceExhaustedError: It passes the cap of the session or of the transport.
            RemoteError: The session has failed for good.
        """
        stream = self._stream
        if stream is None:
            if self.failure is not None:
                raise self.failure
            return False
        if not stream.ready.is_set():
            await stream.ready.wait()
        return await self._write(stream, data)

    async def settled(self) -> None:
        """Returns when no welcome is being dealt with: what is sent at once goes out after it."""
        while (stream := self._stream) is not None and not stream.ready.is_set():
            await stream.ready.wait()

    async def probe(self) -> None:
        """Asks the server for a sign of life, unless something else is being sent anyway."""
        stream = self._stream
        if stream is not None and not stream.writing:
            await stream.write(self._heartbeat())

    async def exchange(self, timeout_s: float) -> None:
        """Sends a heartbeat and waits for its answer: what comes next finds the stream warm.

        Args:
            timeout_s: How long to wait at the most, in seconds; the lease is for who stays silent.
        """
        stream = self._stream
        if stream is not None:
            stream.beaten.clear()
            await stream.write(self._heartbeat())
            with suppress(asyncio.TimeoutError):
                await wait_within(stream.beaten.wait(), timeout_s)

    def renew(self, error: RemoteError) -> None:
        """Gives the stream up with an error, and its connection; the next has another one."""
        stream = self._stream
        if stream is not None:
            stream.lose(error, with_connection=True)

    async def send_now(self, data: bytes) -> bool:
        """As `send`, for use inside `on_welcome`."""
        return self._stream is not None and await self._write(self._stream, data)

    async def _write(self, stream: ClientStream, data: bytes) -> bool:
        if len(data) > stream.cap:
            transport = self._channel.rpc.max_message_bytes
            raise ResourceExhaustedError(
                status.too_large(
                    len(data), stream.cap, self._method, session=stream.cap < transport
                ),
                peer=self.peer,
                reason="MESSAGE_TOO_LARGE",
            )
        return await stream.write(data)

    async def _run(self) -> None:
        """Connects again and again, until closed or refused."""
        pause_ms = float(self._pauses_ms[0])
        while True:
            welcomes = self._welcomes
            try:
                await self._connect_once()
                return  # half-closed by this side
            except RemoteError as error:
                if self._closing:
                    return  # the next one would take the session over, and be cut off
                if not isinstance(error, _RETRIED) and not status.is_passing(error):
                    self._fail(error)
                    return
                self._last_error = error
                logger.info("%s: %s; connecting again", self._method, error)
            except Exception as error:
                logger.exception("%s: a callback of the session raised", self._method)
                self._fail(RemoteError(f"{type(error).__name__}: {error}", peer=self.peer))
                return
            if self._welcomes != welcomes:
                pause_ms = float(self._pauses_ms[0])
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, self._pauses_ms[1])

    def _fail(self, error: RemoteError) -> None:
        # Who waits for the session, or uses it next, is told; no need to do so twice.
        logger.info("%s: the session of %s ended: %s", self._method, self.client_id, error)
        self.failure = error
        if self._on_failure is not None:
            self._on_failure(error)

    async def _connect_once(self) -> None:
        """Holds one stream from hello to its end.

        Raises:
            RemoteError: The stream ended in any way but a half-close of this side.
        """
        if self._route is not None:
            self._turn_to(await self._route())
        stream = ClientStream(self._channel, self._method)
        # Of the last stream the server may still be reading: each has memory of its own.
        memory = self._offered_memory()
        try:
            reader = await self._greet(stream, None if memory is None else memory.offer)
            welcome = welcome_of(reader.message)
            if welcome.shared_memory:
                self.memory = memory
            self._accept(stream, welcome)
            await self._hold(stream, reader)
        finally:
            if self._stream is not None:
                self.lost_ns = time.monotonic_ns()
            self._stream = None
            self.memory = None
            if memory is not None:
                memory.withdraw()
                memory = None  # a traceback may keep this frame
            stream.close()
            stream.ready.set()  # who waits in `send` learns there that the stream is over
            stream.beaten.set()
            if stream.connection_lost:
                await stream.give_up_connection()

    async def _come_back_to_leave(self) -> None:
        """Takes the session over once more, and ends it in order.

        Raises:
            RemoteError: The server cannot be reached, or refused.
        """
        stream = ClientStream(self._channel, self._method)
        try:
            await self._greet(stream, None)
            await stream.half_close(self._heartbeat(CLIENT_STATE_LEAVING))
            while await self._read(stream) is not None:
                pass
        finally:
            stream.close()

    def _turn_to(self, channel: Channel) -> None:
        """Lets the next stream go to a server, which knows nothing of a session at another one."""
        if channel is not self._channel:
            self._channel = channel
            self._token = ""

    def _offered_memory(self) -> SharedMemory | None:
        """Returns memory for the next stream, if its server may be able to read it."""
        if not self._shared_bytes or not is_loopback(self.peer):
            return None
        try:
            return SharedMemory(self._shared_bytes)
        except OSError as error:
            logger.info("%s: no shared memory: %s", self._method, error)
            return None

    async def _greet(self, stream: ClientStream, offer: Offer | None) -> Reader[ResponseT]:
        request = self._request_type()
        if self._prepare_hello is not None:
            self._prepare_hello(request)
        hello = hello_of(request)
        hello.protocol_version = PROTOCOL_VERSION
        hello.library_version = LIBRARY_VERSION
        hello.client_id = self.client_id
        hello.resume_token = self._token
        hello.boot_id = boot_id()
        if offer is not None:
            hello.shared_memory.CopyFrom(offer)
        writer = Writer()
        if self._spec is not None:
            fill_env_meta(hello.spec, self._spec, writer)
        hello.SetInParent()
        stamp(request)
        read = asyncio.create_task(self._greeting(stream, writer.finish(request)))
        try:
            await asyncio.wait({read}, timeout=self._patience_s)
            if not read.done():
                stream.connection_lost = True
                what = f"no welcome within {self._patience_s:g} s"
                self._patience_s = max(
                    self._patience_s, min(2 * self._patience_s, _WELCOME_TIMEOUT_S)
                )
                raise UnavailableError(what, peer=self.peer)
            reader = read.result()
        finally:
            if not read.done():
                stream.close()
                # Closing does not wake a write that still waits for the connection.
                read.cancel()
                await asyncio.wait({read})
            if not read.cancelled():
                read.exception()  # or asyncio complains of what a close made nobody wait for
        if reader is None or reader.message.WhichOneof("body") != "welcome":
            raise InvalidRequestError(
                "the server did not answer hello with welcome", peer=self.peer
            )
        return reader

    async def _greeting(self, stream: ClientStream, hello: bytes) -> Reader[ResponseT] | None:
        await self._write(stream, hello)
        return await self._read(stream)

    def _accept(self, stream: ClientStream, welcome: Welcome) -> None:
        self._token = welcome.resume_token
        self._welcomes += 1
        self.epoch = welcome.epoch
        self.resumed = welcome.resumed
        self.draining = False
        self._last_error = None
        self._patience_s = self._welcome_timeout_s
        stream.accept(welcome)
        initial_ms, max_ms = self._pauses_ms
        initial_ms = max(1, welcome.reconnect_initial_ms or initial_ms)
        self._pauses_ms = initial_ms, max(initial_ms, welcome.reconnect_max_ms or max_ms)
        self._stream = stream

    async def _hold(self, stream: ClientStream, welcome: Reader[ResponseT]) -> None:
        message: Any = welcome.message
        stream.measure(message.timing, self.offset, self.encoded)
        reading = asyncio.create_task(self._read_all(stream))
        beating = asyncio.create_task(stream.keep_lease(self._heartbeat, self.peer))
        greeting = asyncio.create_task(self._greeted(stream, welcome))
        tasks = {reading, beating, greeting}
        try:
            waiting = set(tasks)
            while reading in waiting:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for task in done:
                    task.result()
        finally:
            stream.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _greeted(self, stream: ClientStream, welcome: Reader[ResponseT]) -> None:
        if self._on_welcome is not None:
            await self._on_welcome(welcome)
        stream.ready.set()
        self._welcomed.set()

    async def _read(self, stream: ClientStream) -> Reader[ResponseT] | None:
        try:
            data: Any = await stream.call.read()
        except asyncio.CancelledError:
            if stream.lost is not None:
                raise stream.lost from None
            if stream.connection_given_up and not own_cancellation(True):
                raise self._channel.given_up() from None
            raise
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error, peer=self.peer, method=self._method) from error
        if data is EOF:
            return None
        stream.heard_ns = time.monotonic_ns()
        try:
            return Reader(self._response_type, data, limits=self._limits)
        except CodecError as error:
            raise RemoteError(f"sent what cannot be decoded: {error}", peer=self.peer) from error

    async def _read_all(self, stream: ClientStream) -> None:
        on_message = self._on_message
        while (reader := await self._read(stream)) is not None:
            message: Any = reader.message
            stream.measure(message.timing, self.offset, self.encoded)
            body = message.WhichOneof("body")
            if body == "heartbeat":
                stream.beaten.set()
                continue
            if body == "drain":
                self.draining = True
                logger.info(
                    "%s: %s is shutting down: %s", self._method, self.peer, message.drain.reason
                )
                continue
            on_message(reader)
            # Whoever waited for this message goes first, before gRPC is asked for the next one.
            await asyncio.sleep(0)
        if not stream.half_closed:
            raise UnavailableError("the server ended the stream", peer=self.peer)

    def _heartbeat(self, state: int | None = None) -> bytes:
        request: Any = self.new_request()
        request.heartbeat.state = self.activity.state if state is None else state
        request.heartbeat.busy_since_ns = self.activity.busy_since_ns
        if self._stream is not None:  # so that the server learns of this clock, too
            request.timing.echo_sent_ns, request.timing.received_ns = self._stream.heard
        return bytes(request.SerializeToString())
