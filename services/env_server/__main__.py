"""Runs the env server: `python -m rlightning.services.env_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.interrupt import one_line_interrupt


def main() -> None:
    """Runs until a signal, then exits the process."""
    with one_line_interrupt():
        from rlightning.cluster.service_main import service_main

        from .servicer import EnvService

        service_main("env_server", EnvService)


if __name__ == "__main__":
    main()
