"""Running a service: inside an event loop (`serve`), or as a process (`run_server`)."""

from __future__ import annotations

from rlightning.rpc.run import EXIT_NOW, EXIT_STUCK, run_server
from rlightning.rpc.running import RunningServer, serve

__all__ = ["EXIT_NOW", "EXIT_STUCK", "RunningServer", "run_server", "serve"]
