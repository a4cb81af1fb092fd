"""Lines of logs as they would be written into a pipe."""

import io
import json
import logging
from contextlib import contextmanager

from rlightning.cluster.logs import JsonFormatter


@contextmanager
def written_lines():
    """Yields what returns the lines of `rlightning.rpc` that were written in the block."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("test"))
    root = logging.getLogger("rlightning.rpc")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
