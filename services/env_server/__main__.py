"""Runs the env server: `python -m rlightning.services.env_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.service_main import service_main

from .servicer import EnvService


def main() -> None:
    """Runs until a signal, then exits the process."""
    service_main("env_server", EnvService)


if __name__ == "__main__":
    main()
