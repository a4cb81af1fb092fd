"""The server's side of a session: hello, welcome, lease, epochs, caps, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from google.protobuf.message import Message

from rlightning.errors import (
    InvalidRequestError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.latency import boot_id
from rlightning.rpc import status
from rlightning.rpc.auth import is_loopback
from rlightning.rpc.handlers import EOF, Context, MethodHandler
from rlightning.rpc.protocol import (
    LIBRARY_VERSION,
    PROTOCOL_VERSION,
    Arrival,
    arrival_of,
    check_hello,
    hello_of,
    stamp,
    welcome_of,
)
from rlightning.rpc.registry import SessionRegistry
from rlightning.rpc.spec import session_cap
from rlightning.rpc.stream import Session, Stream
from rlightning.rpc.trace_context import trace_of, use_trace
from rlightning.utils.config.rpc import RpcConfig
from rlightning.utils.log_fields import add_log_fields
from rlightning.v1 import space_pb2
from rlightning.v1.session_pb2 import CLIENT_STATE_LEAVING, Heartbeat, Hello, Timing
from rlightning.wire import Limits, Reader, Writer, fill_env_meta, read_env_meta
from rlightning.wire.shared import open_shared

__all__ = ["Session", "SessionHandler", "SessionMethod", "SessionRegistry", "run_session"]

logger = logging.getLogger(__name__)

_AFTERMATH_S = 1.0
# Twice what the spec of a hello may take (`Limits.max_kept_bytes`).
_MAX_HELLO_BYTES = 8 * 2**20
_MAX_CLOCK_ID = 64

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class SessionHandler(ABC, Generic[RequestT, ResponseT]):
    """What a service does with the sessions of one method.

    The callbacks of one session never run at the same time, and every `on_open` that returned is
    followed by one `on_close`. Raising ends the stream with the error's status, and for all but
    UNAVAILABLE the session too.

    Attributes:
        request_type: Message of the client; has `hello`, `heartbeat` and others in a oneof `body`.
        response_type: Message of the server; has `welcome`, `heartbeat`, `drain` and others.
        shares_memory: Whether tensors of a request may lie in memory that its client shares, and
            changes once the request is answered: nothing may be a view of them then.
        max_hello_bytes: Largest hello in bytes; `rpc.max_message_bytes` if that is less.
    """

    request_type: type[RequestT]
    response_type: type[ResponseT]
    shares_memory = False
    max_hello_bytes = _MAX_HELLO_BYTES

    @abstractmethod
    async def on_open(self, session: Session, reader: Reader[RequestT]) -> ResponseT:
        """Accepts a stream of a new or resumed session.

        `session.resumed` tells whether `session.state` is that of an earlier stream; answers that
        were sent and not received then are for this method, or the client's repeated requests, to
        bring back.

        Args:
            session: The session; `spec` is that of the hello.
            reader: The hello.

        Returns:
            The welcome with the method's own fields set; the session's are filled in afterwards.

        Raises:
            RLightningError: The client is refused with the status of the error.
        """

    @abstractmethod
    async def on_message(self, session: Session, reader: Reader[RequestT]) -> None:
        """Takes a message other than a heartbeat.

        The next one is read when this returns, and heartbeats wait too: slow work belongs into a
        task. `session.arrival` holds the stamps of this message until the first `await`.

        Args:
            session: The session.
            reader: The message; arrays read from it are views that must not be kept.
        """

    def on_state(self, session: Session) -> None:
        """Takes note of a heartbeat: `session.client_state` is what the client says it does.

        Comes between two calls of `on_message`, and waits for nothing.
        """

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Takes note that a stream ended.

        Args:
            session: The session.
            resumable: The client may still come back to `session.state`; if it does not within the
                resume window, this is called once more with False.
        """

    def message_cap(self, spec: space_pb2.EnvMeta, rpc: RpcConfig) -> int:
        """Returns the largest message in bytes that a session with this spec may send."""
        return session_cap(spec, rpc)


async def run_session(
    context: Context, registry: SessionRegistry, handler: SessionHandler[Any, Any]
) -> None:
    """Drives one stream from its hello to its end.

    Args:
        context: The call; its messages are bytes.
        registry: The sessions of the method.
        handler: What the service does with them.
    """
    stream = Stream(context, handler, registry.messages)
    registry.add(stream)
    error: Exception | None = None
    conversation = _Conversation(stream, registry)
    try:
        await conversation.run()
    except asyncio.CancelledError:
        if stream.error is None:  # the peer has gone
            raise
        error = stream.error
    except Exception as raised:
        error = raised
    finally:
        conversation.close()
        await registry.remove(stream, error)
    if error is None:
        return
    if stream.stuck:
        # gRPC sends no status past a write that waits for the peer to read. The session is over all
        # the same, and the peer's own lease ends the call: then this task is cancelled.
        await asyncio.sleep(registry.rpc.lease_s)
    await status.abort(context, error)


