"""Commands that run something: services, a training, an evaluation."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from rlightning.cli.options import (
    Configs,
    Debug,
    MoreConfigs,
    Name,
    Overrides,
    Quiet,
    RestartWindow,
    ShowDashboard,
    read_run_config,
)
from rlightning.cluster.guard import EXIT_FAILED, one_line_errors
from rlightning.errors import ConfigError


class Launcher(str, Enum):
    """Where the parts of a training run."""

    LOCAL = "local"
    IN_PROCESS = "in-process"
    RAY = "ray"


class ServeLauncher(str, Enum):
    """Where services run."""

    LOCAL = "local"
    RAY = "ray"


class Kept(str, Enum):
    """Which checkpoint of a run."""

    BEST = "best"
    LATEST = "latest"


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
