"""Finds the services that a command line means: by address, by config, by run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlightning.cluster.past_runs import LATEST, find_run, is_starting, newest_run
from rlightning.cluster.runs import run_name
from rlightning.cluster.targets import Target, targets_of
from rlightning.errors import ConfigError
from rlightning.utils.config import ClientAuthConfig, MainConfig, load_config
from rlightning.utils.config.rpc import check_address

_POLL_S = 0.2


@dataclass(frozen=True)
class Sight:
    """What to look at.

    Attributes:
        targets: The services.
        run: Folder of the run whose learner belongs to them; None: none is known.
    """

    targets: Sequence[Target]
    run: Path | None = None


def find_sight(
    names: Sequence[str],
    auth: ClientAuthConfig | None = None,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> Sight:
    """Returns what a command line names; waits for a run that is being started on this machine.

    Args:
        names: Addresses; or the folder of a run, `latest`, or YAML files of a config, whose
            services are those that it names addresses of, or else those of its last run. Nothing:
            the last run in `runs`.
        auth: Token and certificates instead of those of the config; None: those.
        report: Takes one line for people, where a run is waited for.

    Raises:
        ConfigError: There is no such run, or nothing tells where the services are.
    """
    if names and all(map(_is_address, names)):
        return Sight([Target(address, address, auth=auth) for address in names])
    if not names or list(names) == [LATEST]:
        _await_start(map(newest_run, Path(MainConfig().log.log_dir).glob("*")), report)
        return _sight_of(find_run(LATEST), auth)
    for name in names:
        if _is_address(name):
            raise ConfigError(f"give addresses, or a config, not both: {name}")
    if Path(names[0]).is_dir():
        if len(names) > 1:
            raise ConfigError(f"give the folder of one run, got {len(names)} names")
        _await_start([Path(names[0])], report)
        return _sight_of(find_run(names[0]), auth)
    for name in names:
        if not Path(name).exists():
            raise ConfigError(f"{name}: expected HOST:PORT, the folder of a run or a config file")
    config = load_config([Path(name) for name in names])
    _await_start([newest_run(Path(config.log.log_dir) / run_name(config))], report)
    sight = sight_of_config(config, auth)
    if not _is_whole(sight.targets) and sight.run is None:
        raise ConfigError(
            f"{', '.join(names)}: a service listens on a port that the system chooses, and there "
            "is no run of this config here that tells which: give its folder, or addresses"
        )
    return sight


def sight_of_config(config: MainConfig, auth: ClientAuthConfig | None = None) -> Sight:
    """Returns the services of a config: at the addresses that it names, or else of its last run.

    Without such a run, there are only those with addresses.
    """
    targets = targets_of(config, auth)
    run = None
    with contextlib.suppress(ConfigError):
        run = find_run(LATEST, config)
    if run is None:
        return Sight(targets)
    last = _sight_of(run, auth)
    if not _is_whole(targets):
        return last
    return Sight(targets, run if _addresses(last.targets) == _addresses(targets) else None)


def _await_start(runs: Iterable[Path | None], report: Callable[[str], None]) -> None:
    """Returns when none of some runs is starting any more."""
    for run in runs:
        if run is not None and is_starting(run):
            report(f"waits for the start of {run} ...")
            while is_starting(run):
                time.sleep(_POLL_S)


def _sight_of(run: Path, auth: ClientAuthConfig | None) -> Sight:
    config: MainConfig = load_config(run / "config.yaml", environ={})
    return Sight(targets_of(config, auth), run)


def _is_whole(targets: Sequence[Target]) -> bool:
    return {"policy", "buffer", "env"} == {target.section for target in targets}


def _addresses(targets: Sequence[Target]) -> list[str]:
    return [target.address for target in targets]


def _is_address(name: str) -> bool:
    try:
        check_address(name)
    except ValueError:
        return False
    return True
