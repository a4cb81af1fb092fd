"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from rlightning.utils.config import ClientAuthConfig, MainConfig

DASHBOARD_ADDRESS = "127.0.0.1:50050"

Configs = Annotated[
    Optional[list[Path]],  # noqa: UP045 - typer evaluates it, also on 3.10
    typer.Argument(metavar="CONFIG...", help="YAML files, merged from left to right."),
]
MoreConfigs = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option("--config", help="One more YAML file; may be repeated."),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, such as train.lr=1e-3."),
]
Name = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--name", help="Name of the run; its folder is <log_dir>/<name>/<n>."),
]
RestartWindow = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--restart-window",
        metavar="S",
        help="Seconds to wait for a service that died to be started again; 0 ends the run at once.",
    ),
]
ShowDashboard = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--dashboard",
        metavar="[HOST:PORT]",
        help=f"Serve a page that shows how it goes; without a value at {DASHBOARD_ADDRESS}.",
    ),
]
Ca = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--ca", "--ca-file", help="Certificate authority of a TLS listener."),
]
Cert = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--cert", help="Client certificate, for a listener that asks for one."),
]
Key = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--key", help="Its private key."),
]
Token = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--token", help="Bearer token."),
]
TokenFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--token-file", help="File that holds it, which `ps` does not show."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug lines.")]


class DashboardCommand(TyperCommand):
    """A command whose `--dashboard` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fills in the default address where no address follows."""
        return super().parse_args(ctx, with_dashboard_address(args))


def with_dashboard_address(args: Sequence[str]) -> list[str]:
    """Returns arguments in which `--dashboard` has a value: the next word, if it is an address."""
    filled: list[str] = []
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        filled.append(word)
        if word == "--dashboard" and not (":" in following or following.isdecimal()):
            filled.append(DASHBOARD_ADDRESS)
    return filled


def read_config(
    configs: list[Path] | None, more: list[Path] | None, overrides: list[str] | None
) -> MainConfig:
    """Loads the config that the options make.

    Raises:
        ConfigError: No file was named, or one cannot be used.
    """
    from rlightning.utils.config import load_config

    return load_config(_files(configs, more), overrides or [])


def read_run_config(
    configs: list[Path] | None,
    more: list[Path] | None,
    overrides: list[str] | None,
    *,
    name: str | None,
    restart_window_s: float | None,
) -> MainConfig:
    """Loads the config of a run, and lets the folders of its files be imported from.

    Raises:
        ConfigError: No file was named, or one cannot be used.
    """
    from rlightning.cluster.guard import add_import_paths

    settings = list(overrides or [])
    if name is not None:
        settings.append(f"log.name={json.dumps(name)}")
    if restart_window_s is not None:
        settings.append(f"services.restart_window_s={restart_window_s}")
    config = read_config(configs, more, settings)
    folders = dict.fromkeys(str(file.resolve().parent) for file in _files(configs, more))
    known = config.services.python_path
    known.extend(folder for folder in folders if folder not in known)
    add_import_paths(known)
    return config


def client_auth(
    *,
    token: str | None,
    token_file: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> ClientAuthConfig | None:
    """Returns what the options of a client say that it shows and expects; None: they say nothing.

    Raises:
        ConfigError: Only one of `cert` and `key` is given, or both of `token` and `token_file`.
    """
    from rlightning.errors import ConfigError
    from rlightning.utils.config import ClientAuthConfig

    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key belong together")
    if token is not None and token_file is not None:
        raise ConfigError("give --token or --token-file, not both")
    if not any((token, token_file, ca, cert, key)):
        return None
    files = {"token_file": token_file, "ca_file": ca, "cert_file": cert, "key_file": key}
    shown = {name: str(file) for name, file in files.items() if file is not None}
    return ClientAuthConfig(token=token, **shown)


def key_values(items: list[str] | None, option: str) -> dict[str, str]:
    """Reads `KEY=VALUE` as given to an option that may be repeated.

    Raises:
        ConfigError: One has no `=`, or a key comes twice.
    """
    from rlightning.errors import ConfigError

    found: dict[str, str] = {}
    for item in items or []:
        key, equals, value = item.rpartition("=")
        if not equals or not key:
            raise ConfigError(f"{option}: expected KEY=VALUE, got {item!r}")
        if key in found:
            raise ConfigError(f"{option}: {key!r} comes twice")
        found[key] = value
    return found


def _files(configs: list[Path] | None, more: list[Path] | None) -> list[Path]:
    from rlightning.errors import ConfigError

    files = [*(configs or []), *(more or [])]
    if not files:
        raise ConfigError(
            "no config given; name a YAML file, or make one with: rlightning init DIR"
        )
    for file in files:
        if "=" in str(file).lstrip("=") and not file.exists():
            raise ConfigError(f"{file}: no such file; every value needs its own --set {file}")
    return files
