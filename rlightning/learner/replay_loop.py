"""The learner's loop over a replay buffer, which keeps pace with the env steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rlightning.learner.loop import (
    Algorithm,
    LearnerStats,
    PublishTimes,
    Source,
    Update,
    next_version,
    record_staleness,
)
from rlightning.learner.ranks import ALONE, Order, Ranks
from rlightning.utils.config import LearnerConfig, TrainConfig

# How often to ask how far the envs are: each time may be a call to hundreds of servers, so that it
# is less often where it would take more than a part of the time.
_ASK_EVERY_S = 0.005
_ASK_PART = 0.2
_ASK_AT_LEAST_S = 2.0
# How long to wait for a batch before actors that are held are let go for it.
_LOOK_S = 0.05
_NO_AGES = np.zeros(0, np.int64)


@runtime_checkable
class ReplayAlgorithm(Algorithm, Protocol):
    """What learns from replayed transitions: see `rlightning.learner.dqn.DQN`.

    Attributes:
        priorities: Of the rows of the last batch, [B]; None if it has none to give.
    """

    priorities: npt.NDArray[np.float64] | None

    def explore(self, env_steps: int) -> None:
        """Fits exploration to how many env steps were executed; called before each publish."""
        ...


class ReplaySource(Source, Protocol):
    """A source whose batches are columns [B, ...] of transitions."""

    def hold(self, wanted: bool) -> None:
        """Pauses the actors, or lets them go on."""
        ...

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        """Sets the priorities of a batch's rows, where the buffer has priorities."""
        ...


class Pace:
    """How many updates are due, and whether the actors have to wait for them.

    Args:
        learner: `learning_starts`, `updates_per_step` and `max_lead`.
        max_env_steps: Env steps that count; what is executed beyond them makes no update due.
    """

    def __init__(self, learner: LearnerConfig, max_env_steps: int) -> None:
        self._learner = learner
        self._max_env_steps = max_env_steps
        self._holding = False
        self._granted = 0

    def due(self, env_steps: int) -> int:
        """Returns how many updates so many env steps ask for."""
        counted = min(env_steps, self._max_env_steps) - self._learner.learning_starts
        return max(0, int(counted * self._learner.updates_per_step))

    def hold(self, env_steps: int, updates: int) -> bool:
        """Returns whether the actors have to wait: from `max_lead` on, down to half of it."""
        lead = env_steps - self._learner.learning_starts - updates / self._learner.updates_per_step
        limit = self._learner.max_lead
        self._holding = lead > (limit / 2 if self._holding else limit)
        self._holding = self._holding and env_steps >= self._granted
        return self._holding

    def grant(self, env_steps: int) -> None:
        """Lets the actors take `max_lead` more steps, whatever their lead: their data is needed."""
        if env_steps >= self._granted:
            self._granted = env_steps + self._learner.max_lead


