"""Runs the buffer server: `python -m rlightning.services.buffer_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.interrupt import one_line_interrupt


def main() -> None:
    """Runs until a signal, then exits the process."""
    with one_line_interrupt():
        from rlightning.cluster.service_main import service_main

        from .servicer import BufferService

        service_main("buffer_server", BufferService)


if __name__ == "__main__":
    main()
