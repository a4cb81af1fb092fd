"""What the page shows of a snapshot: plain data, in which every figure has its unit."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from rlightning._version import __version__
from rlightning.cluster.dashboard.history import Point
from rlightning.cluster.process import LABELS, label_of
from rlightning.cluster.progress import percentiles
from rlightning.cluster.runs import RUNNING
from rlightning.cluster.snapshot import ServiceView, Snapshot
from rlightning.latency import STAGES

COLUMNS = (
    "time",
    "steps_per_s",
    "mean_return",
    "round_trip_p50",
    "round_trip_p90",
    "round_trip_p99",
    "buffer_fill",
    "staleness",
    "staleness_p50",
    "staleness_p99",
    "queue_rows",
    "inserts_waiting",
)
"""Names of the figures of a point; times in seconds, `buffer_fill` from 0 to 1."""

# A learner tells of itself twice a second, and is silent while a service is away.
_SILENT_S = 15.0
_RATE_WINDOW_S = 5.0
_ERROR_LENGTH = 200
_SUCCESSES = {"solved", "finished"}
_ROLES = ("env", "policy", "buffer", "learner")
_STAGES = tuple(STAGES)
# The same as the round trip, as its client measures it.
_TWICE = ".act"

Figure = tuple[str, float | str | None, str]
"""Name, value and unit: `s` and `clock` for seconds, `%`, or what stands behind the number."""


class View:
    """Makes the state and the point of each snapshot; knows since when each service is as it is.

    Args:
        run: Name of the run; None: there is none.
    """

    def __init__(self, run: str | None) -> None:
        self._run = run
        self._since: dict[str, tuple[str, float]] = {}
        self._told: deque[tuple[float, int]] = deque()  # elapsed seconds and env steps

    def show(self, snapshot: Snapshot, *, ended: str | None = None) -> tuple[dict[str, Any], Point]:
        """Returns the state of a moment, and its point in the charts.

        Args:
            snapshot: The cluster at that moment.
            ended: Why nobody looks at it any more, for people; None: somebody does.
        """
        now = datetime.fromisoformat(snapshot.time).timestamp()
        services = [self._service(service, now) for service in snapshot.services]
        learner = snapshot.learner or {}
        if shown := _learner(snapshot):
            services.append(shown)
        steps_per_s = self._steps_per_s(snapshot)
        latencies = dict(
            snapshot.latencies() if snapshot.services else learner.get("latencies_s") or {}
        )
        for name in [name for name in latencies if name.endswith(_TWICE)]:
            del latencies[name]
        state = {
            "time": now,
            "run": self._run,
            "version": __version__,
            "notice": _notice(services, learner, ended),
            "facts": _facts(snapshot),
            "services": services,
            "links": _links(snapshot, steps_per_s),
            "latency": [
                {"name": name, **{key: _finite(value) for key, value in summary.items()}}
                for name, summary in sorted(latencies.items(), key=_place)
            ],
        }
        queues = [service.gauges for service in snapshot.services]
        values = (
            steps_per_s,
            _mean_return(snapshot),
            *(_worst(latencies, ".round_trip", key) for key in ("p50", "p90", "p99")),
            _fill(snapshot.services),
            learner.get("staleness"),
            *((learner.get("staleness_versions") or {}).get(key) for key in ("p50", "p99")),
            _total(gauges.get("queue_rows") for gauges in queues),
            _total(gauges.get("inserts_waiting") for gauges in queues),
        )
        return state, (now, *map(_finite, values))

    def _service(self, service: ServiceView, now: float) -> dict[str, Any]:
        state, since = self._since.get(service.name, (None, now))
        if state != service.state:
            self._since[service.name] = service.state, now
            since = now
        role = service.role or _role(service.name)
        return {
            "role": role,
            "label": _label(service.name),
            "address": service.address,
            "state": service.state,
            "state_s": now - since,
            "error": service.error and service.error[:_ERROR_LENGTH],
            "figures": _known(_FIGURES[role](service)) if role in _FIGURES else [],
        }

    def _steps_per_s(self, snapshot: Snapshot) -> float | None:
        """Returns env steps per second; of a run in one process, from what its learner tells."""
        learner = snapshot.learner or {}
        if snapshot.services or not {"env_steps", "elapsed_s"} <= learner.keys():
            return snapshot.env_steps_per_s
        told = self._told
        if not told or learner["elapsed_s"] > told[-1][0]:
            told.append((learner["elapsed_s"], learner["env_steps"]))
        while len(told) > 2 and told[-1][0] - told[1][0] >= _RATE_WINDOW_S:
            told.popleft()
        (then, before), (now, steps) = told[0], told[-1]
        return (steps - before) / (now - then) if now > then else None


def _facts(snapshot: Snapshot) -> list[Figure]:
    learner = snapshot.learner or {}
    return [
        ("elapsed", learner.get("elapsed_s"), "clock"),
        ("env steps", learner.get("env_steps", snapshot.env_steps), ""),
        ("episodes", learner.get("episodes", snapshot.episodes.finished), ""),
        ("mean return", _finite(_mean_return(snapshot)), ""),
        ("policy version", learner.get("policy_version", snapshot.policy_version), ""),
        ("updates", learner.get("updates"), ""),
    ]


def _mean_return(snapshot: Snapshot) -> float | None:
    learner: Mapping[str, float | None] = snapshot.learner or {}
    return learner.get("mean_return", snapshot.episodes.mean_return)


def _links(snapshot: Snapshot, steps_per_s: float | None) -> list[tuple[str, str, Any, str]]:
    """Returns what goes from service to service: (where, which RPC, value, unit)."""
    rates = [service.rates for service in snapshot.services]
    acted = _total(rate.get("rows") for rate in rates) if rates else steps_per_s
    return [
        ("act", "Act", _finite(acted), "rows/s"),
        ("insert", "Insert", _finite(_total(rate.get("inserted") for rate in rates)), "rows/s"),
        ("sample", "Sample", _finite(_total(rate.get("sampled") for rate in rates)), "rows/s"),
        ("publish", "PublishWeights", _version(snapshot), ""),
    ]


def _version(snapshot: Snapshot) -> str | None:
    version = snapshot.policy_version or (snapshot.learner or {}).get("policy_version")
    return f"version {version}" if version else None


def _env(service: ServiceView) -> list[Figure]:
    gauges = service.gauges
    errors = _total(gauges.get(name) for name in ("env_errors", "policy_errors"))
    connected, attached = service.session_counts().get("Attach", (0, 0))
    return [
        ("rows", gauges.get("rows"), ""),
        ("steps", service.rates.get("env_steps"), "/s"),
        ("attached", f"{connected} of {attached}" if attached else None, ""),
        ("errors", errors or None, ""),
        ("actors", "paused" if gauges.get("actor_running") == 0 else None, ""),
    ]


def _policy(service: ServiceView) -> list[Figure]:
    return [
        ("version", service.gauges.get("policy_version"), ""),
        ("requests", service.rates.get("requests"), "/s"),
        ("waiting", service.gauges.get("queue_rows"), "rows"),
        *_sessions(service, "Act"),
        ("errors", service.counters.get("errors") or None, ""),
    ]


def _buffer(service: ServiceView) -> list[Figure]:
    tables = service.tables.values()
    fill = _fill([service])
    return [
        ("stored", _total(table.transitions for table in tables), "rows"),
        ("fill", None if fill is None else 100 * fill, "%"),
        ("waiting", service.gauges.get("inserts_waiting"), "inserts"),
        *_sessions(service, "Insert", "writers"),
        *_sessions(service, "Sample", "learners"),
    ]


_FIGURES: Mapping[str, Callable[[ServiceView], list[Figure]]] = {
    "env": _env,
    "policy": _policy,
    "buffer": _buffer,
}


def _sessions(service: ServiceView, method: str, name: str = "sessions") -> list[Figure]:
    connected, known = service.session_counts().get(method, (0, 0))
    text = f"{connected}" if connected == known else f"{connected} of {known}"
    return [(name, text if known else None, "")]


def _learner(snapshot: Snapshot) -> dict[str, Any] | None:
    """Returns the learner as it tells of itself, or else as the buffer servers see one."""
    shown: dict[str, Any] = {"role": "learner", "label": "learner", "address": None, "error": None}
    told = snapshot.learner
    if told is not None:
        away = any(service.state == "DOWN" for service in snapshot.services)
        silent = told.get("outcome") == RUNNING and told["age_s"] > _SILENT_S and not away
        skipped = told.get("rows_skipped") or None
        figures: list[Figure] = [
            ("updates", told.get("updates"), ""),
            ("learned", told.get("rows_learned"), "rows"),
            ("left out", skipped, "rows"),
            ("staleness", told.get("staleness"), "versions"),
            ("p50 / p90 / p99 of it", percentiles(told.get("staleness_versions")), ""),
        ]
        state = "silent" if silent else told.get("outcome", RUNNING)
        since = told["age_s"] if silent else None
        return {**shown, "state": state, "state_s": since, "figures": _known(figures)}
    counts = [service.session_counts().get("Sample", (0, 0)) for service in snapshot.services]
    connected = max((one for one, _ in counts), default=0)
    if not connected:
        return None
    figures = [("sessions", connected, "")]
    return {**shown, "state": "connected", "state_s": None, "figures": figures}


def _notice(
    services: Iterable[Mapping[str, Any]], learner: Mapping[str, Any], ended: str | None
) -> dict[str, str] | None:
    """Returns what people should know first."""
    outcome = learner.get("outcome", RUNNING)
    if ended is not None:
        return {"kind": "info" if outcome in _SUCCESSES else "bad", "text": ended}
    down = [service for service in services if service["state"] == "DOWN"]
    if down:
        *others, last = (f"the {one['label']} at {one['address']}" for one in down)
        told = f"{', '.join(others)} and {last} do" if others else f"{last} does"
        text = f"{told[0].upper()}{told[1:]} not answer."
        return {"kind": "bad", "text": text}
    if outcome != RUNNING:
        kind = "info" if outcome in _SUCCESSES else "bad"
        return {"kind": kind, "text": f"The run has ended: {outcome.replace('_', ' ')}."}
    if learner and learner["age_s"] > _SILENT_S:
        text = f"The learner has told nothing for {learner['age_s']:.0f} s."
        return {"kind": "bad", "text": text}
    return None


def _fill(services: Iterable[ServiceView]) -> float | None:
    """Returns what part of the tables' capacity is in use, from 0 to 1; None without tables."""
    tables = [table for service in services for table in service.tables.values()]
    capacity = sum(table.capacity for table in tables)
    used = sum(min(table.transitions, table.capacity) for table in tables)
    return used / capacity if capacity else None


