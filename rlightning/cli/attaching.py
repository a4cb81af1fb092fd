"""The command that brings an env into a running cluster."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from rlightning.cli.options import (
    Ca,
    Cert,
    Debug,
    Key,
    Token,
    TokenFile,
    client_auth,
    key_values,
)
from rlightning.cluster.guard import one_line_errors


def attach(
    env: Annotated[
        str,
        typer.Argument(
            metavar="ENV", help="A gymnasium id, module:Class of an env, or a backend: maniskill."
        ),
    ],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the env server.")],
    task: Annotated[
        Optional[str],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(help="What the backend shall make: PickCube-v1, libero_spatial/3."),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(
            "--set",
            metavar="env.KEY=VALUE",
            help="How it is made, as in the section env of a config; repeatable.",
        ),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(help="Who this is, unique among the clients; default: host and a number."),
    ] = None,
    num_envs: Annotated[int, typer.Option(min=1, help="Rows that are stepped together.")] = 1,
    control_hz: Annotated[
        Optional[float],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(help="Steps a second, whatever the network does; default: answers set it."),
    ] = None,
    on_late: Annotated[
        str, typer.Option(help="Without an answer in time: hold the last action, zero, or stop.")
    ] = "hold",
    max_action_age_ms: Annotated[
        Optional[float],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(help="Use no action whose observation is older."),
    ] = None,
    spool_steps: Annotated[
        int, typer.Option(help="Steps to keep while the server is away.")
    ] = 10_000,
    spool_mb: Annotated[float, typer.Option(help="Megabytes of them.")] = 256.0,
    camera: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(
            metavar="KEY=CODEC[:QUALITY][@WIDTHxHEIGHT]",
            help="Send pictures as png, jpeg or none, such as wrist=jpeg:80@320x240; repeatable.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Name of the policy that shall act, of those of the policy server.")
    ] = "default",
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    debug: Debug = False,
) -> None:
    """Bring an env of this machine into a running cluster until Ctrl-C."""
    with one_line_errors(debug=debug):
        from rlightning.cluster.attach import attach as run_client

        auth = client_auth(token=token, token_file=token_file, ca=ca, cert=cert, key=key)
        run_client(
            env,
            server,
            name=name,
            task=task,
            num_envs=num_envs,
            settings=overrides or (),
            control_hz=control_hz,
            on_late=on_late,
            max_action_age_ms=max_action_age_ms,
            spool_steps=spool_steps,
            spool_mb=spool_mb,
            cameras=key_values(camera, "--camera"),
            policy=policy,
            auth=auth,
        )
