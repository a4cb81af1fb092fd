"""W3C trace context: whose trace a session belongs to (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

from rlightning.utils.log_fields import add_log_fields

KEY = "traceparent"
"""Metadata key of the trace context of a call."""

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-"
    r"(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The trace that a call is a part of.

    Attributes:
        trace_id: 32 hexadecimal digits.
        parent_id: Of the caller's span, 16 hexadecimal digits.
        sampled: Whether the caller records the trace.
    """

    trace_id: str
    parent_id: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The value of the metadata key, of version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{int(self.sampled):02x}"


def parse_traceparent(value: object) -> TraceContext | None:
    """Returns what a `traceparent` says; None for one that is not valid, as if there were none."""
    found = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if not int(found["trace"], 16) or not int(found["parent"], 16):
        return None
    return TraceContext(found["trace"], found["parent"], bool(int(found["flags"], 16) & _SAMPLED))


def trace_of(metadata: Iterable[tuple[Any, Any]] | None) -> TraceContext | None:
    """Returns the trace context in a call's metadata; None without a valid one, or with several."""
    values = [value for key, value in metadata or () if key == KEY]
    return parse_traceparent(values[0]) if len(values) == 1 else None


_CURRENT: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def current_trace() -> TraceContext | None:
    """Returns the trace that this task works for."""
    return _CURRENT.get()


def use_trace(trace: TraceContext) -> None:
    """Lets this task, and those that it starts, work for a trace.

    Its log lines have the trace's id, and the calls that it makes pass the context on.
    """
    _CURRENT.set(trace)
    add_log_fields(trace_id=trace.trace_id, parent_id=trace.parent_id)
