"""What a cluster's services take, by what they do: a linear model, its fit, and which of them is full first.

A service's CPU time is a sum over what passes through it: a part for each message, for each row and for each byte of an
observation. `benchmarks.prove_scaling` measures the parts, and holds the model against runs that it was not fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

US = 1e-6


@dataclass(frozen=True)
class Work:
    """What passes through a cluster in a second.

    Attributes:
        steps: Steps of groups: as many requests and answers at the policy server, and items at the buffer.
        rows: Rows in them; an env step is one row.
        bytes: Size of the observations in them.
        threaded: Those of the steps that an env's own thread takes, since they last.
        batches: Batches that learners take.
        batch_rows: Rows in them.
        batch_bytes: Size of the observations in them, both of a transition.
    """

    steps: float = 0.0
    rows: float = 0.0
    bytes: float = 0.0
    threaded: float = 0.0
    batches: float = 0.0
    batch_rows: float = 0.0
    batch_bytes: float = 0.0

    def __mul__(self, factor: float) -> Work:
        return Work(**{one.name: factor * getattr(self, one.name) for one in fields(self)})


# What each service's time goes by.
ROLES: Mapping[str, tuple[str, ...]] = {
    "env": ("steps", "rows", "bytes", "threaded"),
    "policy": ("steps", "rows", "bytes"),
    "buffer": ("steps", "rows", "bytes", "batches", "batch_rows", "batch_bytes"),
    "learner": ("batches", "batch_rows", "batch_bytes"),
}

Costs = Mapping[str, Mapping[str, float]]
"""Seconds of CPU for each unit of work, by service and kind of work."""


@dataclass(frozen=True)
class Measured:
    """One run: what passed through in a second, and the cores that each service used (all of its processes)."""

    name: str
    work: Work
    cores: Mapping[str, float]


def fit(runs: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Returns the costs that are nearest to what was measured, in relative terms; none is below zero."""
    costs = {}
    for role, kinds in ROLES.items():
        used = [run for run in runs if run.cores.get(role)]
        work = np.array([[getattr(run.work, kind) for kind in kinds] for run in used])
        cores = np.array([run.cores[role] for run in used])
        costs[role] = dict(zip(kinds, _least_squares(work / cores[:, None]), strict=True))
    return costs


def _least_squares(matrix: Any) -> list[float]:
    """Returns x >= 0 for which `matrix @ x` is nearest to ones, by leaving out what would be below zero."""
    scale = np.abs(matrix).max(axis=0)
    kept = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(matrix)), rcond=None)
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    solution = np.zeros(matrix.shape[1])
    solution[kept] = found / scale[kept]
    return [float(cost) for cost in solution]


def cores_of(work: Work, costs: Costs) -> dict[str, float]:
    """Returns the cores that each service uses for some work, all of its processes together."""
    return {
        role: sum(costs[role][kind] * getattr(work, kind) for kind in kinds)
        for role, kinds in ROLES.items()
    }


def rate_at(cores: float, shape: Work, costs: Costs) -> float:
    """Returns how often a second some work can be done where all services share so many cores, and nothing else."""
    return cores / sum(cores_of(shape, costs).values())


@dataclass(frozen=True)
class Host:
    """A machine with envs.

    Attributes:
        name: What it is.
        groups: Groups that its env server steps; each has a session with a policy server and one with a buffer server.
        rows: Rows in each.
        hz: Steps of each group in a second.
        nbytes: Size of one row's observation.
        samples_per_insert: How often the learner takes each row.
        batch: Rows in a batch.
        kept: Rows that buffer servers keep of it.
    """

    name: str
    groups: int
    rows: int
    hz: float
    nbytes: int
    samples_per_insert: float = 1.0
    batch: int = 256
    kept: int = 100_000

    def work(self, hosts: int) -> Work:
        """Returns what so many of them let pass through in a second."""
        steps = hosts * self.groups * self.hz
        rows = steps * self.rows
        taken = rows * self.samples_per_insert
        return Work(
            steps=steps,
            rows=rows,
            bytes=rows * self.nbytes,
            threaded=steps,
            batches=taken / self.batch,
            batch_rows=taken,
            batch_bytes=2 * taken * self.nbytes,
        )


@dataclass(frozen=True)
class Limits:
    """What one process of a service can do.

    Attributes:
        cores: Part of a core that its event loop may use, so that what comes in bursts does not wait.
        sessions: Sessions that it takes: `rpc.max_sessions`.
        bytes: Bytes a second of a network card, each way.
        memory: Bytes that it may take.
    """

    cores: float = 0.7
    sessions: int = 1024
    bytes: float = 1.25e9
    memory: float = 16 * 2**30


@dataclass(frozen=True)
class Memory:
    """What a process of a service is resident with, in bytes.

    Attributes:
        base: With next to nothing to do.
        group: More for each group that has a session with it.
    """

    base: float = 0.0
    group: float = 0.0


@dataclass(frozen=True)
class Need:
    """How many processes of a service some hosts need, and what decides it.

    Attributes:
        role: The service.
        cores: Cores that its processes use, all together, as do the following.
        bytes: Bytes a second that pass through.
        sessions: Sessions.
        memory: Bytes that are resident.
        processes: How many there have to be.
        because: Of what one would have too little.
        full: How many times one process would be full of that.
    """

    role: str
    cores: float
    bytes: float
    sessions: int
    memory: float
    processes: int
    because: str
    full: float


def needs(
    host: Host, hosts: int, costs: Costs, limits: Limits, memory: Mapping[str, Memory]
) -> list[Need]:
    """Returns what each service beside the hosts needs; of the fullest comes first.

    Of a service that `memory` leaves out it counts what is stored.
    """
    work = host.work(hosts)
    cores = cores_of(work, costs)
    sessions = hosts * host.groups
    found = []
    for role, moved, open_sessions, stored in (
        ("policy", work.bytes, sessions, 0),
        ("buffer", max(work.bytes, work.batch_bytes), sessions, hosts * host.kept * host.nbytes),
        ("learner", work.batch_bytes, 1, 0),
    ):
        own = memory.get(role, Memory())
        shared = stored + own.group * open_sessions
        each = {
            "CPU": cores[role] / limits.cores,
            "network": moved / limits.bytes,
            "sessions": open_sessions / limits.sessions,
            "memory": shared / (limits.memory - own.base),
        }
        because = max(each, key=lambda name: each[name])
        full = each[because]
        processes = max(1, math.ceil(full))
        resident = shared + processes * own.base
        found.append(
            Need(
                *(role, cores[role], moved, open_sessions, resident),
                *(processes, because, full),
            )
        )
    return sorted(found, key=lambda need: -need.full)


def most_hosts(
    host: Host, role: str, costs: Costs, limits: Limits, memory: Mapping[str, Memory]
) -> float:
    """Returns how many hosts one process of a service is enough for."""
    (need,) = (one for one in needs(host, 1, costs, limits, memory) if one.role == role)
    return 1 / need.full