def train_from_replay(
    algorithm: ReplayAlgorithm,
    source: ReplaySource,
    train: TrainConfig,
    learner: LearnerConfig,
    *,
    stop: Callable[[], bool],
    on_update: Callable[[Update], None] = lambda update: None,
    published: Callable[[LearnerStats, bytes], None] = lambda stats, weights: None,
    save: Callable[[LearnerStats, bytes], None] = lambda stats, weights: None,
    stats: LearnerStats | None = None,
    ranks: Ranks = ALONE,
) -> LearnerStats:
    """Learns until it is told to stop, or all updates of the budget's env steps are done.

    For each env step there are `learner.updates_per_step` updates. The learner waits for env steps;
    actors that are `learner.max_lead` ahead of the updates are paused, but take so many steps more
    when the learner waits for data. Rows of any weights are learned from, as far as
    `learner.max_staleness` allows. In lockstep, a round is collected whenever no update is due.

    Args:
        algorithm: What learns.
        source: Where batches come from and weights go to.
        train: `max_env_steps` and `max_epochs` (updates) end it, `save_interval` (updates) says how
            often to save.
        learner: The pace, how often to publish, and what is too old.
        stop: Asked before each batch, and while waiting for one.
        on_update: Called after each publish, with the figures of the last update.
        published: Called after each publish, with the weights.
        save: Called with a checkpoint: every `save_interval` updates, and with the newest weights
            at the end, whatever ended the loop.
        stats: Goes on from this and counts into it.
        ranks: Other learners, which make the same updates from batches of their own.

    Returns:
        `stats`, or a new one.

    Raises:
        PolicyError: The algorithm failed.
        RLightningError: `source` raised.
    """
    stats = LearnerStats() if stats is None else stats
    before = stats.env_steps
    pace = Pace(learner, train.max_env_steps)
    stats.policy_version = next_version(source, stats, train) - 1
    weights, published_at = b"", -1
    times = PublishTimes()
    holding, asked, ask_s = False, 0.0, _ASK_EVERY_S

    def publish() -> None:
        nonlocal weights, published_at
        begun = time.monotonic()
        algorithm.explore(stats.env_steps)
        newest = algorithm.weights()
        source.publish(stats.policy_version + 1, newest)
        stats.policy_version += 1
        times.note(stats.policy_version)
        weights, published_at = newest, stats.updates
        stats.latency.record("publish", time.monotonic() - begun)

    publish()
    try:
        while not stop() and stats.updates != train.max_epochs:
            begun = time.monotonic()
            if not holding and begun - asked >= ask_s:
                stats.env_steps = before + source.env_steps()
                asked = time.monotonic()
                ask_s = (asked - begun) / _ASK_PART
                ask_s = min(max(_ASK_EVERY_S, ask_s), _ASK_AT_LEAST_S)
            hold = not train.lockstep and pace.hold(stats.env_steps, stats.updates)
            if hold != holding:
                source.hold(hold)
                holding, asked = hold, 0.0
            if stats.updates >= pace.due(stats.env_steps):
                if stats.env_steps >= train.max_env_steps:
                    break
                source.check()
                if train.lockstep:
                    source.collect(stats.env_steps, stop)
                    asked = 0.0
                else:
                    time.sleep(_ASK_EVERY_S)
                continue
            source.check()
            begun = time.monotonic()
            columns = source.next_batch(_LOOK_S)
            got = time.monotonic()
            ages = _NO_AGES
            if columns is not None:
                stats.latency.record("sample_wait", got - begun)
                columns, ages = _fresh(columns, stats, learner.max_staleness)
            if columns is None:
                # There is none yet, since episodes are stored whole, or all rows are too old.
                pace.grant(stats.env_steps)
                continue
            staleness_s = record_staleness(stats, times, stats.policy_version - ages)
            ranks.order(Order.UPDATE, stats.policy_version)
            metrics = algorithm.update(columns)
            stats.updates += 1
            stats.rows += len(columns["reward"]) * ranks.world_size
            if algorithm.priorities is not None and "sample_index" in columns:
                source.update_priorities(columns, algorithm.priorities)
            stats.latency.record("update", time.monotonic() - got)
            saves = train.save_interval > 0 and stats.updates % train.save_interval == 0
            if saves or stats.updates % learner.publish_interval == 0:
                publish()
                published(stats, weights)
                update = _describe(stats, len(columns["reward"]), ages, metrics)
                on_update(replace(update, staleness_s=staleness_s))
            if saves:
                save(stats, weights)
        if holding:
            source.hold(False)
        if published_at != stats.updates:
            publish()
            published(stats, weights)
    finally:
        save(stats, weights)
    return stats


def fresh_rows(
    columns: Mapping[str, Any], version: int, max_staleness: int | None
) -> Mapping[str, Any]:
    """Returns those rows of a batch that are at most `max_staleness` versions older than one."""
    if max_staleness is None:
        return columns
    versions = np.asarray(columns["policy_version"])
    fresh = (versions < 0) | (versions >= version - max_staleness)
    if fresh.all():
        return columns
    return {name: _rows(value, fresh) for name, value in columns.items()}


def _fresh(
    columns: Mapping[str, Any], stats: LearnerStats, max_staleness: int | None
) -> tuple[Mapping[str, Any] | None, npt.NDArray[np.int64]]:
    """Returns the rows that are not too old, None if all are, and the ages of those known."""
    rows = len(columns["policy_version"])
    columns = fresh_rows(columns, stats.policy_version, max_staleness)
    versions = np.asarray(columns["policy_version"])
    stats.skipped_rows += rows - len(versions)
    ages = (stats.policy_version - versions[versions >= 0]).astype(np.int64)
    if ages.size:
        stats.max_staleness = max(int(ages.max()), stats.max_staleness or 0)
    return (columns if versions.size else None), ages


def _rows(value: Any, mask: npt.NDArray[np.bool_]) -> Any:
    if isinstance(value, Mapping):
        return {name: _rows(part, mask) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, mask) for part in value)
    return value[mask]


def _describe(
    stats: LearnerStats, rows: int, ages: npt.NDArray[np.int64], metrics: Mapping[str, float]
) -> Update:
    return Update(
        number=stats.updates,
        policy_version=stats.policy_version,
        rows=rows,
        staleness=float(ages.mean()) if ages.size else None,
        max_staleness=int(ages.max()) if ages.size else None,
        metrics=metrics,
    )
