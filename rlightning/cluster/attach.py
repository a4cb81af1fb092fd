"""Attaches an env to a running cluster and shows how it fares."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from rlightning.cluster.guard import add_import_paths
from rlightning.env.base_env import BaseEnv
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.remote_env import AttachStatus, ControlStatus, RemoteEnvClient
from rlightning.env.utils.backends import backend_class
from rlightning.errors import ConfigError
from rlightning.rpc.protocol import valid_client_id
from rlightning.utils.config import ClientAuthConfig, EnvConfig
from rlightning.utils.config.rpc import check_address

_TERMINAL_S = 1.0  # also where the env is stepped by the clock
_LOG_S = 10.0


def attach(
    env: str,
    server: str,
    *,
    name: str | None = None,
    num_envs: int = 1,
    auth: ClientAuthConfig | None = None,
    **options: Any,
) -> None:
    """Steps an env for a cluster until Ctrl-C, or until the env has finished.

    Args:
        env: A gymnasium id (`module:Id` imports the module before), or `module:Class` of a
            `gymnasium.Env` or a `BaseEnv`.
        server: Address of the env server.
        name: Who this is, unique among the clients of the server.
        num_envs: Rows that are stepped together.
        auth: Token and certificates.
        **options: Of `RemoteEnvClient`: `policy`, `cameras`, `control_hz` and what belongs to it.

    Raises:
        ConfigError: There is no such env, or an argument is not valid.
        EnvError: The env cannot be made, or fails again and again.
        RemoteError: The server refused this client, or is not there.
    """
    try:
        host, _, port = check_address(server).rpartition(":")
    except ValueError as error:
        raise ConfigError(f"--server: {error}") from None
    if not port.isdecimal():
        raise ConfigError(f"--server: expected HOST:PORT, got {server!r}")
    if name is not None and not valid_client_id(name):
        raise ConfigError(f"--name: expected [A-Za-z0-9._-]{{1,64}}, got {name!r}")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    add_import_paths([])
    client = RemoteEnvClient(
        _make(env, num_envs), host.strip("[]"), int(port), name=name, auth=auth, **options
    )
    typer.echo(f"attaching {env} to {server} as {client.name}")
    with client, _shown(client):
        client.run()


def _make(env: str, rows: int) -> BaseEnv:
    kind: type[BaseEnv] = GymnasiumEnv
    config = EnvConfig(name="attached", backend="gymnasium", task=env, num_envs=rows)
    if ":" in env:
        try:
            kind = backend_class(env)
        except ConfigError:
            pass  # no env of this library: gymnasium's, then
        else:
            config = config.model_copy(update={"backend": env})
    return kind(config)


@contextmanager
def _shown(client: RemoteEnvClient) -> Iterator[None]:
    """Shows the status meanwhile: in one line that changes on a terminal, else in plain lines."""
    ended = threading.Event()
    terminal = sys.stdout.isatty()

    def show() -> None:
        paced = terminal or client.is_paced
        period_s, before = (_TERMINAL_S if paced else _LOG_S), 0
        while not ended.wait(period_s):
            status = client.status
            line = _line(status, (status.steps - before) / period_s)
            typer.echo(f"\r{line}\x1b[K" if terminal else line, nl=not terminal)
            before = status.steps

    thread = threading.Thread(target=show, name="rlightning-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal:
            typer.echo()
        typer.echo(_line(client.status))


def _line(status: AttachStatus, rate: float | None = None) -> str:
    speed = "" if rate is None else f" ({rate:,.0f}/s)"
    if status.control is not None:
        return _control_line(status, status.control, speed)
    return (
        f"{status.state:<10}  steps {status.steps:,}{speed}  episodes {status.episodes:,}  "
        f"version {status.policy_version}  reconnects {status.reconnects}  "
        f"env errors {status.env_errors}" + (f"  ({status.trouble})" if status.trouble else "")
    )


def _control_line(status: AttachStatus, control: ControlStatus, speed: str) -> str:
    link = "up" if control.connected else "down"
    parts = [
        f"{status.state:<10}  steps {status.steps:,}{speed}  jitter {control.jitter_ms:.1f} ms",
        f"action age {control.age_p50_ms:.0f}/{control.age_p99_ms:.0f} ms  link {link}",
        f"held {control.held + control.zeroed:,}  spooled {control.spooled:,}",
        f"dropped {control.dropped:,}  reconnects {status.reconnects}",
        f"version {status.policy_version}",
    ]
    if status.env_errors:
        parts.append(f"env errors {status.env_errors}")
    if status.trouble:
        parts.append(f"({status.trouble})")
    return "  ".join(parts)
