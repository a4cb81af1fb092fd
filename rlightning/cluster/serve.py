"""Runs the services of a config until somebody stops them."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlightning.cluster.dashboard import shown
from rlightning.cluster.display import make_console
from rlightning.cluster.interrupt import interruptible
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.launchers import make_launcher
from rlightning.cluster.prepare import prepare
from rlightning.cluster.process import label_of
from rlightning.cluster.ray_launcher import EFFECTIVE
from rlightning.cluster.runs import Run, this_command
from rlightning.cluster.targets import targets_of
from rlightning.utils.config import MainConfig, keys_without_effect

_REFRESH_S = 1.0


def serve(
    config: MainConfig, *, on_ray: bool = False, quiet: bool = False, dashboard: str | None = None
) -> None:
    """Starts the services and returns after Ctrl-C or SIGTERM, when they have stopped.

    Args:
        config: Config of the services.
        on_ray: Place them on a running Ray cluster, not in processes here.
        quiet: Show nothing.
        dashboard: HOST:PORT of a page that shows the services; None: there is none.

    Raises:
        ClusterError: A service did not start, or is gone for good.
    """
    console = make_console(quiet=quiet)

    def report(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    prepared = prepare(config)
    for key in keys_without_effect(prepared, honoured=EFFECTIVE if on_ray else ()):
        report(f"note: '{key}' has no effect here")
    outcome = "failed"
    run = Run.create(prepared, command=this_command())
    try:
        launcher = make_launcher(prepared, run, on_ray=on_ray, report=report)
        with interruptible(), shown(dashboard, run, report) as page, launcher:
            page.watch(targets_of(launcher.config))
            for line in launcher.summary():
                report(line)
            report(f"config and logs in {run.path}; Ctrl-C stops")
            _follow(launcher, console)
            launcher.check()
    except KeyboardInterrupt:
        outcome = "stopped"
        report("stopped")
    finally:
        run.finish(outcome)


def _follow(launcher: LocalLauncher, console: Console) -> None:
    """Waits until a service is gone for good; shows them all meanwhile."""
    if not console.is_terminal:
        launcher.failed.wait()
        return
    with Live(
        console=console, transient=True, get_renderable=_table(launcher), auto_refresh=False
    ) as live:
        while not launcher.failed.wait(_REFRESH_S):
            live.refresh()


def _table(launcher: LocalLauncher) -> Callable[[], Table]:
    started = time.monotonic()

    def make() -> Table:
        table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
        for column in ("service", "address", "state", "up"):
            table.add_column(column)
        for section in launcher.sections:
            state = "SERVING" if launcher.probe(section) else "NOT_SERVING"
            up = f"{time.monotonic() - started:.0f} s"
            table.add_row(label_of(section), launcher.address(section), state, up)
        return table

    return make
