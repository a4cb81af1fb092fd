"""Log lines on stderr, one per event: for people, or as JSON objects."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

from rlightning.utils.log_fields import log_fields

LogFormat = Literal["auto", "human", "json"]

# What moves a terminal, or begins a line of its own, in a text that a peer may have chosen.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

HUMAN_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


# What people see of the fields of a line: those by which they find it in what others say.
_SHORT = {"session_id": "session", "env_id": "env", "seq": "seq", "trace_id": "trace"}
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


class HumanFormatter(logging.Formatter):
    """Time, level, logger and message; then session, env, sequence number and trace it belongs to.

    Those that there are, as `[session=... env=... seq=... trace=...]`.
    """

    def __init__(self) -> None:
        super().__init__(HUMAN_FORMAT, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line of a record, without its exception."""
        record.message = _shown(record.message)
        return super().formatMessage(record) + _ids(log_fields(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    It has ts, level, service, logger, message; then the fields that there are, such as method,
    session_id, client_id, epoch, env_id, seq and trace_id; and the exception if any.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of one record."""
        line = {
            "ts": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in log_fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, *, service: str, log_format: LogFormat = "auto") -> None:
    """Sends the log lines of this process to stderr; replaces what was configured before.

    Args:
        level: Least important lines to write.
        service: Name of the service in JSON.
        log_format: `auto` writes for people on a terminal and into a file, such as those of a run,
            and JSON into a pipe, at whose end a program reads: the engine of a container, say.
    """
    handler = logging.StreamHandler(sys.stderr)
    human = log_format == "human" or (log_format == "auto" and _for_people(sys.stderr))
    handler.setFormatter(HumanFormatter() if human else JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def readable(line: str) -> str:
    """Returns a log line as people read it, whichever way it was written."""
    if not line.startswith("{"):
        return line
    try:
        told = json.loads(line)
        written = datetime.fromisoformat(told["ts"])
        text = (
            f"{written:%H:%M:%S}.{written.microsecond // 1000:03d} {told['level']:7} "
            f"{told['logger']}: {_shown(str(told['message']))}{_ids(told)}"
        )
    except (ValueError, LookupError, TypeError):
        return line
    return text


def _ids(fields: Mapping[str, Any]) -> str:
    """Returns the end of a line for people; values that could be read as several are in quotes."""
    values = {name: str(fields[key]) for key, name in _SHORT.items() if key in fields}
    shown = (
        f"{name}={value if _PLAIN.fullmatch(value) else json.dumps(value)}"
        for name, value in values.items()
    )
    return f" [{' '.join(shown)}]" if values else ""


def _shown(message: str) -> str:
    """Returns a message that forges no line of the log and moves no terminal."""
    plain = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    return plain.replace("\n", "\n    ")


def _for_people(stream: TextIO) -> bool:
    try:
        return stream.isatty() or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False
