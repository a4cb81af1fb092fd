"""`rlightning config`: what a config means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cli.options import Configs, Debug, MoreConfigs, Overrides, read_config
from rlightning.cluster.guard import one_line_errors

app = typer.Typer(no_args_is_help=True, help="Show, describe and compare configs.")


@app.command()
def show(
    configs: Configs = None,
    config: MoreConfigs = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Print the effective config: files, environment and overrides merged, defaults filled in."""
    with one_line_errors(debug=debug):
        typer.echo(read_config(configs, config, overrides).to_yaml(), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a config file, for editors."""
    from rlightning.utils.config import MainConfig, strict_schema

    typer.echo(json.dumps(strict_schema(MainConfig), indent=2))


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A config.")],
    right: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Argument(help="Another; without it, the defaults are compared with the first."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print every value in which two configs differ; exit 1 if there is one."""
    with one_line_errors(debug=debug):
        from rlightning.utils.config import MainConfig, diff_configs, load_config

        first = load_config(left, environ={})
        if right is None:
            differences = diff_configs(MainConfig(), first)
        else:
            differences = diff_configs(first, load_config(right, environ={}))
    for key, old, new in differences:
        typer.echo(f"{key}: {old} -> {new}")
    raise typer.Exit(1 if differences else 0)