class SessionMethod(MethodHandler):
    """The gRPC handler of a method that holds sessions; the server drains them at its end.

    Args:
        registry: The sessions of the method.
        handler: What the service does with them.
    """

    def __init__(self, registry: SessionRegistry, handler: SessionHandler[Any, Any]) -> None:
        async def handle(requests: object, context: Context) -> None:
            await run_session(context, registry, handler)

        super().__init__("stream_stream", handle)
        self.registry = registry


class _Conversation:
    """One stream, from hello to half-close."""

    def __init__(self, stream: Stream, registry: SessionRegistry) -> None:
        self._stream = stream
        self._registry = registry
        self._handler = stream.handler
        self._rpc = registry.rpc
        self._method = registry.method
        self._cap = min(self._handler.max_hello_bytes, self._rpc.max_message_bytes)
        self._limits = Limits(max_bytes=self._rpc.max_message_bytes)
        self._memory: memoryview | None = None

    async def run(self) -> None:
        """Returns when the client has half-closed, or seems to: gRPC reports a cut like that too.

        Raises:
            RLightningError: The stream ends with the status of this error.
        """
        first = await self._read()
        if first is None:
            return
        if first.message.WhichOneof("body") != "hello":
            raise InvalidRequestError("the first message of a stream must be hello")
        epochs = _bodies_with("epoch", self._handler.request_type)
        numbered = _bodies_with("seq", self._handler.request_type)
        session = await self._open(first)
        handler, stream, epoch = self._handler, self._stream, session.epoch
        while (reader := await self._read()) is not None:
            message = reader.message
            stream.heard_more = True
            session.arrival = arrival_of(message, stream.heard_ns)
            body = message.WhichOneof("body")
            if body == "heartbeat":
                _learn_clock(session, message.timing)
                await self._answer_heartbeat(session, message.heartbeat, session.arrival)
                continue
            if body is None or body == "hello":
                raise InvalidRequestError(f"a message with {body or 'no body'} after hello")
            if body in epochs:
                part = getattr(message, body)
                if part.epoch != epoch:
                    raise PreconditionError(
                        f"epoch {part.epoch} is not that of this stream, {epoch}", reason="EPOCH"
                    )
                if body in numbered:
                    session.seq = part.seq
            stream.busy = True
            await handler.on_message(session, reader)
            stream.busy = False
            self._registry.shared_bytes += reader.shared_bytes
            stream.heard_ns = time.monotonic_ns()
        if not stream.left:
            # gRPC ends the read of a call that broke before it cancels this task, with a status.
            await asyncio.sleep(_AFTERMATH_S)

    def close(self) -> None:
        """Gives shared memory back, as soon as nothing reads there any more."""
        self._memory = None

    async def _read(self) -> Reader[Any] | None:
        data: Any = await self._stream.context.read()
        if data is EOF:
            return None
        self._stream.heard_ns = time.monotonic_ns()
        self._stream.messages.received += 1
        if len(data) > self._cap:
            raise ResourceExhaustedError(self._too_large(len(data)), reason="MESSAGE_TOO_LARGE")
        return Reader(
            self._handler.request_type,
            data,
            limits=self._limits,
            memory=self._memory,
            max_total_bytes=self._cap,
        )

    def _too_large(self, size: int) -> str:
        if not self._stream.opened and self._cap == self._handler.max_hello_bytes:
            return f"a hello of {size} bytes passes the cap of {self._cap} bytes"
        of_session = self._cap < self._rpc.max_message_bytes
        return status.too_large(size, self._cap, self._method, session=of_session)

    async def _open(self, reader: Reader[Any]) -> Session:
        stream, rpc = self._stream, self._rpc
        hello = hello_of(reader.message)
        arrival = arrival_of(reader.message, self._stream.heard_ns)
        check_hello(hello)
        spec = read_env_meta(hello.spec, reader) if hello.HasField("spec") else None
        session = self._registry.claim(hello, stream)
        stream.busy = True
        await self._registry.wait_previous(stream)
        session.spec = spec
        session.peer = stream.context.peer()
        same_clock = bool(hello.boot_id) and hello.boot_id == boot_id()
        _meet_clock(session, reader.message.timing.clock_id, same_clock=same_clock)
        trace = trace_of(stream.context.invocation_metadata())
        if trace is not None:
            use_trace(trace)
        add_log_fields(
            method=self._method,
            client_id=session.client_id,
            session_id=session.id,
            epoch=session.epoch,
            env_id=None if spec is None else spec.env_id,
            seq=lambda: session.seq or None,
        )
        response = await self._handler.on_open(session, reader)
        stream.opened = True
        self._cap = min(self._handler.message_cap(hello.spec, rpc), rpc.max_message_bytes)
        welcome = welcome_of(response)
        welcome.session_id = session.id
        welcome.resume_token = session.token
        welcome.epoch = session.epoch
        welcome.resumed = session.resumed
        welcome.max_message_bytes = self._cap
        welcome.heartbeat_ms = int(rpc.heartbeat_s * 1000)
        welcome.lease_ms = int(rpc.lease_s * 1000)
        welcome.resume_window_ms = int(rpc.resume_window_s * 1000)
        welcome.reconnect_initial_ms = rpc.reconnect_initial_ms
        welcome.reconnect_max_ms = rpc.reconnect_max_ms
        welcome.library_version = LIBRARY_VERSION
        welcome.protocol_version = PROTOCOL_VERSION
        welcome.boot_id = boot_id()
        self._memory = self._share_memory(hello)
        welcome.shared_memory = self._memory is not None
        writer = Writer()
        if spec is not None:
            fill_env_meta(welcome.spec, spec, writer)
        stamp(response, arrival)
        # From the welcome on, the client's first request is what this is here for.
        logger.info(
            "%s: client %s %s session %s, epoch %d",
            self._method,
            session.client_id,
            "resumed" if session.resumed else "opened",
            session.id,
            session.epoch,
        )
        # gRPC would send it with the first message, and if that is interrupted once more with the
        # status, which fails: the client would never learn of the end.
        await stream.context.send_initial_metadata(())
        await stream.write(writer.finish(response))
        # Only now, so that nothing can overtake the welcome.
        session.attach(stream)
        stream.busy = False
        stream.heard_ns = time.monotonic_ns()
        return session

    def _share_memory(self, hello: Hello) -> memoryview | None:
        """Returns the memory that a client of this host offers; None if there is none to be had."""
        if not (
            self._handler.shares_memory
            and hello.HasField("shared_memory")
            and _is_of_this_host(self._stream.context.peer())
        ):
            return None
        try:
            return open_shared(hello.shared_memory, max_bytes=self._rpc.shared_memory_bytes)
        except (OSError, ValueError) as error:  # in another container, for one
            logger.debug("%s: no shared memory for %s: %s", self._method, hello.client_id, error)
            return None

    async def _answer_heartbeat(
        self, session: Session, heartbeat: Heartbeat, arrival: Arrival
    ) -> None:
        session.client_state = heartbeat.state
        session.busy_since_ns = heartbeat.busy_since_ns
        if heartbeat.state == CLIENT_STATE_LEAVING:
            self._stream.left = True
            return
        self._handler.on_state(session)
        response = self._handler.response_type()
        response.heartbeat.CopyFrom(heartbeat)
        stamp(response, arrival)
        if not await self._stream.write(response.SerializeToString()):
            raise UnavailableError("the stream broke")


def _meet_clock(session: Session, clock_id: str, *, same_clock: bool) -> None:
    """Names a client's clock; a name that is none is not kept."""
    if len(clock_id) <= _MAX_CLOCK_ID:
        session.offset.set_peer(clock_id, same_clock=same_clock)


def _learn_clock(session: Session, timing: Timing) -> None:
    """Learns of a client's clock from a heartbeat, which echoes a message of this server."""
    offset, received_ns = session.offset, session.arrival.received_ns
    if timing.clock_id != offset.clock_id:  # it has slept
        _meet_clock(session, timing.clock_id, same_clock=offset.same_clock)
    if timing.echo_sent_ns and timing.clock_id == offset.clock_id:
        offset.update(timing.echo_sent_ns, timing.received_ns, timing.sent_ns, received_ns)


def _is_of_this_host(peer: str) -> bool:
    """Tells whether a peer, as gRPC names it, dialled from this host."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or is_loopback(address)


def _bodies_with(name: str, request_type: type[Message]) -> frozenset[str]:
    """Names the bodies of a request that have a field."""
    body = request_type.DESCRIPTOR.oneofs_by_name["body"]
    return frozenset(
        field.name
        for field in body.fields
        if field.message_type is not None and name in field.message_type.fields_by_name
    )
