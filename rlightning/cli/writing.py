"""Commands that write files to begin with: a project, keys."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cluster.guard import one_line_errors


def keys(
    hosts: Annotated[
        list[str],
        typer.Option("--host", help="Name or address by which clients dial; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")],
    clients: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option("--client", help="Name of a client that gets a certificate, for mTLS."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
) -> None:
    """Make a development CA, certificates and tokens for services that other machines reach.

    Run again on the same folder, it keeps the CA and the tokens, and renews the certificates.
    """
    with one_line_errors(debug=False):
        from rlightning.cluster.keys import make_keys

        for path in make_keys(out, hosts, clients=clients or (), days=days):
            typer.echo(f"wrote {path}")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; made if absent.")],
) -> None:
    """Write a project to start from: a config, an env, a policy and a test."""
    with one_line_errors(debug=False):
        from rlightning.cluster.init import write_project

        for path in write_project(folder):
            typer.echo(f"wrote {path}")
    tests = "pytest" if find_spec("pytest") else "pip install pytest && pytest"
    typer.echo(f"next: cd {folder} && {tests} && rlightning train config.yaml")
