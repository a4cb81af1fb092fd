"""Finds the services that a command line means: by address, by config, by run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlightning.cluster.past_runs import LATEST, find_run
from rlightning.cluster.snapshot import Target, targets_of
from rlightning.errors import ConfigError
from rlightning.utils.config import ClientAuthConfig, MainConfig, load_config
from rlightning.utils.config.rpc import check_address


@dataclass(frozen=True)
class Sight:
    """What to look at.

    Attributes:
        targets: The services.
        run: Folder of the run whose learner belongs to them; None: none is known.
    """

    targets: Sequence[Target]
    run: Path | None = None


def find_sight(names: Sequence[str], auth: ClientAuthConfig | None = None) -> Sight:
    """Returns what a command line names.

    Args:
        names: Addresses; or the folder of a run, `latest`, or YAML files of a config, whose
            services are those that it names addresses of, or else those of its last run. Nothing:
            the last run in `runs`.
        auth: Token and certificates instead of those of the config; None: those.

    Raises:
        ConfigError: There is no such run, or nothing tells where the services are.
    """
    if names and all(map(_is_address, names)):
        return Sight([Target(address, address, auth=auth) for address in names])
    if not names or list(names) == [LATEST]:
        return _sight_of(find_run(LATEST), auth)
    for name in names:
        if _is_address(name):
            raise ConfigError(f"give addresses, or a config, not both: {name}")
    if Path(names[0]).is_dir():
        if len(names) > 1:
            raise ConfigError(f"give the folder of one run, got {len(names)} names")
        return _sight_of(find_run(names[0]), auth)
    sight = sight_of_config(load_config([Path(name) for name in names]), auth)
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
