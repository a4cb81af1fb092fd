"""The command line that the three services share."""

from __future__ import annotations

import os
import signal
import threading
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cluster.guard import add_import_paths, one_line_errors, put_current_folder_last
from rlightning.cluster.logs import configure_logging
from rlightning.errors import ConfigError
from rlightning.rpc.server import run_server
from rlightning.rpc.service import Service
from rlightning.utils.config import ListenConfig, LogConfig, MainConfig, load_config
from rlightning.utils.config.rpc import check_address


def service_main(name: str, make_service: Callable[[MainConfig], Service]) -> None:
    """Runs one service until it is told to stop, then exits the process.

    Args:
        name: `env_server`, `policy_server` or `buffer_server`; its section of the config is
            `services.env` and so on.
        make_service: Builds the service; heavy imports belong into its `start`, so that the port is
            bound and the health service answers within milliseconds.
    """

    def run(
        config: Annotated[
            list[Path],
            typer.Option("--config", help="YAML file; repeat to merge several, later ones win."),
        ],
        listen: Annotated[
            Optional[str],  # noqa: UP045 - typer evaluates it, also on 3.10
            typer.Option(help="HOST:PORT instead of the configured listener; port 0 for any."),
        ] = None,
        announce: Annotated[
            Optional[Path],  # noqa: UP045
            typer.Option(help="Write the bound address to this file, as JSON."),
        ] = None,
        overrides: Annotated[
            Optional[list[str]],  # noqa: UP045
            typer.Option("--set", help="Override one value, such as policy.max_wait_us=200."),
        ] = None,
        insecure: Annotated[
            bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")
        ] = False,
        log_level: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="DEBUG, INFO, WARNING or ERROR; default: log.level."),
        ] = None,
        log_json: Annotated[
            bool,
            typer.Option("--log-json", help="One JSON object a line, whatever log.format says."),
        ] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Tracebacks and debug lines.")] = False,
        exit_with_stdin: Annotated[
            bool, typer.Option("--exit-with-stdin", help="Stop when stdin ends.", hidden=True)
        ] = False,
    ) -> None:
        with one_line_errors(debug=debug):
            main_config = load_config(config, overrides or [])
            section = getattr(main_config.services, name.removesuffix("_server"))
            if listen is not None:
                section.listen = [_listener(section.listen[0], listen)]
            if insecure:
                section.listen = [
                    one.model_copy(update={"plaintext": True}) for one in section.listen
                ]
            level = log_level or ("DEBUG" if debug else main_config.log.level)
            log_format = "json" if log_json else main_config.log.format
            configure_logging(_known_level(level), service=name, log_format=log_format)
            folders = [str(file.resolve().parent) for file in config]
            add_import_paths([*main_config.services.python_path, *folders])
            if exit_with_stdin:
                threading.Thread(target=_stop_when_stdin_ends, daemon=True).start()
            code = run_server(
                lambda: make_service(main_config),
                listen=section.listen,
                rpc=section.rpc,
                reflection=main_config.services.reflection,
                grace_s=main_config.services.grace_s,
                announce=announce,
                name=name,
                metrics=section.metrics,
            )
        raise typer.Exit(code)

    put_current_folder_last()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=f"Runs the {name.replace('_', ' ')}.")(run)
    app(prog_name=f"python -m rlightning.services.{name}")


def _listener(configured: ListenConfig, address: str) -> ListenConfig:
    """Returns a listener as configured, at another address.

    Raises:
        ConfigError: It is no address.
    """
    try:
        return configured.model_copy(update={"address": check_address(address)})
    except ValueError as error:
        raise ConfigError(f"--listen: {error}") from None


def _known_level(level: str) -> str:
    """Returns the name of a level in capitals.

    Raises:
        ConfigError: There is no such level.
    """
    known = typing.get_args(LogConfig.model_fields["level"].annotation)
    if level.upper() not in known:
        raise ConfigError(f"--log-level: expected one of {', '.join(known)}, got {level!r}")
    return level.upper()


def _stop_when_stdin_ends() -> None:
    """Stops this process when its parent is gone: even a killed one closes its end of the pipe."""
    # os.read and not sys.stdin, whose lock a thread blocked in it would hold at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
