"""Shows a cluster that others have started, until somebody stops it."""

from __future__ import annotations

import threading
from pathlib import Path

import typer

from rlightning.cluster.dashboard.dashboard import Dashboard
from rlightning.cluster.interrupt import interruptible
from rlightning.cluster.past_runs import LATEST
from rlightning.cluster.runs import run_name
from rlightning.cluster.targets import targets_of
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig


def watch(config: MainConfig, address: str) -> None:
    """Serves the page of the services of a config, and of its latest run if that is here.

    Returns after Ctrl-C or SIGTERM. Services may start, stop and come back meanwhile.

    Args:
        config: Says where the services are dialled, and where runs are kept.
        address: HOST:PORT of the page.

    Raises:
        ConfigError: It names no port of any service, or nobody can listen there.
    """
    targets = targets_of(config)
    if not targets:
        raise ConfigError(
            "no service to look at: the config names no port in services.*.address or "
            "services.*.listen; for services that `train` or `serve` starts, give those --dashboard"
        )
    name = run_name(config)
    latest = Path(config.log.log_dir) / name / LATEST
    try:
        with interruptible(), Dashboard(address, run=latest, name=name, report=typer.echo) as page:
            page.watch(targets)
            threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopped")
