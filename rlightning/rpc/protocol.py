"""Where the parts of a session are in the messages of a stream, and what they may hold."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

from rlightning._version import __version__
from rlightning.errors import InvalidRequestError, PreconditionError
from rlightning.latency import ClockOffset, clock_id
from rlightning.v1.session_pb2 import Hello, Timing, Welcome

PROTOCOL_VERSION = 1
"""Version of the wire protocol; a server refuses a client of another."""

LIBRARY_VERSION = __version__

_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Arrival(NamedTuple):
    """When a message came, and what its answer has to echo."""

    sent_ns: int
    """When the sender wrote it, by the sender's monotonic clock."""
    received_ns: int
    """When it was here, by the monotonic clock of this process."""
    timeout_us: int
    """How long the sender waits for an answer, from receipt, in microseconds; 0 for ever."""

    @property
    def deadline_ns(self) -> int | None:
        """When the sender stops waiting, by the monotonic clock of this process; None for never."""
        return self.received_ns + self.timeout_us * 1000 if self.timeout_us else None


def arrival_of(message: Any, received_ns: int | None = None) -> Arrival:
    """Returns the stamps of a message.

    Args:
        message: Has a field `timing`.
        received_ns: When it was here, in monotonic nanoseconds; now if None.
    """
    timing = message.timing
    received_ns = time.monotonic_ns() if received_ns is None else received_ns
    return Arrival(timing.sent_ns, received_ns, timing.timeout_us)


def stamp(message: Any, answers: Arrival | None = None) -> None:
    """Writes the time into a message that is about to be sent.

    Args:
        message: Request or response with a field `timing`.
        answers: The message that this one answers.
    """
    timing: Timing = message.timing
    if answers is not None:
        timing.echo_sent_ns = answers.sent_ns
        timing.received_ns = answers.received_ns
    now = time.monotonic_ns()
    timing.clock_id = clock_id(now)
    timing.sent_ns = now


def measure(offset: ClockOffset, request: Any, response: Any) -> None:
    """Learns of the server's clock from a call that was answered just now.

    Args:
        offset: That clock against this one.
        request: What was sent, stamped.
        response: Its answer; one without stamps, as old servers send it, says nothing.
    """
    timing: Timing = response.timing
    if timing.echo_sent_ns:
        offset.set_peer(timing.clock_id)
        offset.update(
            request.timing.sent_ns, timing.received_ns, timing.sent_ns, time.monotonic_ns()
        )


def hello_of(request: Any) -> Hello:
    """Returns the `Hello` in the first request of a stream, to read or to fill."""
    part = request.hello
    hello: Hello = part if isinstance(part, Hello) else part.session
    return hello


def welcome_of(response: Any) -> Welcome:
    """Returns the `Welcome` in the first response of a stream, to read or to fill."""
    part = response.welcome
    welcome: Welcome = part if isinstance(part, Welcome) else part.session
    return welcome


def valid_client_id(client_id: str) -> bool:
    """Tells whether a name may be a client id."""
    return _CLIENT_ID.fullmatch(client_id) is not None


def check_hello(hello: Hello) -> None:
    """Checks what a client says of itself.

    Raises:
        PreconditionError: It speaks another protocol version.
        InvalidRequestError: Its client id is not one.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PreconditionError(
            f"protocol version {hello.protocol_version} (library "
            f"{hello.library_version or 'unknown'}); this server speaks {PROTOCOL_VERSION} "
            f"(library {LIBRARY_VERSION})",
            reason="PROTOCOL_VERSION",
        )
    if not valid_client_id(hello.client_id):
        raise InvalidRequestError(
            f"client id {hello.client_id[:80]!r} does not match [A-Za-z0-9._-]{{1,64}}"
        )
