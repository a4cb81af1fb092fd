"""The command line: its commands, in the order in which `--help` shows them.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rlightning.cli import attaching, config, looking, running, writing
from rlightning.cli.options import DashboardCommand

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning over gRPC: env, policy and buffer servers, and a learner.",
    epilog="Start with: rlightning init DIR && cd DIR && rlightning train config.yaml",
)
app.command(cls=DashboardCommand)(running.serve)
app.command(cls=DashboardCommand)(running.train)
app.command()(looking.dashboard)
app.command("eval")(running.evaluate)
app.command()(looking.health)
app.command()(looking.top)
app.command()(looking.doctor)
app.command()(attaching.attach)
app.command()(writing.keys)
app.command()(writing.init)
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        from rlightning._version import __version__

        typer.echo(f"rlightning {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options that come before the command."""
