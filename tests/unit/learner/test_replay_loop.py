"""The loop over a replay buffer, against a source that is a fake."""

import time

import numpy as np
import pytest

from rlightning.errors import PolicyError
from rlightning.learner import LearnerStats, train_from_replay
from rlightning.learner.replay_loop import Pace
from rlightning.utils.config import LearnerConfig, TrainConfig

ROWS = 4


class Source:
    """Its envs take `stride` steps whenever they are asked about, unless they are held."""

    def __init__(self, stride=10, version=0, stored_at=0, acted=None):
        self.version = version
        self.steps = 0
        self.held = False
        self.leads = []
        self.published = []
        self.priorities = []
        self._stride = stride
        self._stored_at = stored_at
        self._acted = acted

    def env_steps(self):
        if not self.held:
            self.steps += self._stride
        return self.steps

    def next_batch(self, timeout_s):
        self.leads.append(self.steps)
        if self.steps < self._stored_at:
            return None
        acted = self.version if self._acted is None else self._acted
        return {
            "reward": np.zeros(ROWS, np.float32),
            "observation": {"a": np.arange(ROWS)},
            "policy_version": np.resize(np.array(acted), ROWS),
            "sample_index": np.arange(ROWS),
        }

    def update_priorities(self, columns, priorities):
        self.priorities.append(priorities)

    def hold(self, wanted):
        assert wanted != self.held
        self.held = wanted

    def publish(self, version, weights):
        self.version = version
        self.published.append((version, weights))

    def policy_version(self):
        return self.version

    def check(self):
        pass


class Algorithm:
    def __init__(self, fails_at=None):
        self.updates = 0
        self.explored = []
        self.rows = []
        self.priorities = None
        self._fails_at = fails_at

    def update(self, columns):
        if self.updates == self._fails_at:
            raise PolicyError("diverged")
        self.updates += 1
        self.rows.append(len(columns["observation"]["a"]))
        self.priorities = np.full(ROWS, self.updates)
        return {"losses/value": float(self.updates)}

    def explore(self, env_steps):
        self.explored.append(env_steps)

    def weights(self):
        return b"%d" % self.updates


def run(
    source,
    algorithm=None,
    stats=None,
    max_env_steps=100,
    save_interval=-1,
    lockstep=False,
    **learner,
):
    learner = {"learning_starts": 20, "updates_per_step": 0.5, "publish_interval": 8, **learner}
    updates, saved = [], []
    algorithm = algorithm or Algorithm()
    stats = train_from_replay(
        algorithm,
        source,
        TrainConfig(max_env_steps=max_env_steps, save_interval=save_interval, lockstep=lockstep),
        LearnerConfig(**learner),
        stop=lambda: False,
        on_update=updates.append,
        save=lambda stats, weights: saved.append((stats.policy_version, weights)),
        stats=stats,
    )
    return stats, updates, saved


def test_for_each_env_step_of_the_budget_there_are_so_many_updates():
    source = Source()
    stats, updates, saved = run(source)
    assert stats.updates == 40  # half of 100 - 20
    assert stats.rows == 40 * ROWS
    assert [update.number for update in updates] == [8, 16, 24, 32, 40]
    assert source.published[0] == (1, b"0")
    assert source.published[-1] == (6, b"40")
    assert saved == [(6, b"40")]
    assert not source.held


def test_the_last_updates_are_published_too():
    source = Source()
    _, _, saved = run(source, publish_interval=30)
    assert source.published == [(1, b"0"), (2, b"30"), (3, b"40")]
    assert saved == [(3, b"40")]


def test_what_is_saved_was_published_under_its_version():
    source = Source()
    _, _, saved = run(source, publish_interval=100, save_interval=15)
    assert saved == [(2, b"15"), (3, b"30"), (4, b"40")]
    assert set(saved) <= set(source.published)


def test_actors_wait_for_the_updates_that_are_due():
    source = Source(stride=7)
    stats, _, _ = run(source, max_env_steps=300, max_lead=30, updates_per_step=0.2)
    assert stats.updates == 56
    for done, steps in enumerate(source.leads):
        assert steps - 20 - done / 0.2 <= 30 + 7


def test_a_learner_that_waits_for_whole_episodes_lets_the_actors_go_on():
    source = Source(stored_at=500)
    stats, _, _ = run(source, max_env_steps=600, max_lead=30, updates_per_step=0.1)
    assert stats.updates == 58
    assert 500 <= source.steps < 700


def test_rows_that_are_too_old_are_left_out():
    algorithm = Algorithm()
    source = Source(acted=[0, 1, 5, -1])
    stats, _, _ = run(source, algorithm, max_staleness=3, publish_interval=1000, max_env_steps=30)
    assert algorithm.rows == [4] * 5
    assert (stats.skipped_rows, stats.max_staleness) == (0, 1)
    algorithm = Algorithm()
    source = Source(version=7, acted=[4, 5, 8, -1])
    stats, _, _ = run(source, algorithm, max_staleness=3, publish_interval=1000, max_env_steps=30)
    assert algorithm.rows == [3] * 5
    assert (stats.skipped_rows, stats.max_staleness) == (5, 3)


