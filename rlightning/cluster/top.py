"""Shows a running cluster, live or once: `rlightning top`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import typer
from rich.live import Live

from rlightning.cluster.display import make_console, print_table
from rlightning.cluster.overview import overview
from rlightning.cluster.past_runs import outcome_of
from rlightning.cluster.runs import RUNNING, STARTING
from rlightning.cluster.sight import Sight
from rlightning.cluster.snapshot import Observer, Snapshot

_UNDECIDED = frozenset({None, STARTING, RUNNING})
_ONCE_PATIENCE_S = 5.0
_LIVE_PATIENCE_S = 2.0


def top(sight: Sight, *, once: bool, as_json: bool, interval_s: float) -> bool:
    """Shows a cluster until Ctrl-C, or once.

    On a terminal the view is kept up to date; elsewhere, and with `as_json`, there is one view, or
    one line of JSON, per interval, without a terminal until the run has ended and all of it is
    gone.

    Args:
        sight: What to look at.
        once: Show it once and return; rates are those of one interval.
        as_json: Show `Snapshot.to_dict` as JSON.
        interval_s: Seconds between two looks.

    Returns:
        Whether all services were SERVING when last seen.
    """
    console = make_console()
    shown: Snapshot | None = None

    def show(shown: Snapshot, screen: Live | None) -> bool:
        """Shows one look; returns whether that is the end of it."""
        outcome = None if sight.run is None else outcome_of(sight.run)
        title = "" if sight.run is None else _title(sight.run, outcome)
        view = overview(shown, title=title, width=console.width)
        if as_json:
            typer.echo(json.dumps(shown.to_dict(), allow_nan=False))
        elif screen is not None:
            screen.update(view, refresh=True)
        else:
            print_table(console, view, soft_wrap=not console.is_terminal)
        return not console.is_terminal and _is_over(outcome, shown)

    async def follow() -> None:
        nonlocal shown
        live = console.is_terminal and not (once or as_json)
        screen = Live(console=console, screen=True, auto_refresh=False) if live else None
        # Closed also when whoever reads what is shown has gone: the loop ends with that.
        closing = contextlib.aclosing(_looks(sight, once=once, interval_s=interval_s))
        async with closing as looks:
            with screen or contextlib.nullcontext():
                async for shown in looks:
                    if show(shown, screen):
                        return

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(follow())
    return shown is not None and all(one.state == "SERVING" for one in shown.services)


def _title(run: Path, outcome: str | None) -> str:
    name = f"{run.parent.name}/{run.name}"
    return name if outcome in _UNDECIDED else f"{name} has ended: {outcome}"


def _is_over(outcome: str | None, shown: Snapshot) -> bool:
    """Whether a run has ended, and none of its services serves on."""
    return outcome not in _UNDECIDED and all(one.state == "DOWN" for one in shown.services)


async def _looks(sight: Sight, *, once: bool, interval_s: float) -> AsyncGenerator[Snapshot, None]:
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
