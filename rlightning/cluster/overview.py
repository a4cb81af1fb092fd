"""Renders a snapshot of a cluster for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlightning.cluster.display import latency_table
from rlightning.cluster.progress import duration, number, percentiles
from rlightning.cluster.runs import RUNNING
from rlightning.cluster.snapshot import ServiceView, Snapshot

_STYLES = {"SERVING": "green", "NOT_SERVING": "yellow", "DOWN": "bold red", "UNKNOWN": "red"}
# Of each role: what its work is called, by the counter or gauge that tells it.
_WORK = {
    "env": (("env_steps", "steps/s"), ("episodes", "episodes/s")),
    "policy": (("rows", "rows/s"), ("batches", "batches/s")),
    "buffer": (("inserted", "in/s"), ("sampled", "out/s")),
}
_QUEUES = {"policy": ("queue_rows", "rows"), "buffer": ("inserts_waiting", "inserts")}
# What nobody wants to see grow, by the word for it.
_TROUBLE = {
    "env": {
        "env_errors": "env errors",
        "policy_errors": "policy errors",
        "inserts_resent": "inserts resent",
        "steps_dropped": "steps dropped",
        "one_way_unknown": "uplink and downlink unknown",
    },
    "policy": {"errors": "errors", "expired": "expired", "overloaded": "overloaded"},
    "buffer": {
        "gaps_total": "gaps",
        "refused_total": "refused",
        "writers_rebased_total": "rebased",
    },
}
_STALE_S = 5.0
# A narrower terminal has room for what changes only.
_ROOMY_WIDTH = 100


def overview(snapshot: Snapshot, *, title: str = "", width: int = _ROOMY_WIDTH) -> RenderableType:
    """Returns services, progress, tables, latencies and what is wrong, one below the other.

    What was not measured is `-`.

    Args:
        snapshot: What to show.
        title: What stands before its time.
        width: Columns of the terminal; below 100, versions are left out.
    """
    parts: list[RenderableType] = [Text(f"{title}  {snapshot.time}".strip(), style="bold")]
    if snapshot.services:
        parts += [_services(snapshot, roomy=width >= _ROOMY_WIDTH), Text()]
    parts += [_progress(snapshot), Text()]
    tables = _tables(snapshot)
    if tables.row_count:
        parts += [tables, Text()]
    latencies = snapshot.latencies()
    if latencies:
        parts.append(latency_table(latencies))
    trouble = list(_trouble(snapshot))
    if trouble:
        parts += [Text(), *(Text(line, style="yellow") for line in trouble)]
    return Group(*parts)


def _services(snapshot: Snapshot, *, roomy: bool) -> Table:
    table = _table()
    # Where they do not fit, names and work take several lines: no state or figure is cut.
    table.add_column("service", overflow="fold")
    table.add_column("address", overflow="fold")
    table.add_column("state", no_wrap=True)
    if roomy:
        table.add_column("version", no_wrap=True)
    table.add_column("rtt", justify="right", no_wrap=True)
    table.add_column("sessions", justify="right", no_wrap=True)
    table.add_column("work", overflow="fold")
    table.add_column("queue", justify="right", no_wrap=True)
    for service in snapshot.services:
        table.add_row(
            service.name if service.name != service.address else service.role or "-",
            service.address,
            Text(service.state, style=_STYLES[service.state]),
            *((service.library_version or "-",) if roomy else ()),
            "-" if service.rtt_s is None else duration(service.rtt_s),
            _sessions(service),
            _work(service),
            _queue(service),
        )
    return table


def _sessions(service: ServiceView) -> str:
    counts = service.session_counts()
    if not counts:
        return "-"
    there, held = (sum(one) for one in zip(*counts.values(), strict=True))
    return f"{there}" if there == held else f"{there} of {held}"


def _work(service: ServiceView) -> str:
    told = [
        f"{service.rates[name]:,.0f} {unit}"
        for name, unit in _WORK.get(service.role or "", ())
        if name in service.rates
    ]
    return "  ".join(told) or "-"


def _queue(service: ServiceView) -> str:
    name, unit = _QUEUES.get(service.role or "", ("", ""))
    return f"{service.gauges[name]:,.0f} {unit}" if name in service.gauges else "-"


def _progress(snapshot: Snapshot) -> Table:
    learner: Mapping[str, Any] = snapshot.learner or {}
    episodes = snapshot.episodes
    rate = snapshot.env_steps_per_s
    mean = episodes.mean_return if episodes.recent else learner.get("mean_return")
    version = snapshot.policy_version
    facts = Table.grid(padding=(0, 3))
    facts.add_row(
        f"env steps {max(snapshot.env_steps, learner.get('env_steps', 0)):,}",
        "- steps/s" if rate is None else f"{rate:,.0f} steps/s",
        f"episodes {max(episodes.finished, learner.get('episodes', 0)):,}",
        Text(f"return {number(mean)}", style="bold green"),
        f"policy version {'-' if version is None else version}",
    )
    if snapshot.learner is not None:
        age_s = learner["age_s"]
        outcome = str(learner.get("outcome"))
        stale = outcome == RUNNING and age_s > _STALE_S
        if stale or outcome != RUNNING:
            outcome = f"{outcome}, told {duration(age_s)} ago"
        facts.add_row(
            Text(f"learner {outcome}", style="yellow" if stale else ""),
            f"updates {learner.get('updates', 0):,}",
            f"rows {learner.get('rows_learned', 0):,}",
            f"staleness {number(learner.get('staleness'))}",
            f"p50 / p90 / p99 {percentiles(learner.get('staleness_versions')) or '-'}",
            f"at most {_count(learner.get('max_staleness'))}",
        )
    return facts


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _tables(snapshot: Snapshot) -> Table:
    table = _table("table")
    for column in ("transitions", "capacity", "fill", "writers", "learners", "stored", "sampled"):
        table.add_column(column, justify="right", no_wrap=True)
    buffers = snapshot.by_role("buffer")
    for service in buffers:
        for name, held in service.tables.items():
            table.add_row(
                name if len(buffers) == 1 else f"{service.name}/{name}",
                f"{held.transitions:,}",
                f"{held.capacity:,}",
                f"{held.fill:.0%}",
                f"{held.writers}",
                f"{held.readers}",
                f"{held.inserted_total:,}",
                f"{held.sampled_total:,}",
            )
    return table


def _trouble(snapshot: Snapshot) -> Iterator[str]:
    for service in snapshot.services:
        if service.error is not None:
            yield f"{service.name}: {service.error}"
        figures = {**service.gauges, **service.counters}
        wrong = [
            f"{word} {figures[name]:,.0f}"
            for name, word in _TROUBLE.get(service.role or "", {}).items()
            if figures.get(name)
        ]
        if wrong:
            yield f"{service.name}: {', '.join(wrong)}"
        for env_id, error in service.last_errors.items():
            yield f"{service.name}: {env_id}: {error}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
