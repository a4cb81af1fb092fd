"""What a log line belongs to, as fields: set where a session or an actor begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

Field = str | int | Callable[[], str | int | None] | None

_NONE: Mapping[str, Field] = MappingProxyType({})
# A context variable: each task, and each that it starts, has its own.
_FIELDS: ContextVar[Mapping[str, Field]] = ContextVar("log_fields", default=_NONE)


def add_log_fields(**fields: Field) -> None:
    """Adds fields to the log lines of this task and of those that it starts from now on.

    Args:
        **fields: By name; what can be called is asked whenever a line is written, and what is then
            None or empty is left out.
    """
    _FIELDS.set({**_FIELDS.get(), **fields})


def log_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields of a line that this task writes now.

    Those that `extra={"fields": {...}}` gave to the line itself come last, and win.
    """
    fields: Mapping[str, Field] = {**_FIELDS.get(), **getattr(record, "fields", _NONE)}
    told = {name: value() if callable(value) else value for name, value in fields.items()}
    return {name: value for name, value in told.items() if value not in (None, "")}
