"""Shows a run: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlightning.cluster.progress import Progress, duration, number, percentiles

_LINE_EVERY_S = 1.0
# Of what is no terminal: more than any table needs.
_ANY_WIDTH = 10_000
_COLUMNS = ("p50", "p90", "p99", "max")


class Display:
    """Tells people how a run goes; safe to use from several threads.

    On a terminal one panel is kept up to date below the messages; elsewhere there is at most one
    line per second.

    Args:
        quiet: Show nothing.
        to_stderr: Leave stdout to the program that reads it.
        total_steps: Env steps of the whole run, for the bar.
    """

    def __init__(self, *, quiet: bool, to_stderr: bool, total_steps: int) -> None:
        self._console = make_console(stderr=to_stderr, quiet=quiet)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._total_steps = total_steps
        self._next_line = 0.0
        self._last_line = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def message(self, text: str) -> None:
        """Shows one line that stays."""
        with self._lock:
            self._console.print(Text(text), soft_wrap=True)

    def update(self, progress: Progress, *, final: bool = False) -> None:
        """Shows the state of the run; `final` makes sure that this state is shown."""
        with self._lock:
            if self._console.is_terminal:
                self._live.update(self._panel(progress), refresh=final)
                return
            now = time.monotonic()
            line = progress.line()
            if (final or now >= self._next_line) and line != self._last_line:
                self._next_line, self._last_line = now + _LINE_EVERY_S, line
                self._console.print(Text(line), soft_wrap=True)

    def latency_table(self, latencies: Mapping[str, Mapping[str, float]]) -> None:
        """Shows the latencies of a finished run."""
        with self._lock:
            print_table(self._console, latency_table(latencies))

    def _panel(self, progress: Progress) -> RenderableType:
        facts = Table.grid(padding=(0, 3))
        facts.add_row(
            f"env steps {progress.env_steps:,}",
            f"{progress.steps_per_s:,.0f} steps/s",
            f"episodes {progress.episodes:,}",
            Text(f"return {number(progress.mean_return)}", style="bold green"),
        )
        facts.add_row(
            f"policy version {progress.policy_version}",
            f"staleness {number(progress.staleness)} "
            f"(p50 / p90 / p99 {percentiles(progress.staleness_versions) or '-'})",
            f"updates {progress.updates:,}",
            f"{progress.elapsed_s:.0f} s",
        )
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=self._total_steps, completed=progress.env_steps, width=60))
        return Group(bar, facts, latency_table(progress.latencies))


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Returns a console that folds what is too wide for a terminal; a file or a pipe has no width.

    Args:
        stderr: Write there, not on stdout.
        quiet: Write nothing.
    """
    console = Console(stderr=stderr, quiet=quiet, highlight=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    return console


def print_table(console: Console, shown: RenderableType, *, soft_wrap: bool = False) -> None:
    """Prints what has tables in it; without a terminal, no line ends in the blanks that fill it."""
    if console.is_terminal:
        console.print(shown, soft_wrap=soft_wrap)
        return
    with console.capture() as captured:
        console.print(shown, soft_wrap=soft_wrap)
    console.out("\n".join(line.rstrip() for line in captured.get().splitlines()), highlight=False)


def latency_table(latencies: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a table of latency summaries by name; what was not measured is `-`."""
    # One side of padding: all columns fit into the 80 that a pipe has.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("latency", no_wrap=True)
    uncertain = any("uncertainty" in summary for summary in latencies.values())
    for column in (*_COLUMNS, *(("within",) if uncertain else ()), "count"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, summary in latencies.items():
        figures = [duration(summary[key]) if key in summary else "-" for key in _COLUMNS]
        if uncertain:
            within = summary.get("uncertainty")
            figures.append("" if within is None else f"\u00b1{duration(within)}")
        table.add_row(name, *figures, f"{summary.get('count', 0):,.0f}")
    return table
