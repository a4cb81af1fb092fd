"""The sessions of one method: who holds which, for how long, and when they are freed."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from rlightning.errors import (
    AlreadyExistsError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.rpc import status
from rlightning.rpc.stream import Messages, Session, Stream
from rlightning.utils.config.rpc import RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.v1.session_pb2 import Drain, Hello

logger = logging.getLogger(__name__)

# What is over is looked for a moment later, and no more often than so.
_MARGIN_NS = 1_000_000
_SHORTEST_NS = 10_000_000


class SessionRegistry:
    """The sessions of one method.

    A session is attached while a stream owns it, and detached after a cut. A detached one is freed
    at the end of its resume window, or before, once its lease has ended and its slot or its client
    id is wanted.

    Use from the event loop.

    Args:
        rpc: Limits and times.
        method: Full name, `/package.Service/Method`.
        max_sessions: Sessions that may be held; default: `rpc.max_sessions`.

    Attributes:
        shared_bytes: Size of the tensors that came through shared memory so far.
        messages: Counts the messages of all its streams.
    """

    def __init__(self, rpc: RpcConfig, method: str, max_sessions: int | None = None) -> None:
        self.rpc = rpc
        self.method = method
        self.shared_bytes = 0
        self.messages = Messages()
        self._max_sessions = rpc.max_sessions if max_sessions is None else max_sessions
        self._lease_ns = int(rpc.lease_s * 1e9)
        self._resume_ns = int(rpc.resume_window_s * 1e9)
        self._sessions: dict[str, Session] = {}
        self._streams: dict[Stream, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._refusal: Exception | None = None

    @property
    def open_count(self) -> int:
        """Number of sessions that a stream owns."""
        return sum(session.owner is not None for session in self._sessions.values())

    @property
    def sessions(self) -> Iterable[Session]:
        """The sessions, also those that wait for their client to come back."""
        return tuple(self._sessions.values())

    def add(self, stream: Stream) -> None:
        """Begins to watch a stream; one that stays silent for a lease is ended."""
        self._streams[stream] = None
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())

    def claim(self, hello: Hello, stream: Stream) -> Session:
        """Gives a session to a stream, and fences the stream that held it.

        Raises:
            AlreadyExistsError: Another client holds the id, or may still come back to it.
            ResourceExhaustedError: All slots are taken.
            UnavailableError: The server is shutting down.
        """
        if self._refusal is not None:
            raise self._refusal
        session = self._sessions.get(hello.client_id)
        if session is not None and _may_resume(session, hello):
            stream.previous = session.latest_gone
            if session.owner is not None:
                session.owner.end(
                    PreconditionError(
                        f"another stream took over the session of {session.client_id}",
                        reason="FENCED",
                    )
                )
                session.detach(session.owner)
            session.epoch += 1
            session.resumed = True
        else:
            if session is not None:
                self._refuse_while_leased(session)
            self._make_room()
            session = Session(hello.client_id, stream.handler, self.method, self.rpc)
            self._sessions[hello.client_id] = session
        session.owner = stream
        session.latest_gone = stream.gone
        stream.session = session
        return session

    async def wait_previous(self, stream: Stream) -> None:
        """Waits until the service has taken note of the end of the stream before.

        Raises:
            UnavailableError: That took longer than a lease.
        """
        previous, stream.previous = stream.previous, None
        if previous is not None:
            try:
                await wait_within(previous.wait(), self.rpc.lease_s)
            except asyncio.TimeoutError:
                raise UnavailableError("the stream before is still ending; retry") from None

    async def remove(self, stream: Stream, error: Exception | None) -> None:
        """Takes note that a stream ended.

        Args:
            stream: The stream; its task calls this.
            error: Why it ended; None if the client ended it or has gone.
        """
        stream.mark_ending()
        # A task of the registry, since gRPC may cancel the stream's own at any time.
        await asyncio.shield(self._spawn(self._remove(stream, error)))

    async def drain(self, deadline_s: float, reason: str) -> None:
        """Refuses new sessions and tells the clients of all others to finish.

        Returns when all have been told, at the latest after `deadline_s` seconds, or a second if
        that is less.
        """
        self._refusal = UnavailableError(f"{reason}; retry later", reason="DRAIN")
        drain = Drain(deadline_ms=int(deadline_s * 1000), reason=reason)
        told = [
            asyncio.ensure_future(session.send(session.handler.response_type(drain=drain)))
            for session in self._sessions.values()
            if session.connected
        ]
        if told:
            _, late = await asyncio.wait(told, timeout=min(deadline_s, 1.0))
            for task in late:
                task.cancel()
            await asyncio.gather(*told, return_exceptions=True)

    async def close(self, reason: str) -> None:
        """Ends every stream with UNAVAILABLE and frees every session; returns when that is done."""
        error = UnavailableError(reason, reason="DRAIN")
        self._refusal = error
        for stream in tuple(self._streams):
            stream.end(error)
        while self._streams:
            await asyncio.wait([asyncio.ensure_future(s.gone.wait()) for s in self._streams])
        for session in tuple(self._sessions.values()):
            self._free(session)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
            self._sweeper = None
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _refuse_while_leased(self, session: Session) -> None:
        left_ns = self._lease_ns - (time.monotonic_ns() - _heard_ns(session))
        if left_ns > 0 or session.owner is not None:
            raise AlreadyExistsError(
                f"a client {session.client_id} holds a session here; "
                f"retry in {max(1, math.ceil(left_ns / 1e9))} s"
            )
        self._free(session)

    def _make_room(self) -> None:
        if len(self._sessions) < self._max_sessions:
            return
        now = time.monotonic_ns()
        for session in self._sessions.values():  # oldest first
            if session.owner is None and now - session.heard_ns > self._lease_ns:
                self._free(session)
                return
        key = status.config_key(self.method, "max_sessions")
        raise ResourceExhaustedError(
            f"all {self._max_sessions} sessions are taken: retry later, or raise {key} there",
            reason="SESSIONS",
        )

    async def _remove(self, stream: Stream, error: Exception | None) -> None:
        session = stream.session
        try:
            if session is None:
                return
            session.detach(stream)
            fatal = error is not None and not status.is_passing(error)
            # A client that said nothing after its first hello has nothing to come back to, and may
            # not know its token. A refused stream leaves the state of an earlier one as it was.
            unused = not (session.resumed or stream.heard_more)
            over = unused or (stream.opened and (stream.left or fatal))
            fenced = session.owner is not stream
            if not fenced:
                session.owner = None
                session.heard_ns = stream.heard_ns
                session.detached_ns = time.monotonic_ns()
                if over:
                    del self._sessions[session.client_id]
            if stream.opened:
                how = "ended" if over else "was taken over" if fenced else "is away"
                logger.info(
                    "%s: the session of client %s %s%s",
                    *(self.method, session.client_id, how, f": {error}" if error else ""),
                )
                await session.handler.on_close(session, resumable=fenced or not over)
        finally:
            del self._streams[stream]
            stream.gone.set()

    def _free(self, session: Session) -> None:
        """Forgets a session that no stream owns."""
        del self._sessions[session.client_id]
        self._spawn(session.handler.on_close(session, resumable=False))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: on_close raised", self.method, exc_info=error)

    async def _sweep(self) -> None:
        """Ends silent streams and frees sessions whose client did not come back, just in time."""
        rpc = self.rpc
        period_ns = int(min(rpc.heartbeat_s, rpc.lease_s / 4) * 1e9)
        while True:
            slept_from = time.monotonic_ns()
            due_ns = min(self._next_end_ns() + _MARGIN_NS, slept_from + period_ns)
            sleep_ns = int(max(due_ns - slept_from, _SHORTEST_NS))
            await asyncio.sleep(sleep_ns / 1e9)
            now = time.monotonic_ns()
            late_ns = now - slept_from - sleep_ns
            for stream in tuple(self._streams):
                if late_ns > self._lease_ns // 4:
                    # This loop stood still, so what the peers sent has not been read yet, nor that
                    # a write went out.
                    stream.heard_ns += late_ns
                    if stream.write_since_ns:
                        stream.write_since_ns += late_ns
                self._check_stream(stream, now)
            for session in tuple(self._sessions.values()):
                if session.owner is None and now - session.detached_ns > self._resume_ns:
                    self._free(session)

    def _next_end_ns(self) -> float:
        """Returns when the first lease or resume window ends, if nothing is heard until then."""
        streams, sessions = self._streams, self._sessions.values()
        heard = (stream.heard_ns for stream in streams if not stream.busy)
        written = (stream.write_since_ns for stream in streams if stream.write_since_ns)
        detached = (session.detached_ns for session in sessions if session.owner is None)
        return min(
            min((*heard, *written), default=math.inf) + self._lease_ns,
            min(detached, default=math.inf) + self._resume_ns,
        )

    def _check_stream(self, stream: Stream, now: int) -> None:
        lease_s = self.rpc.lease_s
        if stream.write_since_ns and now - stream.write_since_ns > self._lease_ns:
            stream.end(UnavailableError(f"the client has read nothing for {lease_s:g} s"))
        elif not stream.busy and now - stream.heard_ns > self._lease_ns:
            what = "nothing" if stream.session else "no hello"
            stream.end(
                UnavailableError(f"lease ended: {what} heard for {lease_s:g} s", reason="LEASE")
            )


def _may_resume(session: Session, hello: Hello) -> bool:
    return bool(hello.resume_token) and hmac.compare_digest(
        session.token.encode(), hello.resume_token.encode()
    )


def _heard_ns(session: Session) -> int:
    return session.heard_ns if session.owner is None else session.owner.heard_ns