def _role(name: str) -> str:
    """Returns what kind of service a name begins with: such as `env` of `env@10.0.0.1.uplink`."""
    return re.split(r"[-@.]", name, maxsplit=1)[0]


def _label(name: str) -> str:
    """Returns what to call a service; of several behind one name, the address tells which."""
    return label_of(name.partition("@")[0]) if _role(name) in LABELS else name


def _place(latency: tuple[str, Any]) -> tuple[int, int]:
    """Returns where a stage stands: by its service, and there in the order of a step."""
    role, stage = _role(latency[0]), latency[0].rpartition(".")[2]
    return (
        _ROLES.index(role) if role in _ROLES else len(_ROLES),
        _STAGES.index(stage) if stage in _STAGES else len(_STAGES),
    )


def _worst(latencies: Mapping[str, Mapping[str, float]], ending: str, key: str) -> float | None:
    """Returns the highest of a figure over all env servers."""
    found = [summary[key] for name, summary in latencies.items() if name.endswith(ending)]
    return max(found, default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _known(figures: Iterable[Figure]) -> list[Figure]:
    """Returns the figures that there are: JSON has none for what is not finite."""
    finite = ((name, _finite(value), unit) for name, value, unit in figures)
    return [(name, value, unit) for name, value, unit in finite if value is not None]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
