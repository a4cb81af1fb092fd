"""What a training run has reached, as numbers and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlightning.cluster.runs import PROGRESS_FILE

# Below this a duration of one step in Python is noise.
_RESOLUTION_S = 1e-7


@dataclass(frozen=True)
class Progress:
    """The state of a run at one moment.

    Attributes:
        elapsed_s: Seconds since the services were up.
        env_steps: Env steps taken, those before a checkpoint included; every row counts.
        steps_before: How many of them a run that was resumed began with.
        steps_per_s: Env steps per second over the last seconds.
        episodes: Finished episodes.
        mean_return: Mean return of the last episodes; None before the first one ended.
        reached_return: The same when it first reached `train.target_return`; None before that.
        reached_steps: `env_steps` then; None before that.
        updates: Rollout batches that were learned from.
        policy_version: Version of the weights in use.
        staleness: Mean age of the last batch's rows in versions; None before the first batch.
        max_staleness: Age of the oldest row learned from so far, in versions; None before one.
        staleness_versions: {count, mean, p50, p90, p99, max} of the ages in versions of the rows
            learned from in the last minute; only {count: 0} without any.
        rows_learned: Rows learned from; fewer than `env_steps`, since the last ones are not.
        rows_skipped: Rows left out, since other weights than the learner's had acted in some of
            their rollout.
        latencies: By stage: {count, mean, p50, p90, p99, max} in seconds.
    """

    elapsed_s: float = 0.0
    env_steps: int = 0
    steps_before: int = 0
    steps_per_s: float = 0.0
    episodes: int = 0
    mean_return: float | None = None
    reached_return: float | None = None
    reached_steps: int | None = None
    updates: int = 0
    policy_version: int = 0
    staleness: float | None = None
    max_staleness: int | None = None
    staleness_versions: Mapping[str, float] = field(default_factory=lambda: {"count": 0})
    rows_learned: int = 0
    rows_skipped: int = 0
    latencies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def mean_steps_per_s(self) -> float:
        """Env steps per second over the whole run."""
        return (self.env_steps - self.steps_before) / max(self.elapsed_s, 1e-9)

    def end_line(self, outcome: str) -> str:
        """Returns the end as one line of text.

        Episodes that end while the run is being ended count: the mean return may be another one
        then than when the target was reached.
        """
        last = f"{number(self.mean_return)} after {self.env_steps:,} env steps"
        reached = number(self.reached_return)
        if self.reached_steps is not None and reached != number(self.mean_return):
            last = f"{reached} after {self.reached_steps:,} env steps; at the end {last}"
        return (
            f"{outcome}: mean return {last} and {self.elapsed_s:.1f} s "
            f"({self.mean_steps_per_s:,.0f} steps/s), {self.updates} updates"
        )

    def line(self) -> str:
        """Returns the state as one line of text."""
        parts = [
            f"{self.elapsed_s:6.1f} s",
            f"steps {self.env_steps:,} ({self.steps_per_s:,.0f}/s)",
            f"episodes {self.episodes:,}",
            f"return {number(self.mean_return)}",
            f"version {self.policy_version}",
            f"staleness {number(self.staleness)}",
        ]
        return "  ".join(parts)


def number(value: float | None) -> str:
    """Returns a figure for people; `-` for what was not measured."""
    return "-" if value is None else f"{value:.1f}"


def percentiles(summary: Mapping[str, float] | None) -> str | None:
    """Returns p50, p90 and p99 of whole numbers for people; None where there are none."""
    if not summary or not summary["count"]:
        return None
    return " / ".join(f"{summary[key]:,.0f}" for key in ("p50", "p90", "p99"))


def find_latencies(stats: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields every latency summary in a service's stats, under its dotted name.

    The level `latency`, which says nothing here, is left out of the names.
    """
    for name, value in stats.items():
        if not isinstance(value, Mapping):
            continue
        if "p50" not in value:
            deeper = prefix if name == "latency" else f"{prefix}{name}."
            yield from find_latencies(value, deeper)
        elif value.get("count"):
            yield f"{prefix}{name}", {key: float(figure) for key, figure in value.items()}


def duration(seconds: float) -> str:
    """Returns a duration with a unit that suits it: three significant digits, or whole seconds."""
    if abs(seconds) < _RESOLUTION_S:
        return f"<{_RESOLUTION_S / 1e-6:g} us"
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * factor:  # what is rounded to 1000 is 1 of the next unit
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def describe_run(progress: Progress, outcome: str) -> dict[str, Any]:
    """Returns a run's end as plain data: for `--json` and the manifest."""
    return {
        "outcome": outcome,
        "elapsed_s": round(progress.elapsed_s, 3),
        "env_steps": progress.env_steps,
        "steps_per_s": round(progress.mean_steps_per_s, 1),
        "episodes": progress.episodes,
        "mean_return": progress.mean_return,
        "reached_return": progress.reached_return,
        "updates": progress.updates,
        "policy_version": progress.policy_version,
        "staleness": progress.staleness,
        "max_staleness": progress.max_staleness,
        "staleness_versions": dict(progress.staleness_versions),
        "rows_learned": progress.rows_learned,
        "rows_skipped": progress.rows_skipped,
        "latencies_s": {name: dict(summary) for name, summary in progress.latencies.items()},
    }


def read_progress(run: Path, *, in_process: bool = False) -> dict[str, Any] | None:
    """Returns what the learner of a run told last, and as `age_s` how many seconds ago.

    Of the latencies, those that services tell of themselves are left out.

    Args:
        run: Folder of the run.
        in_process: There are no services, so that no latency is left out.

    Returns:
        None where it has told nothing yet, or nobody can read it.
    """
    file = run / PROGRESS_FILE
    try:
        text = file.read_text(encoding="utf-8")
        told = json.loads(text)
        age = datetime.now(timezone.utc) - datetime.fromisoformat(told["time"])
        latencies = {
            name: summary
            for name, summary in told["latencies_s"].items()
            if in_process or name.startswith("learner.")
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return {**told, "latencies_s": latencies, "age_s": max(0.0, age.total_seconds())}
