"""The learner's loop: takes a rollout, learns from it, publishes the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rlightning.latency import LatencyStats
from rlightning.learner.ranks import ALONE, Order, Ranks
from rlightning.learner.staleness import Staleness
from rlightning.utils.config import TrainConfig

if TYPE_CHECKING:
    from rlightning.rpc.metrics import Metrics

# How often a loop that waits for data looks whether it should stop.
_LOOK_S = 0.5
# For the ages of older versions: that of the oldest one of which it is known.
_VERSIONS_KEPT = 10_000


@runtime_checkable
class Algorithm(Protocol):
    """What learns: see `rlightning.learner.ppo.PPO`."""

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Learns from the columns [T, N, ...] of one rollout; returns scalars by tag."""
        ...

    def weights(self) -> bytes:
        """Returns the policy's weights as a safetensors file."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here: nested dicts of tensors and numbers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        ...


class Source(Protocol):
    """Where rollouts come from and weights go to. All methods block."""

    def next_batch(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Returns the next rollout's columns [T, N, ...]; None if there was none in time."""
        ...

    def publish(self, version: int, weights: bytes) -> None:
        """Lets the policy act with new weights; returns when it does."""
        ...

    def collect(self, begin: int, stop: Callable[[], bool]) -> None:
        """Lets the envs take a round of lockstep, and returns when it is stored.

        Args:
            begin: Env steps before it, those of the run that this one goes on from included.
            stop: Asked while waiting; if it says so, the round is left to itself.
        """
        ...

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        ...

    def env_steps(self) -> int:
        """Returns the env steps that were executed in this run; every row counts."""
        ...

    def check(self) -> None:
        """Raises when no more data will come."""
        ...


@dataclass(frozen=True)
class Update:
    """One update of the learner.

    Attributes:
        number: Counts updates from 1.
        policy_version: Version under which the new weights were published.
        rows: Transitions in the batch.
        staleness: Mean age of the batch's rows when it was learned from, in versions; None if no
            row says which version acted.
        max_staleness: Age of its oldest row.
        staleness_s: Mean age of the weights that acted in its rows, in seconds since they were
            published; None if no row says which.
        metrics: What the algorithm reported.
    """

    number: int
    policy_version: int
    rows: int
    staleness: float | None
    max_staleness: int | None
    metrics: Mapping[str, float]
    staleness_s: float | None = None


def _make_latency() -> LatencyStats:
    # All of them at once: another thread may read them while this one records.
    return LatencyStats("sample_wait", "update", "publish", "staleness")


@dataclass
class LearnerStats:
    """What a learner has done so far.

    Attributes:
        updates: Batches learned from.
        rows: Transitions learned from.
        skipped_rows: Transitions in batches that were left out, since other weights than those of
            this learner had acted in some of them.
        env_steps: Env steps executed by the last update; every row counts.
        max_staleness: Age of the oldest row ever learned from, in versions; None before the first.
        policy_version: Version of the newest weights.
        latency: In seconds: `sample_wait`, `update`, `publish` (until the weights are in use), and
            `staleness`, for each batch the mean age of the weights that acted in its rows.
        staleness: Staleness of batches' rows in versions.
    """

    updates: int = 0
    rows: int = 0
    skipped_rows: int = 0
    env_steps: int = 0
    max_staleness: int | None = None
    policy_version: int = 0
    latency: LatencyStats = field(default_factory=_make_latency)
    staleness: Staleness = field(default_factory=Staleness)

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.stages(self.latency)
        text = "Staleness of rows in versions when they were learned from."
        metrics.counts("sample_staleness_versions", text, self.staleness.counts)
        metrics.gauge("policy_version", "Version of the newest weights.", self.policy_version)
        metrics.counter("learner_updates_total", "Batches learned from.", self.updates)
        metrics.counter("learner_rows_total", "Transitions learned from.", self.rows)
        metrics.counter("learner_skipped_rows_total", "Transitions left out.", self.skipped_rows)


