"""Runs the buffer server: `python -m rlightning.services.buffer_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.service_main import service_main

from .servicer import BufferService


def main() -> None:
    """Runs until a signal, then exits the process."""
    service_main("buffer_server", BufferService)


if __name__ == "__main__":
    main()