def test_how_old_the_weights_behind_rows_are_is_recorded():
    stats, updates, _ = run(Source(acted=[1, -1, 1, 1]))
    assert stats.latency.summary()["staleness"]["count"] == stats.updates
    assert stats.staleness.counts.classic()[1] == 3 * stats.updates
    assert stats.staleness.summary()["count"] == 3 * stats.updates
    assert updates[-1].staleness_s > 0


def test_a_maximum_age_of_0_does_not_starve_the_learner():
    class Fresh(Source):
        def next_batch(self, timeout_s):  # nothing is fresh before the actors went on
            batch = super().next_batch(timeout_s)
            fresh = self.version if self.steps >= self._stored_at + 40 else self.version - 1
            return {**batch, "policy_version": np.full(ROWS, fresh)}

        def publish(self, version, weights):
            super().publish(version, weights)
            self._stored_at = self.steps - 40 + self._stride

    stats, _, _ = run(Fresh(), max_staleness=0, max_lead=5)
    assert stats.updates == 40
    assert stats.skipped_rows > 0
    assert stats.max_staleness == 0


def test_priorities_go_back():
    source = Source()
    run(source)
    assert [int(one[0]) for one in source.priorities] == list(range(1, 41))


def test_exploration_follows_the_env_steps():
    algorithm = Algorithm()
    run(Source(), algorithm)
    assert algorithm.explored[0] == 0
    assert algorithm.explored == sorted(algorithm.explored)
    assert algorithm.explored[-1] >= 90


def test_it_goes_on_from_where_another_stopped():
    source = Source(version=3)
    before = LearnerStats(updates=30, rows=9, env_steps=80, policy_version=12)
    stats, _, _ = run(source, stats=before)
    assert stats is before
    assert stats.updates == 40
    assert source.published[0] == (13, b"0")
    assert source.steps >= 20


def test_a_failure_ends_it_with_the_last_published_weights_saved():
    saved = []
    with pytest.raises(PolicyError):
        train_from_replay(
            Algorithm(fails_at=10),
            Source(),
            TrainConfig(max_env_steps=100),
            LearnerConfig(learning_starts=20, publish_interval=8),
            stop=lambda: False,
            save=lambda stats, weights: saved.append((stats.policy_version, weights)),
        )
    assert saved == [(2, b"8")]


def test_the_pace_holds_until_half_of_the_lead_is_left():
    pace = Pace(LearnerConfig(learning_starts=100, max_lead=10, updates_per_step=1.0), 10**6)
    assert [pace.due(steps) for steps in (0, 100, 101, 150)] == [0, 0, 1, 50]
    held = [pace.hold(steps, 0) for steps in (100, 110, 111)]
    assert held == [False, False, True]
    assert [pace.hold(111, updates) for updates in (1, 5, 6)] == [True, True, False]
    pace.grant(111)
    assert [pace.hold(steps, 0) for steps in (111, 120, 121)] == [False, False, True]


class InTurns(Source):
    """Its envs take 16 steps when they are told to, and are never held."""

    def __init__(self, version=0):
        super().__init__(stride=0, version=version)
        self.rounds = []

    def collect(self, begin, stop):
        self.rounds.append((begin, len(self.leads)))  # after how many batches
        self.steps += 16

    def hold(self, wanted):
        raise AssertionError("nobody runs ahead")


def test_in_lockstep_a_round_is_collected_when_no_update_is_due():
    source = InTurns()
    stats, _, _ = run(source, lockstep=True, max_env_steps=64, max_lead=1)
    assert source.rounds == [(0, 0), (16, 0), (32, 6), (48, 14)]
    assert (stats.updates, stats.env_steps) == (22, 64)  # half of 64 - 20


def test_in_lockstep_versions_go_on_as_they_were():
    source, stats = InTurns(), LearnerStats(policy_version=5, updates=6, env_steps=32)
    run(source, stats=stats, lockstep=True, max_env_steps=48)
    assert [version for version, _ in source.published] == [5, 6, 7]
    assert source.rounds == [(32, 0)]


def test_a_source_that_is_slow_to_tell_of_its_envs_is_asked_less_often():
    class Slow(Source):
        asking_s = 0.0

        def env_steps(self):
            begun = time.monotonic()
            time.sleep(0.01)
            self.asking_s += time.monotonic() - begun
            return super().env_steps()

    class Updating(Algorithm):
        def update(self, columns):
            time.sleep(0.001)
            return super().update(columns)

    source = Slow(stride=20)
    begun = time.monotonic()
    run(source, Updating(), max_env_steps=400, max_lead=400, learning_starts=1)
    assert source.asking_s < 0.4 * (time.monotonic() - begun)  # 0.7 if asked every 5 ms
