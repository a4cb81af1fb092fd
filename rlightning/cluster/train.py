"""Trains: starts what the config asks for, learns, and tells how it goes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import threading
from collections.abc import Iterator

import numpy as np
import typer

from rlightning.cluster.backend import Backend
from rlightning.cluster.display import Display
from rlightning.cluster.in_process import InProcessBackend
from rlightning.cluster.interrupt import interruptible
from rlightning.cluster.launcher import SECTIONS, LocalLauncher
from rlightning.cluster.monitor import Monitor
from rlightning.cluster.prepare import own_state, prepare
from rlightning.cluster.process import LABELS
from rlightning.cluster.progress import describe_run, number
from rlightning.cluster.remote import RemoteBackend
from rlightning.cluster.runs import Run, this_command
from rlightning.cluster.scalars import Scalars
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig

SOLVED = "solved"
FINISHED = "finished"
MISSED = "target_missed"
_WAIT_S = 0.25


def train(
    config: MainConfig, *, in_process: bool = False, quiet: bool = False, as_json: bool = False
) -> bool:
    """Trains until the target return is reached or the steps are used up.

    Args:
        config: Config of the run.
        in_process: Keep all parts in this process instead of starting services.
        quiet: Show nothing.
        as_json: End with one JSON line on stdout, and show all else on stderr.

    Returns:
        Whether the target was reached; without a target: whether all steps were taken.

    Raises:
        ClusterError: A service did not start, or is gone for good.
        KeyboardInterrupt: The run was stopped from outside; its folder says so.
    """
    _need_learner()
    prepared = prepare(config)
    run = Run.create(prepared, command=this_command())
    outcome, end = "failed", {}
    display = Display(quiet=quiet, to_stderr=as_json, total_steps=config.train.max_env_steps)
    try:
        with interruptible(), display:
            display.message(f"run folder {run.path}")
            with _backend(prepared, run, display, in_process=in_process) as backend:
                folder = run.tensorboard if config.log.backend == "tensorboard" else None
                with Scalars(folder) as scalars:
                    monitor = Monitor(backend, run, display, scalars, prepared.train)
                    with monitor:
                        outcome = _learn(prepared, backend, monitor, scalars, run)
            end = describe_run(monitor.progress, outcome)
            _summarise(display, monitor, outcome)
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        run.finish(outcome, end)
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), **end}))
    return outcome in {SOLVED, FINISHED}


def _need_learner() -> None:
    """Begins to load the learner's libraries, which takes seconds, beside the services' start."""
    for name in ("torch", "tensordict", "torchrl"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"training needs {name}: pip install 'rlightning[learn]'")
    names = ("rlightning.learner.ppo", "torch.utils.tensorboard")
    threading.Thread(
        target=lambda: [importlib.import_module(name) for name in names],
        name="imports",
        daemon=True,
    ).start()


@contextlib.contextmanager
def _backend(
    config: MainConfig, run: Run, display: Display, *, in_process: bool
) -> Iterator[Backend]:
    if in_process:
        with InProcessBackend(config) as local:
            yield local
        return
    own_state(config, run.path)
    with LocalLauncher(config, run, report=display.message) as launcher:
        for section in SECTIONS:
            display.message(f"{LABELS[section]:14} SERVING  {launcher.address(section)}")
        with RemoteBackend(launcher) as remote:
            yield remote


def _learn(
    config: MainConfig, backend: Backend, monitor: Monitor, scalars: Scalars, run: Run
) -> str:
    """Learns from batch after batch and publishes the weights of each; returns the outcome."""
    import torch

    from rlightning.learner.ppo import PPO
    from rlightning.policy import build_policy, policy_weights
    from rlightning.policy.weights import dump_weights

    torch.set_num_threads(config.learner.torch_threads)
    policy = build_policy(config.policy, "train")
    policy.init_train(config.train, backend.env_metas()[0])
    algorithm = PPO(policy, config.learner, config.train, seed=config.train.seed)
    version = backend.policy_version() + 1
    backend.publish(version, dump_weights(policy_weights(policy)))
    updates = 0
    outcome = MISSED if config.train.target_return is not None else FINISHED
    while algorithm.env_steps < config.train.max_env_steps and updates != config.train.max_epochs:
        backend.check()
        monitor.check()
        if monitor.reached.is_set():
            outcome = SOLVED
            break
        columns = backend.next_batch(_WAIT_S)
        if columns is None:
            continue
        staleness = float(version - np.mean(columns["policy_version"]))
        metrics = algorithm.update(columns)
        updates += 1
        version += 1
        backend.publish(version, dump_weights(policy_weights(policy)))
        monitor.updated(staleness=staleness)
        scalars.add(metrics, algorithm.env_steps)
        if config.train.save_interval > 0 and updates % config.train.save_interval == 0:
            policy.save_checkpoint(run.checkpoints / f"{version}.safetensors")
    policy.save_checkpoint(run.checkpoints / "last.safetensors")
    return outcome


def _summarise(display: Display, monitor: Monitor, outcome: str) -> None:
    progress = monitor.progress
    display.latency_table(progress.latencies)
    rate = progress.env_steps / max(progress.elapsed_s, 1e-9)
    display.message(
        f"{outcome}: mean return {number(progress.mean_return)} after {progress.env_steps:,} env "
        f"steps and {progress.elapsed_s:.1f} s ({rate:,.0f} steps/s), {progress.updates} updates"
    )
