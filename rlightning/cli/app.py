"""The commands. What they need is imported when they run, so that `--help` answers at once."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cli import config as config_commands
from rlightning.cli.options import (
    DASHBOARD_ADDRESS,
    Ca,
    Cert,
    Configs,
    DashboardCommand,
    Debug,
    Key,
    MoreConfigs,
    Name,
    Overrides,
    Quiet,
    RestartWindow,
    ShowDashboard,
    Token,
    TokenFile,
    client_auth,
    key_values,
    read_config,
    read_run_config,
)
from rlightning.cluster.guard import EXIT_FAILED, one_line_errors
from rlightning.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning over gRPC: env, policy and buffer servers, and a learner.",
    epilog="Start with: rlightning init DIR && cd DIR && rlightning train config.yaml",
)
app.add_typer(config_commands.app, name="config")


class Launcher(str, Enum):
    """Where the parts of a training run."""

    LOCAL = "local"
    IN_PROCESS = "in-process"
    RAY = "ray"


class ServeLauncher(str, Enum):
    """Where services run."""

    LOCAL = "local"
    RAY = "ray"


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


@app.command(cls=DashboardCommand)
def serve(
    configs: Configs = None,
    config: MoreConfigs = None,
    overrides: Overrides = None,
    launcher: Annotated[
        ServeLauncher, typer.Option(help="As local processes, or on a running Ray cluster.")
    ] = ServeLauncher.LOCAL,
    name: Name = None,
    restart_window: RestartWindow = None,
    dashboard: ShowDashboard = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Start the services of a config until Ctrl-C."""
    with one_line_errors(debug=debug):
        from rlightning.cluster.serve import serve as run_services

        effective = read_run_config(
            configs, config, overrides, name=name, restart_window_s=restart_window
        )
        run_services(
            effective, on_ray=launcher is ServeLauncher.RAY, quiet=quiet, dashboard=dashboard
        )


@app.command(cls=DashboardCommand)
def train(
    configs: Configs = None,
    config: MoreConfigs = None,
    overrides: Overrides = None,
    launcher: Annotated[
        Launcher,
        typer.Option(
            help="Services as local processes, on a running Ray cluster, or everything in this one."
        ),
    ] = Launcher.LOCAL,
    name: Name = None,
    restart_window: RestartWindow = None,
    dashboard: ShowDashboard = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="RUN",
            help="Go on from the last checkpoint of a run: its folder, or latest. Without CONFIG, "
            "with the config of that run.",
        ),
    ] = None,
    or_anew: Annotated[
        bool,
        typer.Option(
            "--or-anew",
            help="Start anew where `--resume latest` finds no checkpoint, or `--resume` is empty, "
            "and say which.",
        ),
    ] = False,
    lockstep: Annotated[
        bool,
        typer.Option(
            "--lockstep", help="Let envs and learner take turns: slow, and the same every time."
        ),
    ] = False,
    end_is_ok: Annotated[
        bool,
        typer.Option(
            "--end-is-ok", help="Exit with 0 at the end of the run, also if it missed its target."
        ),
    ] = False,
    stop_is_ok: Annotated[
        bool,
        typer.Option(
            "--stop-is-ok",
            help="Exit with 0 after SIGTERM too, once the checkpoint is written, rather than 130.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON line on stdout, the rest on stderr.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Start the services of a config and train until its target return.

    Exits with 0 when the target was reached (without a target: when all steps were taken), else 1;
    Ctrl-C and SIGTERM: 130. What restarts a failed command needs `--end-is-ok`, or a run that
    missed its target goes on from its end for ever.
    """
    with one_line_errors(debug=debug, stop_is_ok=stop_is_ok):
        from rlightning.cluster.past_runs import LATEST, find_resumable, find_run
        from rlightning.cluster.runs import run_name
        from rlightning.cluster.train import train as run_training

        before, note = None, ""
        if or_anew and not (configs or config):
            raise ConfigError("--or-anew: expected a CONFIG to start with")
        if or_anew and not resume:
            resume, note = None, "starts anew"
        if resume is not None and not (configs or config):
            before = find_run(resume)
            configs = [before / "config.yaml"]
        if lockstep:
            overrides = [*(overrides or []), "train.lockstep=true"]
        effective = read_run_config(
            configs, config, overrides, name=name, restart_window_s=restart_window
        )
        if or_anew and resume == LATEST:
            before = find_resumable(effective)
            if before is None:
                folder = Path(effective.log.log_dir) / run_name(effective)
                note = f"starts anew: no run in {folder} has a checkpoint"
        elif resume is not None and before is None:
            before = find_run(resume, effective)
        reached = run_training(
            effective,
            in_process=launcher is Launcher.IN_PROCESS,
            on_ray=launcher is Launcher.RAY,
            quiet=quiet,
            as_json=as_json,
            resume=before,
            dashboard=dashboard,
            note=note,
        )
    raise typer.Exit(0 if reached or end_is_ok else EXIT_FAILED)


@app.command()
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


class Kept(str, Enum):
    """Which checkpoint of a run."""

    BEST = "best"
    LATEST = "latest"


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or latest.")],
    episodes: Annotated[int, typer.Option(min=1, help="How many to finish.")] = 20,
    checkpoint: Annotated[Kept, typer.Option(help="Which weights act.")] = Kept.BEST,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the envs.")] = 0,
    success_return: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Return that counts as a success, where the env does not say; default: the "
            "target of the run."
        ),
    ] = None,
    video: Annotated[bool, typer.Option("--video", help="Also write an mp4 file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
    debug: Debug = False,
) -> None:
    """Let the policy of a run exploit for some episodes and print what it achieves."""
    with one_line_errors(debug=debug):
        from rlightning.cluster.evaluate import evaluate as run_evaluation
        from rlightning.cluster.evaluate import show_evaluation
        from rlightning.cluster.guard import add_import_paths
        from rlightning.cluster.past_runs import config_of, find_run

        folder = find_run(run)
        add_import_paths(config_of(folder).services.python_path)
        evaluation = run_evaluation(
            folder,
            episodes=episodes,
            link=checkpoint.value,
            seed=seed,
            success_return=success_return,
            video=video,
        )
        show_evaluation(evaluation, as_json=as_json)


@app.command()
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


@app.command()
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
        given = any((token, token_file, ca, cert, key))
        sight = find_sight(
            names or [], auth if given else None, report=lambda line: typer.echo(line, err=True)
        )
        serving = run_top(sight, once=once, as_json=as_json, interval_s=interval)
    raise typer.Exit(0 if serving or not once else EXIT_FAILED)


@app.command()
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
        given = any((token, token_file, ca, cert, key))
        sight = sight_to_examine(effective, auth if given else None)
        diagnosis = examine(effective, sight, as_json=as_json)
        if bundle is not None:
            write_bundle(bundle, effective, diagnosis, sight.run)
            typer.echo(f"wrote {bundle}", err=as_json)
    raise typer.Exit(0 if diagnosis.ok else EXIT_FAILED)


@app.command()
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


@app.command()
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


@app.command()
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
