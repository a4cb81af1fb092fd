"""Trains: starts what the config asks for, learns, and tells how it goes."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rlightning import learner
from rlightning.cluster.backend import Backend
from rlightning.cluster.dashboard import Dashboard, shown
from rlightning.cluster.display import Display
from rlightning.cluster.follow import follow_rank_0, tell_followers
from rlightning.cluster.guard import require
from rlightning.cluster.in_process import InProcessBackend
from rlightning.cluster.interrupt import interrupt_without_parent, interruptible
from rlightning.cluster.keeper import Keeper
from rlightning.cluster.launchers import make_launcher
from rlightning.cluster.learner_health import LearnerHealth
from rlightning.cluster.monitor import Monitor
from rlightning.cluster.prepare import (
    check_batch_size,
    check_learner,
    check_lockstep,
    check_ranks,
    make_save_dir,
    prepare,
)
from rlightning.cluster.progress import Progress, describe_run
from rlightning.cluster.ray_launcher import EFFECTIVE
from rlightning.cluster.remote import RemoteBackend
from rlightning.cluster.resume import checkpoint_to_resume, load_checkpoint, restore_buffer
from rlightning.cluster.runs import Run, this_command
from rlightning.cluster.scalars import Scalars
from rlightning.cluster.targets import targets_of
from rlightning.errors import ClusterError
from rlightning.learner.loop import LearnerStats
from rlightning.learner.ranks import ALONE, Order, Ranks
from rlightning.learner.replay_loop import ReplayAlgorithm
from rlightning.rpc.metrics import MetricsServer
from rlightning.utils.config import MainConfig, keys_without_effect
from rlightning.utils.config.environment import Launch, launch

SOLVED = "solved"
FINISHED = "finished"
MISSED = "target_missed"

_CHECK_EVERY_S = 0.5


def train(
    config: MainConfig,
    *,
    in_process: bool = False,
    on_ray: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    resume: Path | None = None,
    dashboard: str | None = None,
    note: str = "",
) -> bool:
    """Trains until the target return is reached or the steps are used up.

    Args:
        config: Config of the run.
        in_process: Keep all parts in this process instead of starting services.
        on_ray: Place the services on a running Ray cluster, not in processes here.
        quiet: Show nothing.
        as_json: End with one JSON line on stdout, and show all else on stderr.
        resume: Folder of a run whose latest checkpoint this one goes on from; None: none.
        dashboard: HOST:PORT of a page that shows the run; None: there is none.
        note: What to say first.

    Returns:
        Whether the target was reached; without a target: whether all steps were taken.

    Raises:
        ConfigError: The config does not fit together, or not the run to go on from.
        ClusterError: A service did not start, or is gone for good, or another learner is.
        KeyboardInterrupt: The run was stopped from outside; its folder says so.
    """
    require("training", "learn", "torch", "tensordict", "torchrl")
    prepared = prepare(config)
    check_learner(prepared)
    started = launch()
    check_ranks(prepared, started.world_size if started else 0, in_process=in_process)
    check_batch_size(prepared)
    check_lockstep(prepared)
    ranks = ALONE if started is None or started.world_size == 1 else _join(started)
    if ranks.rank > 0:
        with interruptible():
            follow_rank_0(ranks)
        return True
    checkpoint = None if resume is None else checkpoint_to_resume(resume, prepared)
    make_save_dir(prepared)
    # Loading the learner's libraries takes seconds, beside the start of the services.
    threading.Thread(target=learner.preload, name="imports", daemon=True).start()
    outcome, end = "failed", {}
    display = Display(quiet=quiet, to_stderr=as_json, total_steps=config.train.max_env_steps)
    run = Run.create(prepared, command=this_command())
    try:
        with (
            interruptible(),
            display,
            LearnerHealth(prepared.learner.health) as health,
            shown(dashboard, run, display.message) as page,
        ):
            if note:
                display.message(note)
            if checkpoint is not None:
                run.manifest["resumed"] = str(checkpoint.path)
                display.message(f"resumes {checkpoint.path}, {checkpoint.env_steps:,} env steps")
                if line := restore_buffer(checkpoint, prepared):
                    display.message(line)
            for key in keys_without_effect(prepared, honoured=EFFECTIVE if on_ray else ()):
                display.message(f"note: '{key}' has no effect here")
            with _backend(
                prepared,
                run,
                display,
                page,
                in_process=in_process,
                on_ray=on_ray,
                world_size=ranks.world_size,
            ) as backend:
                outcome, progress = _learn(
                    prepared, backend, run, display, health, checkpoint, ranks
                )
                page.outcome = outcome
                end = describe_run(progress, outcome)
                _summarise(display, progress, outcome, prepared.train.target_return)
                if prepared.train.after_target == "serve":
                    run.finish(outcome, end)
                    _serve_on(backend, display, health)
    except KeyboardInterrupt as stopped:
        if ranks.world_size > 1 and signal.SIGTERM in stopped.args:
            raise ClusterError(
                "another rank of this learner has ended, or torchrun was stopped: it says which"
            ) from stopped
        outcome = "interrupted"
        raise
    finally:
        run.finish(outcome, end)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), **end}))
    return outcome in {SOLVED, FINISHED}


def _join(started: Launch) -> Ranks:
    """Waits for the other learners that torchrun starts."""
    from rlightning.learner.torch_ranks import TorchRanks  # not before now: it loads torch

    interrupt_without_parent()  # or a torchrun that was killed would leave them all behind
    return TorchRanks(started.local_rank)


@contextlib.contextmanager
def _backend(
    config: MainConfig,
    run: Run,
    display: Display,
    page: Dashboard,
    *,
    in_process: bool,
    on_ray: bool,
    world_size: int,
) -> Iterator[Backend]:
    if in_process:
        with InProcessBackend(config) as local:
            run.begin()
            page.watch([])
            display.message(f"run folder {run.path}")
            yield local
        return
    with make_launcher(config, run, on_ray=on_ray, report=display.message) as launcher:
        display.message(f"run folder {run.path}")
        for line in launcher.summary():
            display.message(line)
        page.watch(targets_of(launcher.config))
        with RemoteBackend(launcher, world_size, report=display.message) as remote:
            yield remote


def _learn(
    config: MainConfig,
    backend: Backend,
    run: Run,
    display: Display,
    health: LearnerHealth,
    checkpoint: learner.Checkpoint | None,
    ranks: Ranks,
) -> tuple[str, Progress]:
    """Learns until the target is reached or the steps are used up; returns how it ended."""
    stats = LearnerStats() if checkpoint is None else checkpoint.stats()
    folder = None if config.log.backend == "none" else run.tensorboard
    with Scalars(folder) as scalars:
        monitor = Monitor(
            backend, stats, run=run, display=display, scalars=scalars, train=config.train
        )

        def stop() -> bool:
            health.came_round()
            monitor.check()
            return monitor.reached.is_set()

        with monitor, _shown_metrics(config.learner.metrics, stats):
            metas = backend.env_metas()
            paced = config.buffer.type == "ReplayBuffer" and not config.train.lockstep
            if paced:
                # Until it learns, since each of their steps asks for updates. One that was killed
                # may have left them paused anyway.
                backend.hold(True)
            algorithm = learner.build_learner(config, metas[0], ranks)
            if checkpoint is not None:
                load_checkpoint(checkpoint, algorithm)
            resumed = None if checkpoint is None else checkpoint.buffer_checkpoint
            keeper = Keeper(config, run, backend, monitor, algorithm, resumed)
            hooks: dict[str, Any] = {
                "stop": stop,
                "on_update": monitor.updated,
                "published": keeper.published,
                "save": keeper.save,
                "stats": stats,
                "ranks": ranks,
            }
            tell_followers(ranks, backend.config, algorithm)
            if config.sampled.type == "RolloutBuffer":
                learner.train_loop(algorithm, backend, config.train, **hooks)
            else:
                assert isinstance(algorithm, ReplayAlgorithm)  # `build_learner` has looked
                if paced:
                    backend.hold(False)
                learner.train_from_replay(algorithm, backend, config.train, config.learner, **hooks)
            ranks.order(Order.STOP)
    if monitor.reached.is_set():
        return SOLVED, monitor.progress
    return (FINISHED if config.train.target_return is None else MISSED), monitor.progress


@contextlib.contextmanager
def _shown_metrics(address: str | None, stats: LearnerStats) -> Iterator[None]:
    """Shows the learner's metrics at an address, if there is one."""
    if address is None:
        yield
        return
    server = MetricsServer(address, stats.measure)
    try:
        yield
    finally:
        server.close()


def _serve_on(backend: Backend, display: Display, health: LearnerHealth) -> None:
    """Keeps the services up until somebody stops the run, which has had its end before.

    Raises:
        ClusterError: A service is gone for good.
    """
    display.message("serving on with the last weights; Ctrl-C or SIGTERM stops")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            health.came_round()
            backend.check()
            time.sleep(_CHECK_EVERY_S)


def _summarise(
    display: Display, progress: Progress, outcome: str, target_return: float | None
) -> None:
    display.latency_table(progress.latencies)
    ending = outcome
    if outcome == MISSED:
        ending = f"the target return of {target_return:g} was not reached"
    display.message(progress.end_line(ending))
