"""Attaches an env to a running cluster and shows how it fares."""

from __future__ import annotations

import difflib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from rlightning.cluster.guard import add_import_paths
from rlightning.env.base_env import BaseEnv
from rlightning.env.remote_env import AttachStatus, ControlStatus, RemoteEnvClient
from rlightning.env.utils.backends import backend_class, make_base_env
from rlightning.errors import ConfigError
from rlightning.rpc.protocol import valid_client_id
from rlightning.utils.config import ClientAuthConfig, load_config
from rlightning.utils.config.rpc import check_address
from rlightning.utils.config.yaml_io import parse_yaml
from rlightning.utils.registry import ENVS

# Keys of the section `env` that say how an env is made; the others are the server's, or options.
_KEYS = (
    "env_kwargs",
    "evaluate_cfg",
    "info_keys",
    "init_params",
    "max_episode_steps",
    "policy_setup",
    "seed",
    "task",
    "vectorization_mode",
)
# Backends with one thing to host.
_TASKS = {"piper": "piper"}

_TERMINAL_S = 1.0  # also where the env is stepped by the clock
_LOG_S = 10.0


def attach(
    env: str,
    server: str,
    *,
    name: str | None = None,
    task: str | None = None,
    num_envs: int = 1,
    settings: Sequence[str] = (),
    auth: ClientAuthConfig | None = None,
    **options: Any,
) -> None:
    """Steps an env for a cluster until Ctrl-C, or until the env has finished.

    Args:
        env: A gymnasium id (`module:Id` imports the module before), `module:Class` of a
            `gymnasium.Env` or a `BaseEnv`, or a backend of this library, such as `maniskill`.
        server: Address of the env server.
        name: Who this is, unique among the clients of the server.
        task: What the backend shall make; or `env.task` of the settings.
        num_envs: Rows that are stepped together.
        settings: `env.KEY=VALUE` as in the section `env` of a config, the value in YAML.
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
    made = make_attached(env, task=task, num_envs=num_envs, settings=settings)
    client = RemoteEnvClient(made, host.strip("[]"), int(port), name=name, auth=auth, **options)
    what = env if made.config.task == env else f"{env} {made.config.task}"
    typer.echo(f"attaching {what} to {server} as {client.name}")
    with client, _shown(client):
        client.run()


def make_attached(
    env: str, *, task: str | None = None, num_envs: int = 1, settings: Sequence[str] = ()
) -> BaseEnv:
    """Makes the env that a client brings; arguments and errors are those of `attach`."""
    backend = _backend(env)
    set_task, option = _task_of(settings), "--task"
    if task is None:
        task, option = set_task, "--set env.task"
    elif set_task not in (None, task):
        raise ConfigError(f"--set env.task={set_task}: --task says {task!r}")
    if backend == "gymnasium":
        if task is None and env == backend:
            raise ConfigError(_needs_task(env))
        if task is not None and env != backend:
            raise ConfigError(f"{option}: {env!r} says what is made already; it is no backend")
        task = task or env
    elif task is None:
        task = env if ":" in env else _TASKS.get(backend)
        if task is None:
            raise ConfigError(_needs_task(env))
    given = {"name": "attached", "backend": backend, "task": task, "num_envs": num_envs}
    ours = [f"env.{key}={json.dumps(value)}" for key, value in given.items()]
    config = load_config((), [*ours, *settings], environ={}).env[0]
    try:
        return make_base_env(config)
    except ConfigError as error:
        near = difflib.get_close_matches(env, ENVS, n=1) if env != backend else []
        hint = f" (or the backend {near[0]!r}?)" if near else ""
        raise ConfigError(f"{error}{hint}") from error


def _backend(env: str) -> str:
    """Returns the backend that hosts what was named."""
    if env == "env_server":
        raise ConfigError(
            "ENV: 'env_server' is no env that could be attached, but a server of some"
        )
    if ":" in env:
        try:
            backend_class(env)
        except ConfigError:
            return "gymnasium"  # no env of this library: gymnasium's, then
        return env
    return env if env in ENVS else "gymnasium"


def _task_of(settings: Sequence[str]) -> str | None:
    """Checks the keys of settings; returns the task that they name, or None."""
    task: str | None = None
    for setting in settings:
        dotted, _, value = setting.partition("=")
        section, *keys = dotted.strip().split(".")
        if section != "env" or not keys or keys[0] not in _KEYS:
            near = difflib.get_close_matches(dotted.strip(), [f"env.{one}" for one in _KEYS], n=1)
            hint = f"did you mean {near[0]}?" if near else "expected env." + ", env.".join(_KEYS)
            raise ConfigError(f"--set {setting}: of an env that is attached, {hint}")
        if keys == ["task"]:
            task = parse_yaml(value, f"--set {setting}")
            if not isinstance(task, str):
                raise ConfigError(f"--set {setting}: expected a string, got {task!r}")
    return task


def _needs_task(backend: str) -> str:
    return f"--task: expected what the backend {backend!r} shall make; see docs/environments.md"


@contextmanager
def _shown(client: RemoteEnvClient) -> Iterator[None]:
    """Shows the status meanwhile: in one line that changes on a terminal, else in plain lines."""
    ended = threading.Event()
    terminal = sys.stdout.isatty()

    def show() -> None:
        paced = terminal or client.is_paced
        period_s, before, then = (_TERMINAL_S if paced else _LOG_S), 0, time.monotonic()
        while not ended.wait(period_s):
            status, now = client.status, time.monotonic()
            line = _line(status, (status.steps - before) / (now - then))
            typer.echo(f"\r{line}\x1b[K" if terminal else line, nl=not terminal)
            before, then = status.steps, now

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
