"""Log lines on stderr: for people, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

HUMAN_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, service, logger, message, and the exception if any."""

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
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, *, service: str, as_json: bool = False) -> None:
    """Sends the log lines of this process to stderr; replaces what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    human = logging.Formatter(HUMAN_FORMAT, datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(service) if as_json else human)
    logging.basicConfig(level=level, handlers=[handler], force=True)
