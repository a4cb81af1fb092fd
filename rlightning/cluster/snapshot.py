"""What a cluster looks like at one moment, as its services and its learner tell."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from rlightning.buffer.remote_buffer import SERVICE as BUFFER
from rlightning.buffer.remote_buffer import BufferClient, BufferStatus
from rlightning.cluster.progress import find_latencies, read_progress
from rlightning.cluster.targets import Target, replicas_of
from rlightning.env.episodes import EpisodeRecord
from rlightning.env.remote_client import SERVICE as ENV
from rlightning.env.remote_client import EnvClient, EnvStatus
from rlightning.errors import (
    DeadlineExceededError,
    RemoteError,
    UnavailableError,
)
from rlightning.policy import PolicyClient, PolicyDescription
from rlightning.policy.transfer import SERVICE as POLICY
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.health import OVERALL, ServingStatus, list_statuses

Role = Literal["env", "policy", "buffer"]
State = Literal["SERVING", "NOT_SERVING", "DOWN", "UNKNOWN"]

ROLES: Mapping[str, Role] = {ENV: "env", POLICY: "policy", BUFFER: "buffer"}
"""What a service is, by its full name."""

RECENT_EPISODES = 100
"""How many finished episodes the mean return is that of, at most."""

_RATE_WINDOW_S = 5.0
_FIND_EVERY_S = 2.0

# Of the stats of each service: what only grows, and what goes up and down. What an env server
# counts of its groups goes with them.
_COUNTERS: Mapping[Role, Sequence[str]] = {
    "env": (),
    "policy": ("requests", "rows", "batches", "errors", "expired", "overloaded"),
    "buffer": (
        *("messages_total", "duplicates_total", "gaps_total", "refused_total"),
        *("writers_rebased_total", "batches_total"),
    ),
}
_GAUGES: Mapping[Role, Sequence[str]] = {
    "env": (
        *("groups", "groups_attached", "env_errors", "policy_errors"),
        *("inserts_resent", "one_way_unknown", "segments", "steps_dropped"),
    ),
    "policy": ("queue_rows", "groups"),
    "buffer": ("inserts_waiting",),
}
_SESSIONS: Mapping[Role, Mapping[str, str]] = {
    "env": {"sessions": "Attach"},
    "policy": {"sessions": "Act"},
    "buffer": {"sessions": "Insert", "learners": "Sample"},
}


@dataclass(frozen=True)
class TableView:
    """One table of a buffer server.

    Attributes:
        size: Stored units: transitions or episodes, by its configuration.
        transitions: Stored transitions.
        capacity: Transitions from which on inserts wait, or replace others. A RolloutBuffer holds
            more for a while: the rest of the message that reached it, which is stored as a whole,
            and what envs that have left gave to rollouts that are not released.
        fill: `transitions / capacity`, at most 1.
        writers: Writers with an open session.
        readers: Learners that sample it.
        inserted_total: Transitions stored since the start of the server.
        sampled_total: Transitions handed to learners since then.
        details: What else it tells, of scalars by name: such as `rollouts_ready`, `blocked_total`.
    """

    size: int
    transitions: int
    capacity: int
    fill: float
    writers: int
    readers: int
    inserted_total: int
    sampled_total: int
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServiceView:
    """One service at one moment; what is not known is None or empty.

    Attributes:
        name: Name of its target.
        address: Where it was dialled.
        role: `env`, `policy` or `buffer`.
        state: Its health; `DOWN` when it cannot be reached or does not answer in time, `UNKNOWN`
            when it answers with an error.
        error: Why something of it is not known, for people.
        library_version: Version of its library.
        rtt_s: How long it took to be asked for its health, in seconds.
        clock: Its monotonic clock against that of this process: `ClockOffset.summary`.
        counters: What it counts since its start, by name.
        rates: The same per second over the last seconds, at most 5; empty at the first look.
        gauges: What goes up and down, by name.
        sessions: By method and client id what its last heartbeat said: {state, busy_s, connected}.
        tables: Of a buffer server, by name.
        latency: By stage: {count, mean, p50, p90, p99, max} and, between two clocks, uncertainty;
            in seconds, of the last minute.
        clocks: Of an env server: the clocks of the servers it dials against its own, by role.
        last_errors: Of an env server: by env, the last error.
    """

    name: str
    address: str
    role: Role | None = None
    state: State = "UNKNOWN"
    error: str | None = None
    library_version: str | None = None
    rtt_s: float | None = None
    clock: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    sessions: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    tables: Mapping[str, TableView] = field(default_factory=dict)
    latency: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    clocks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last_errors: Mapping[str, str] = field(default_factory=dict)

    def session_counts(self) -> dict[str, tuple[int, int]]:
        """Returns by method how many sessions have their client there, and how many there are."""
        return {
            method: (sum(bool(one.get("connected")) for one in clients.values()), len(clients))
            for method, clients in self.sessions.items()
        }


@dataclass(frozen=True)
class EpisodeView:
    """Finished episodes, over all env servers; those cut from outside count, and no more.

    Attributes:
        finished: How many since the start of the servers.
        recent: How many of the last `RECENT_EPISODES` the means are those of.
        mean_return: Their mean return; None without any.
        mean_length: Their mean length in steps; None without any.
    """

    finished: int = 0
    recent: int = 0
    mean_return: float | None = None
    mean_length: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment.

    Attributes:
        time: When, by this machine's wall clock, as ISO 8601.
        services: The services, in the order of the targets.
        env_steps: Env steps of all env servers since their start; every row counts.
        env_steps_per_s: The same per second over the last seconds; None at the first look.
        policy_version: The highest version in use; None while no policy server tells.
        episodes: Finished episodes.
        learner: What the learner of a run told last, the keys of `rlightning train --json` with
            `age_s`, how many seconds ago that was; its `latencies_s` are the learner's own. None
            where no run is looked at, or it tells nothing.
        new_episodes: Those that ended since the look before; not part of `to_dict`.
    """

    time: str
    services: Sequence[ServiceView]
    env_steps: int = 0
    env_steps_per_s: float | None = None
    policy_version: int | None = None
    episodes: EpisodeView = field(default_factory=EpisodeView)
    learner: Mapping[str, Any] | None = None
    new_episodes: Sequence[EpisodeRecord] = field(default=(), repr=False)

    def by_role(self, role: Role) -> list[ServiceView]:
        """Returns the services of one kind."""
        return [service for service in self.services if service.role == role]

    def latencies(self) -> dict[str, Mapping[str, float]]:
        """Returns the latencies of all by dotted name, such as `env.uplink` and `learner.update`.

        Stages of the policy server that an env server has from its answers are left out.
        """
        found: dict[str, Mapping[str, float]] = {}
        known = {stage for service in self.by_role("env") for stage in service.latency}
        for service in self.services:
            prefix = service.role if self._is_alone(service) else service.name
            for stage, summary in service.latency.items():
                if service.role != "policy" or stage not in known:
                    found[f"{prefix}.{stage}"] = summary
        return found | dict((self.learner or {}).get("latencies_s") or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; numbers that are not finite are None."""
        told = asdict(self)
        del told["new_episodes"]
        finite: dict[str, Any] = _finite(told)
        return finite

    def _is_alone(self, service: ServiceView) -> bool:
        return service.role is not None and len(self.by_role(service.role)) == 1


class Observer:
    """Looks at the services of a cluster as often as asked; they may come and go meanwhile.

    Use as an async context manager; belongs to one event loop.

    Args:
        targets: The services; one whose name stands for several servers is each of them, also of
            those that come later.
        run: Folder of the run whose learner is looked at; None: no learner.
        timeout_s: How long to wait for each service, in seconds.
    """

    def __init__(
        self, targets: Sequence[Target], *, run: Path | None = None, timeout_s: float = 1.0
    ) -> None:
        self._targets = tuple(targets)
        self._run = run
        self._timeout_s = timeout_s
        self._contacts: dict[tuple[str, str], _Contact] = {}
        self._found = -_FIND_EVERY_S
        self._episodes: deque[EpisodeRecord] = deque(maxlen=RECENT_EPISODES)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.gather(*(contact.close() for contact in self._contacts.values()))

    async def gather(self) -> Snapshot:
        """Asks all services at once and returns what they told.

        Takes at most about twice `timeout_s` seconds; what a service does not tell is in its
        `state` and `error`, and no exception. Each finished episode is in one snapshot's
        `new_episodes`; the first one has the last `RECENT_EPISODES` of each env server. Await one
        at a time.
        """
        await self._find()
        contacts = list(self._contacts.values())
        views = await asyncio.gather(*(contact.look() for contact in contacts))
        new = [record for contact in contacts for record in contact.episodes]
        new.sort(key=lambda record: record.ts_end_ns)
        self._episodes.extend(record for record in new if record.reason != "cut")
        envs = [view for view in views if view.role == "env"]
        rates = [view.rates["env_steps"] for view in envs if "env_steps" in view.rates]
        versions = [
            int(view.gauges["policy_version"]) for view in views if "policy_version" in view.gauges
        ]
        return Snapshot(
            time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            services=views,
            env_steps=sum(view.counters.get("env_steps", 0) for view in envs),
            env_steps_per_s=sum(rates) if rates else None,
            policy_version=max(versions, default=None),
            episodes=EpisodeView(
                finished=sum(view.counters.get("episodes", 0) for view in envs),
                recent=len(self._episodes),
                mean_return=_mean([one.episode_return for one in self._episodes]),
                mean_length=_mean([one.length for one in self._episodes]),
            ),
            learner=self._learner(),
            new_episodes=new,
        )

    async def _find(self) -> None:
        """Looks for servers that have come or gone, now and then."""
        now = time.monotonic()
        if now - self._found < _FIND_EVERY_S:
            return
        found = await asyncio.gather(
            *(replicas_of(target, timeout_s=self._timeout_s) for target in self._targets)
        )
        self._found = now
        before, self._contacts = self._contacts, {}
        for replica in (replica for replicas in found for replica in replicas):
            key = replica.name, replica.address
            known = key in before
            self._contacts[key] = before.pop(key) if known else _Contact(replica, self._timeout_s)
        await asyncio.gather(*(contact.close() for contact in before.values()))

    def _learner(self) -> dict[str, Any] | None:
        if self._run is None:
            return None
        return read_progress(self._run, in_process=not self._targets)


class _Contact:
    """The connections with one service, and what it told before."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.episodes: Sequence[EpisodeRecord] = ()
        self._target = target
        self._timeout_s = timeout_s
        self._channel: Channel = connect(target.address, rpc=target.rpc, auth=target.auth)
        self._client: EnvClient | PolicyClient | BufferClient | None = None
        self._role: Role | None = None
        self._cursor = 0
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()

    async def close(self) -> None:
        await self._channel.close()
        if self._client is not None:
            await self._client.close()

    async def look(self) -> ServiceView:
        told: dict[str, Any] = {}
        self.episodes = ()
        try:
            await self._ask_health(told)
            if self._client is not None:
                await self._ask_service(told)
        except RemoteError as error:
            told["error"] = str(error)
            if "state" not in told and isinstance(error, (UnavailableError, DeadlineExceededError)):
                told["state"] = "DOWN"
        return ServiceView(
            self._target.name,
            self._target.address,
            role=self._role,
            rates=self._rates(told),
            **told,
        )

    async def _ask_health(self, told: dict[str, Any]) -> None:
        begun = time.perf_counter()
        statuses = await list_statuses(self._channel, timeout_s=self._timeout_s)
        told["rtt_s"] = time.perf_counter() - begun
        status = statuses.get(OVERALL, ServingStatus.UNKNOWN)
        told["state"] = status.name if status.name in {"SERVING", "NOT_SERVING"} else "UNKNOWN"
        role = next((ROLES[name] for name in statuses if name in ROLES), None)
        if role != self._role or self._client is None:  # another service may listen there by now
            if self._client is not None:
                await self._client.close()
            self._role, self._cursor = role, 0
            self._client = None if role is None else self._dial(role)
        if role is None:
            told["error"] = "no service of this library listens there"

    def _dial(self, role: Role) -> EnvClient | PolicyClient | BufferClient:
        target = self._target
        options: dict[str, Any] = {"rpc": target.rpc, "auth": target.auth}
        if role == "env":
            return EnvClient(target.address, **options)
        if role == "policy":
            return PolicyClient(target.address, **options)
        return BufferClient(target.address, **options)

    async def _ask_service(self, told: dict[str, Any]) -> None:
        client, timeout_s = self._client, self._timeout_s
        if isinstance(client, EnvClient):
            env = await client.describe(
                self._cursor, max_episodes=RECENT_EPISODES, max_traces=1, timeout_s=timeout_s
            )
            self.episodes, self._cursor = env.episodes, env.episode_cursor
            told |= _env_view(env)
        elif isinstance(client, PolicyClient):
            told |= _policy_view(await client.describe(timeout_s=timeout_s))
        elif client is not None:
            told |= _buffer_view(await client.describe(timeout_s=timeout_s))
        if client is not None:
            told["clock"] = client.offset.summary()

    def _rates(self, told: Mapping[str, Any]) -> dict[str, float]:
        """Returns what is counted per second over the last looks."""
        now, counters = time.monotonic(), told.get("counters")
        if not counters:
            self._seen.clear()  # it may begin again from 0
            return {}
        if self._seen and any(
            counters.get(name, 0) < value for name, value in self._seen[-1][1].items()
        ):
            self._seen.clear()
        while len(self._seen) > 1 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        self._seen.append((now, counters))
        then, before = self._seen[0]
        if now <= then:
            return {}
        return {
            name: (value - before.get(name, 0)) / (now - then) for name, value in counters.items()
        }


def _env_view(env: EnvStatus) -> dict[str, Any]:
    view = _view("env", env.stats)
    view["counters"] |= {"env_steps": env.env_steps, "episodes": env.episode_cursor}
    rows = sum(meta.num_envs or 0 for meta in env.envs)
    view["gauges"] |= {
        "rows": rows,
        "rows_driven": sum(
            meta.num_envs or 0 for meta in env.envs if meta.env_id in env.external_env_ids
        ),
        "actor_running": int(env.actor_running),
    }
    return {
        **view,
        "library_version": env.library_version,
        "clocks": env.stats.get("clocks", {}),
        "last_errors": env.stats.get("last_errors", {}),
    }


def _policy_view(policy: PolicyDescription) -> dict[str, Any]:
    view = _view("policy", policy.stats)
    view["gauges"]["policy_version"] = policy.policy_version
    return {**view, "library_version": policy.library_version}


def _buffer_view(buffer: BufferStatus) -> dict[str, Any]:
    view = _view("buffer", buffer.stats)
    tables = {}
    for name, table in buffer.tables.items():
        stats = buffer.stats.get("tables", {}).get(name, {})
        transitions = int(stats.get("transitions", table.size))
        details = {
            key: value for key, value in stats.items() if isinstance(value, (bool, int, float))
        }
        tables[name] = TableView(
            size=table.size,
            transitions=transitions,
            capacity=table.capacity,
            fill=min(1.0, transitions / table.capacity) if table.capacity else 0.0,
            writers=table.writers,
            readers=int(stats.get("readers", 0)),
            inserted_total=table.inserted_total,
            sampled_total=table.sampled_total,
            details={key: details[key] for key in details if key not in {"transitions", "readers"}},
        )
    view["counters"] |= {
        "inserted": sum(table.inserted_total for table in tables.values()),
        "sampled": sum(table.sampled_total for table in tables.values()),
    }
    return {**view, "library_version": buffer.library_version, "tables": tables}


def _view(role: Role, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the stats of every service hold."""
    return {
        "counters": {name: int(stats[name]) for name in _COUNTERS[role] if name in stats},
        "gauges": {name: stats[name] for name in _GAUGES[role] if name in stats},
        "sessions": {method: stats[key] for key, method in _SESSIONS[role].items() if key in stats},
        "latency": dict(find_latencies({"latency": stats.get("latency", {})}, "")),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