def train_loop(
    algorithm: Algorithm,
    source: Source,
    train: TrainConfig,
    *,
    stop: Callable[[], bool],
    on_update: Callable[[Update], None] = lambda update: None,
    published: Callable[[LearnerStats, bytes], None] = lambda stats, weights: None,
    save: Callable[[LearnerStats, bytes], None] = lambda stats, weights: None,
    stats: LearnerStats | None = None,
    ranks: Ranks = ALONE,
) -> LearnerStats:
    """Learns until it is told to stop, or the envs have executed all steps of the budget.

    The first thing is to publish the weights that learning begins with, so that policy and learner
    agree. Versions go on after the one that the policy already has. Only rows in which weights of
    this learner acted are learned from: what the envs did before, with random weights or those of
    another learner, is off-policy by a distance that no version tells. A batch with such rows is
    left out whole.

    In lockstep, each update is made from a round of its own, which is collected meanwhile.

    The budget is looked at after each update, so there is at least one, and the envs do some more
    steps than `max_env_steps` before the last one ends.

    Args:
        algorithm: What learns.
        source: Where rollouts come from and weights go to.
        train: `max_env_steps` and `max_epochs` end it, `save_interval` says how often to save.
        stop: Asked before each batch, and while waiting for one.
        on_update: Called after each update, with its weights already in use.
        published: Called before it, with the weights.
        save: Called with a checkpoint: every `save_interval` updates, and with the newest weights
            at the end, whatever ended the loop.
        stats: Goes on from this and counts into it.
        ranks: Other learners, each with its share of every rollout.

    Returns:
        `stats`, or a new one.

    Raises:
        PolicyError: The algorithm failed.
        RLightningError: `source` raised.
    """
    stats = LearnerStats() if stats is None else stats
    before = stats.env_steps
    stats.policy_version = first_version = next_version(source, stats, train)
    weights = algorithm.weights()
    times = PublishTimes()
    source.publish(stats.policy_version, weights)
    times.note(stats.policy_version)
    try:
        while not (
            stop() or stats.env_steps >= train.max_env_steps or stats.updates == train.max_epochs
        ):
            asked = time.monotonic()
            if train.lockstep:
                source.collect(stats.env_steps, stop)
            columns = _wait_for_batch(source, stop)
            if columns is None:
                break
            got = time.monotonic()
            stats.latency.record("sample_wait", got - asked)
            versions = np.asarray(columns["policy_version"])
            known = versions[versions >= 0]
            ranks.order(Order.TAKE)
            if ranks.oldest(known) < first_version:
                stats.skipped_rows += versions.size * ranks.world_size
                continue
            ages = stats.policy_version - known
            oldest = int(ages.max()) if ages.size else None
            staleness_s = record_staleness(stats, times, known)
            ranks.order(Order.UPDATE, stats.policy_version)
            metrics = algorithm.update(columns)
            weights = algorithm.weights()
            stats.updates += 1
            stats.rows += versions.size * ranks.world_size
            if oldest is not None:
                stats.max_staleness = max(oldest, stats.max_staleness or 0)
            stats.policy_version += 1
            updated = time.monotonic()
            stats.latency.record("update", updated - got)
            source.publish(stats.policy_version, weights)
            times.note(stats.policy_version)
            stats.latency.record("publish", time.monotonic() - updated)
            stats.env_steps = before + source.env_steps()
            published(stats, weights)
            on_update(
                Update(
                    number=stats.updates,
                    policy_version=stats.policy_version,
                    rows=versions.size,
                    staleness=float(ages.mean()) if ages.size else None,
                    max_staleness=oldest,
                    metrics=metrics,
                    staleness_s=staleness_s,
                )
            )
            if train.save_interval > 0 and stats.updates % train.save_interval == 0:
                save(stats, weights)
    finally:
        save(stats, weights)
    return stats


def next_version(source: Source, stats: LearnerStats, train: TrainConfig) -> int:
    """Returns the version under which to publish the weights that learning begins with.

    It is above every one that was used. In lockstep, a policy that is new gets the weights of the
    checkpoint under the version that they had, so that versions repeat themselves too.
    """
    newest = source.policy_version()
    if train.lockstep and newest < stats.policy_version:
        return stats.policy_version
    return max(newest, stats.policy_version) + 1


class PublishTimes:
    """When each version of the weights was in use first, as far as this process knows."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}

    def note(self, version: int) -> None:
        """Notes that a version is in use now."""
        self._times[version] = time.monotonic()
        if len(self._times) > _VERSIONS_KEPT:
            del self._times[next(iter(self._times))]

    def mean_age_s(self, versions: np.ndarray[Any, Any]) -> float | None:
        """Returns how long ago the versions of rows were published, in the mean, in seconds."""
        if not versions.size:
            return None
        now, oldest = time.monotonic(), next(iter(self._times.values()))
        numbers, counts = np.unique(versions, return_counts=True)
        ages = [now - self._times.get(int(number), oldest) for number in numbers]
        return float(np.average(ages, weights=counts))


def record_staleness(
    stats: LearnerStats, times: PublishTimes, versions: np.ndarray[Any, Any]
) -> float | None:
    """Records how old the weights are that acted in a batch's rows.

    Args:
        stats: Counts the ages in versions, and in seconds their mean.
        times: When versions were published.
        versions: Those of the rows that say which, [n].

    Returns:
        Their mean age in seconds; None if no row says which.
    """
    stats.staleness.record(stats.policy_version - versions)
    staleness_s = times.mean_age_s(versions)
    if staleness_s is not None:
        stats.latency.record("staleness", staleness_s)
    return staleness_s


def _wait_for_batch(source: Source, stop: Callable[[], bool]) -> Mapping[str, Any] | None:
    """Returns the next batch, or None when told to stop before there was one."""
    while not stop():
        source.check()
        columns = source.next_batch(_LOOK_S)
        if columns is not None:
            return columns
    return None
