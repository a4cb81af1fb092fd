"""What a client is busy with: its heartbeats tell it, so that a long step is seen as one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rlightning.v1.session_pb2 import (
    CLIENT_STATE_RESETTING,
    CLIENT_STATE_RUNNING,
    ClientState,
)

if TYPE_CHECKING:
    from rlightning.rpc.stream import Session


class Activity:
    """What somebody does who is told of in heartbeats; any thread may write it.

    Attributes:
        state: A `ClientState`.
        busy_since_ns: Monotonic time since when they have been busy with one thing; 0 if not.
    """

    def __init__(self) -> None:
        self.state: int = CLIENT_STATE_RUNNING
        self.busy_since_ns = 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Says, for the length of a block, that something runs which may take long."""
        self.busy_since_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.busy_since_ns = 0

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Says so, for the length of a block, which may lie within a step."""
        before = self.state, self.busy_since_ns
        self.state, self.busy_since_ns = CLIENT_STATE_RESETTING, time.monotonic_ns()
        try:
            yield
        finally:
            self.state, self.busy_since_ns = before

    @contextmanager
    def told_by_sessions(self) -> Iterator[None]:
        """Lets the heartbeats of the sessions that are opened in this block tell of this."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


# A context variable, since clients of several methods open sessions for one and the same group.
_CURRENT: ContextVar[Activity | None] = ContextVar("activity", default=None)


def current_activity() -> Activity:
    """Returns whose doings a session that is opened now tells; else one that is never busy."""
    return _CURRENT.get() or Activity()


def describe_sessions(sessions: Iterable[Session]) -> dict[str, Any]:
    """Returns what each client said it does in its last heartbeat, by client id.

    Returns:
        For each `state` (running, resetting; empty before the first heartbeat), `busy_s`, for how
        many seconds it has been busy with one thing (0.0: it is not), and `connected`.
    """
    now = time.monotonic_ns()
    described = {}
    for session in sessions:
        busy_s = 0.0
        if session.busy_since_ns:
            # By the client's clock until its last message, by ours since then.
            arrival = session.arrival
            busy_ns = arrival.sent_ns - session.busy_since_ns + now - arrival.received_ns
            busy_s = max(0, busy_ns) / 1e9
        described[session.client_id] = {
            "state": _name(session.client_state),
            "busy_s": busy_s,
            "connected": session.connected,
        }
    return described


def _name(state: int) -> str:
    if state not in ClientState.values() or not state:  # a later version may know more
        return ""
    return ClientState.Name(ClientState.ValueType(state)).removeprefix("CLIENT_STATE_").lower()
