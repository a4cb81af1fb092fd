"""Shows a running cluster, live or once: `rlightning top`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from rlightning.cluster.overview import overview
from rlightning.cluster.past_runs import LATEST, find_run
from rlightning.cluster.snapshot import Observer, Snapshot, Target, targets_of
from rlightning.errors import ConfigError
from rlightning.utils.config import ClientAuthConfig, MainConfig, load_config
from rlightning.utils.config.rpc import check_address

_PLAIN_WIDTH = 120
_ONCE_PATIENCE_S = 5.0
_LIVE_PATIENCE_S = 2.0


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
    config = load_config([Path(name) for name in names])
    targets = targets_of(config, auth)
    run = None
    with contextlib.suppress(ConfigError):
        run = find_run(LATEST, config)
    if _is_whole(targets):
        if run is not None and _addresses(_sight_of(run, auth).targets) != _addresses(targets):
            run = None  # of other services than these
        return Sight(targets, run)
    if run is None:
        raise ConfigError(
            f"{', '.join(names)}: a service listens on a port that the system chooses, and there "
            "is no run of this config here that tells which: give its folder, or addresses"
        )
    return _sight_of(run, auth)


def _sight_of(run: Path, auth: ClientAuthConfig | None) -> Sight:
    config: MainConfig = load_config(run / "config.yaml", environ={})
    return Sight(targets_of(config, auth), run)


def _is_whole(targets: Sequence[Target]) -> bool:
    return {"policy", "buffer", "env"} == {target.name.partition("-")[0] for target in targets}


def _addresses(targets: Sequence[Target]) -> list[str]:
    return [target.address for target in targets]


def _is_address(name: str) -> bool:
    try:
        check_address(name)
    except ValueError:
        return False
    return True


def top(sight: Sight, *, once: bool, as_json: bool, interval_s: float) -> bool:
    """Shows a cluster until Ctrl-C, or once.

    On a terminal the view is kept up to date; elsewhere, and with `as_json`, there is one view, or
    one line of JSON, per interval.

    Args:
        sight: What to look at.
        once: Show it once and return; rates are those of one interval.
        as_json: Show `Snapshot.to_dict` as JSON.
        interval_s: Seconds between two looks.

    Returns:
        Whether all services were SERVING when last seen.
    """
    title = "" if sight.run is None else f"{sight.run.parent.name}/{sight.run.name}"
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    shown: Snapshot | None = None

    async def follow() -> None:
        nonlocal shown
        live = console.is_terminal and not (once or as_json)
        screen = Live(console=console, screen=True, auto_refresh=False) if live else None
        with screen or contextlib.nullcontext():
            async for shown in _looks(sight, once=once, interval_s=interval_s):
                if as_json:
                    typer.echo(json.dumps(shown.to_dict(), allow_nan=False))
                elif screen is not None:
                    screen.update(overview(shown, title=title), refresh=True)
                else:
                    console.print(overview(shown, title=title))

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow())
    return shown is not None and all(one.state == "SERVING" for one in shown.services)


async def _looks(sight: Sight, *, once: bool, interval_s: float) -> AsyncIterator[Snapshot]:
    """Yields what is to be shown: with `once`, the second look, which knows rates."""
    patience_s = _ONCE_PATIENCE_S if once else _LIVE_PATIENCE_S
    async with Observer(sight.targets, run=sight.run, timeout_s=patience_s) as observer:
        if once:
            await observer.gather()
        else:
            yield await observer.gather()
        while True:
            await asyncio.sleep(interval_s)
            yield await observer.gather()
            if once:
                return
