"""Runs that were: finds their folders, configs and checkpoints."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlightning.cluster.runs import STARTING, run_name
from rlightning.errors import ConfigError
from rlightning.learner.checkpoints import MANIFEST, Checkpoint
from rlightning.utils.config import MainConfig, load_config

LATEST = "latest"

# What is done of a start before its time begins to count.
_START_MARGIN_S = 10.0


def find_run(name: str, config: MainConfig | None = None) -> Path:
    """Returns the folder of a run.

    Args:
        name: A folder such as `runs/cartpole/3`; or `latest`, which is the last run of the config's
            name, without a config the last of all runs in `runs/`.
        config: Config whose runs are meant.

    Raises:
        ConfigError: There is no such run.
    """
    if name != LATEST:
        folder = Path(name)
    elif config is not None:
        folder = Path(config.log.log_dir) / run_name(config) / LATEST
    else:
        files = list(Path(MainConfig().log.log_dir).glob(f"*/{LATEST}/config.yaml"))
        if not files:
            raise ConfigError("there is no run in 'runs'; name the folder of one")
        folder = max(files, key=lambda file: file.stat().st_mtime).parent
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no folder of a run: there is no config.yaml")
    return folder.resolve()


def find_resumable(config: MainConfig) -> Path | None:
    """Returns the folder of the newest run of a config's name that kept a checkpoint; None: none.

    A run that was killed before its first checkpoint is passed over.
    """
    runs = [
        entry
        for entry in (Path(config.log.log_dir) / run_name(config)).glob("*")
        if entry.name.isdecimal() and (entry / "config.yaml").is_file()
    ]
    for run in sorted(runs, key=lambda run: int(run.name), reverse=True):
        if (_checkpoints_of(run, config_of(run)) / LATEST / MANIFEST).is_file():
            return run.resolve()
    return None


def config_of(run: Path) -> MainConfig:
    """Returns the effective config of a run, for services of its own.

    Raises:
        ConfigError: It cannot be read.
    """
    config = load_config(run / "config.yaml", environ={})
    # Where the services of that run listened is theirs, not part of what it was.
    for service in (config.services.env, config.services.policy, config.services.buffer):
        if service.address is None:
            service.listen = type(service)().listen
    for several in (config.services.env, config.services.policy):
        if several.replicas > 1:
            several.addresses = []
    return config


def outcome_of(run: Path) -> str | None:
    """Returns how a run ended, before that `starting` or `running`; None if nothing tells."""
    outcome = _manifest_of(run).get("outcome")
    return None if outcome is None else str(outcome)


def is_starting(run: Path) -> bool:
    """Tells whether a process of this machine is starting the parts of a run."""
    manifest = _manifest_of(run)
    if outcome_of(run) != STARTING:
        return False
    try:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(manifest["start"])
        os.kill(int(manifest["pid"]), 0)
        # Another process may have got the number of one that was killed.
        most_s = load_config(run / "config.yaml", environ={}).services.start_timeout_s
    except (OSError, LookupError, TypeError, ValueError, ConfigError):
        return False
    return age.total_seconds() < most_s + _START_MARGIN_S


def newest_run(folder: Path) -> Path | None:
    """Returns the last of the runs in a folder, whether it began or not; None without any."""
    runs = [entry for entry in folder.glob("*") if entry.name.isdecimal()]
    return max(runs, key=lambda run: int(run.name), default=None)


def read_checkpoint(run: Path, link: str, config: MainConfig) -> Checkpoint:
    """Reads a checkpoint of a run.

    Args:
        run: Folder of the run.
        link: `latest`, or `best`, for which `latest` stands in where none was kept.
        config: Of the run.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    folder = _checkpoints_of(run, config)
    if link == "best" and not (folder / link).exists():
        link = LATEST
    if not (folder / link / MANIFEST).is_file():
        other = find_resumable(config)
        hint = "" if other is None else f"; the newest run of that name that kept one is {other}"
        raise ConfigError(f"{run} kept no checkpoint{hint}")
    return Checkpoint.read(folder / link)


def _manifest_of(run: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _checkpoints_of(run: Path, config: MainConfig) -> Path:
    save_dir = config.train.save_dir
    return run / "checkpoints" if save_dir is None else Path(save_dir)
