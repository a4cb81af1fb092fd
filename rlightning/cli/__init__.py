"""The `rlightning` command."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn

from rlightning.cluster.interrupt import one_line_interrupt

__all__ = ["main"]


def main() -> NoReturn:
    """Runs the command line of this process; exits the process."""
    try:
        with one_line_interrupt():  # to load what a command needs takes a second
            from rlightning.cli.app import app
            from rlightning.utils.config.environment import keep_grpc_to_errors

            keep_grpc_to_errors()
            app(prog_name="rlightning")
        code: object = 0
    except SystemExit as end:
        code = end.code
    # Not by way of the interpreter's own end: gRPC's polling thread lives on into it, and may print
    # a traceback there.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
