"""Commands that look at services, wherever they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cli.options import (
    DASHBOARD_ADDRESS,
    Ca,
    Cert,
    Configs,
    Debug,
    Key,
    MoreConfigs,
    Overrides,
    Token,
    TokenFile,
    client_auth,
    read_config,
    read_run_config,
)
from rlightning.cluster.guard import EXIT_FAILED, one_line_errors
from rlightning.errors import ConfigError


def health(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDR", help="HOST:PORT of a service; a name may have replicas."),
    ],
    check: Annotated[
        str,
        typer.Option(
            help="readiness, liveness, a service such as rlightning.v1.PolicyService, or ''."
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 2.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Exit 0 if a service is SERVING, all of its replicas if it has several, else 1."""
    import asyncio

    from rlightning.rpc.health import ServingStatus, check_replicas
    from rlightning.utils.config.rpc import check_address

    with one_line_errors(debug=False):
        try:
            check_address(address)
        except ValueError as error:
            raise ConfigError(f"ADDR: {error}") from None
        auth = client_auth(token=token, token_file=token_file, ca=ca, cert=cert, key=key)
        asked = check_replicas(address, check, timeout_s=timeout, auth=auth)
        answers = asyncio.run(asked)
        for replica, answer in answers.items():
            if len(answers) > 1:
                said = answer.name if isinstance(answer, ServingStatus) else f"error: {answer}"
                typer.echo(f"{replica}  {said}")
            elif isinstance(answer, ServingStatus):
                typer.echo(answer.name)
            else:
                raise answer
    serving = all(answer is ServingStatus.SERVING for answer in answers.values())
    raise typer.Exit(0 if serving else EXIT_FAILED)


def top(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Argument(
            metavar="[ADDR... | CONFIG | RUN]",
            help="Services, a config, or the folder of a run; default: the last run.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show one view; exit 1 unless all are SERVING.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, per interval.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    debug: Debug = False,
) -> None:
    """Show a running cluster: health, sessions, rates, queues, buffers, latency by stage."""
    with one_line_errors(debug=debug):
        from rlightning.cluster.sight import find_sight
        from rlightning.cluster.top import top as run_top

        auth = client_auth(token=token, token_file=token_file, ca=ca, cert=cert, key=key)
        sight = find_sight(names or [], auth, report=lambda line: typer.echo(line, err=True))
        serving = run_top(sight, once=once, as_json=as_json, interval_s=interval)
    raise typer.Exit(0 if serving or not once else EXIT_FAILED)


def doctor(
    configs: Configs = None,
    config: MoreConfigs = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bundle: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates it, also on 3.10
        typer.Option(
            metavar="FILE", help="Also pack configs without secrets, versions, logs: .zip, .tar.gz."
        ),
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    debug: Debug = False,
) -> None:
    """Look for what keeps a cluster from working, say how to fix it, and measure its links.

    Takes about 3 s for each service. Exits with 1 when it finds an error.
    """
    with one_line_errors(debug=debug):
        from rlightning.cluster.bundle import check_bundle_name, write_bundle
        from rlightning.cluster.doctor import doctor as examine
        from rlightning.cluster.doctor import sight_to_examine

        if bundle is not None:
            check_bundle_name(bundle)
        effective = read_run_config(configs, config, overrides, name=None, restart_window_s=None)
        auth = client_auth(token=token, token_file=token_file, ca=ca, cert=cert, key=key)
        sight = sight_to_examine(effective, auth)
        diagnosis = examine(effective, sight, as_json=as_json)
        if bundle is not None:
            write_bundle(bundle, effective, diagnosis, sight.run)
            typer.echo(f"wrote {bundle}", err=as_json)
    raise typer.Exit(0 if diagnosis.ok else EXIT_FAILED)


def dashboard(
    configs: Configs = None,
    config: MoreConfigs = None,
    overrides: Overrides = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve the page.")
    ] = DASHBOARD_ADDRESS,
    debug: Debug = False,
) -> None:
    """Serve a page that shows running services, wherever a config says they are, until Ctrl-C."""
    with one_line_errors(debug=debug):
        from rlightning.cluster.dashboard.watch import watch

        watch(read_config(configs, config, overrides), listen)
