"""The learner's loop against a source that is a fake."""

import numpy as np
import pytest

from rlightning.errors import PolicyError, UnavailableError
from rlightning.learner import LearnerStats, train_loop
from rlightning.utils.config import TrainConfig

ROWS = 6


class Source:
    """Hands out rollouts; None stands for an empty wait. Its envs are `ahead` steps further."""

    def __init__(self, batches, version=0, ahead=0):
        self.version = version
        self.ahead = ahead
        self.handed_out = 0
        self.published = []
        self._batches = list(batches)

    def next_batch(self, timeout_s):
        batch = self._batches.pop(0) if self._batches else None
        if isinstance(batch, Exception):
            raise batch
        self.handed_out += batch is not None
        return batch

    def publish(self, version, weights):
        self.version = version
        self.published.append((version, weights))

    def policy_version(self):
        return self.version

    def env_steps(self):
        return self.handed_out * ROWS + self.ahead

    def check(self):
        pass


class Algorithm:
    """Its weights are the number of its updates."""

    def __init__(self, fails_at=None):
        self.updates = 0
        self._fails_at = fails_at

    def update(self, columns):
        if self.updates == self._fails_at:
            raise PolicyError("diverged")
        self.updates += 1
        return {"losses/policy": float(self.updates)}

    def weights(self):
        return b"%d" % self.updates


def batch(*versions):
    column = np.resize(np.array(versions, np.int64), (ROWS // 2, 2))
    return {"policy_version": column}


def run(source, *, algorithm=None, stop=lambda: False, **train):
    updates, saved, stats = [], [], LearnerStats()

    def save(stats, weights):
        saved.append((stats.policy_version, stats.updates, weights))

    train = TrainConfig(**{"max_env_steps": 10**9, **train})
    try:
        returned = train_loop(
            algorithm or Algorithm(),
            source,
            train,
            stop=stop,
            on_update=updates.append,
            save=save,
            stats=stats,
        )
    except Exception as error:
        return error, updates, saved
    assert returned is stats
    return stats, updates, saved


def test_publishes_its_first_weights_before_it_takes_a_batch():
    source = Source([], version=0)
    stats, updates, saved = run(source, stop=lambda: True)
    assert source.published == [(1, b"0")]
    assert saved == [(1, 0, b"0")]
    assert (stats.updates, stats.policy_version, updates) == (0, 1, [])


def test_versions_go_on_after_that_of_the_policy():
    source = Source([batch(8), batch(8)], version=7)
    stats, _, _ = run(source, max_env_steps=2 * ROWS)
    assert [version for version, _ in source.published] == [8, 9, 10]
    assert stats.policy_version == 10


def test_stops_when_the_steps_are_used_up():
    stats, updates, saved = run(Source([batch(1)] * 9), max_env_steps=2 * ROWS + 1)
    assert (stats.updates, stats.rows) == (3, 3 * ROWS)
    assert [update.number for update in updates] == [1, 2, 3]
    assert saved == [(4, 3, b"3")]


def test_the_steps_are_those_that_the_envs_executed():
    stats, _, _ = run(Source([batch(1)] * 9, ahead=2 * ROWS), max_env_steps=4 * ROWS)
    assert (stats.updates, stats.rows, stats.env_steps) == (2, 2 * ROWS, 4 * ROWS)


def test_there_is_an_update_however_far_the_envs_are():
    stats, _, _ = run(Source([batch(1)] * 9, ahead=100 * ROWS), max_env_steps=1)
    assert (stats.updates, stats.rows, stats.env_steps) == (1, ROWS, 101 * ROWS)


@pytest.mark.parametrize("version", [0, 7], ids=["random weights", "another learner's"])
def test_rows_in_which_other_weights_acted_are_not_learned_from(version):
    mine = version + 1
    batches = [batch(version), batch(version, mine), batch(mine), batch(mine, mine + 1)]
    stats, updates, _ = run(Source(batches, version=version), max_epochs=2)
    assert (stats.updates, stats.rows, stats.skipped_rows) == (2, 2 * ROWS, 2 * ROWS)
    assert [update.max_staleness for update in updates] == [0, 1]
    assert stats.max_staleness == 1


def test_the_age_of_rows_that_say_no_version_is_not_known():
    _, updates, _ = run(Source([batch(-1), batch(-1, 1)]), max_epochs=2)
    assert [(u.staleness, u.max_staleness, u.rows) for u in updates] == [
        (None, None, ROWS),
        (1.0, 1, ROWS),
    ]


def test_stops_after_the_epochs():
    stats, _, _ = run(Source([batch(1)] * 9), max_epochs=2)
    assert stats.updates == 2


def test_stops_when_told_between_batches_and_while_it_waits():
    source = Source([batch(1), None, None])
    algorithm = Algorithm()
    asked_after = []

    def stop():
        asked_after.append(algorithm.updates)
        return len(asked_after) > 6

    stats, _, _ = run(source, algorithm=algorithm, stop=stop)
    assert stats.updates == 1
    assert asked_after.count(1) > 2


def test_tells_how_old_the_rows_were():
    source = Source([batch(5, 5, 5), batch(5, 5, 6), batch(5, 6, 7)], version=4)
    stats, updates, _ = run(source, max_epochs=3)
    assert [update.staleness for update in updates] == pytest.approx([0.0, 2 / 3, 1.0])
    assert [update.max_staleness for update in updates] == [0, 1, 2]
    assert stats.max_staleness == 2
    assert [update.policy_version for update in updates] == [6, 7, 8]
    assert [update.metrics["losses/policy"] for update in updates] == [1.0, 2.0, 3.0]
    assert {update.rows for update in updates} == {ROWS}


def test_an_update_is_told_once_its_weights_are_in_use():
    source = Source([batch(1)] * 2)
    seen = []
    train_loop(
        Algorithm(),
        source,
        TrainConfig(max_epochs=2),
        stop=lambda: False,
        on_update=lambda update: seen.append((update.policy_version, source.version)),
    )
    assert seen == [(2, 2), (3, 3)]


def test_saves_in_intervals_and_at_the_end():
    _, _, saved = run(Source([batch(1)] * 5), max_epochs=5, save_interval=2)
    assert [updates for _, updates, _ in saved] == [2, 4, 5]


def test_measures_its_stages():
    stats, _, _ = run(Source([batch(1)] * 3), max_epochs=3)
    assert {name: h.count for name, h in stats.latency.items()} == {
        "sample_wait": 3,
        "update": 3,
        "publish": 3,
        "staleness": 3,
    }


@pytest.mark.parametrize(
    ("source", "algorithm", "error"),
    [
        (Source([batch(1), UnavailableError("gone")]), Algorithm(), UnavailableError),
        (Source([batch(1), batch(1)]), Algorithm(fails_at=1), PolicyError),
    ],
)
def test_a_failure_ends_it_with_the_newest_good_weights_saved(source, algorithm, error):
    raised, updates, saved = run(source, algorithm=algorithm)
    assert isinstance(raised, error)
    assert len(updates) == 1
    assert saved == [(2, 1, b"1")]
    assert source.published[-1] == (2, b"1")


class InTurns(Source):
    """Its envs take a round when they are told to."""

    def __init__(self, version=0):
        super().__init__([], version)
        self.begins = []

    def collect(self, begin, stop):
        self.begins.append(begin)
        self._batches.append(batch(self.version))


def test_in_lockstep_each_update_has_a_round_of_its_own():
    source = InTurns()
    stats, _, _ = run(source, max_epochs=3, lockstep=True)
    assert source.begins == [0, ROWS, 2 * ROWS]
    assert stats.policy_version == 4


def test_in_lockstep_a_new_policy_gets_the_weights_of_a_checkpoint_as_they_were():
    for version, first in ((0, 7), (6, 7), (7, 8), (9, 10)):
        source, stats = InTurns(version), LearnerStats(policy_version=7, updates=2, env_steps=12)
        train = TrainConfig(lockstep=True, max_epochs=3)
        train_loop(Algorithm(), source, train, stop=lambda: False, stats=stats)
        assert [version for version, _ in source.published] == [first, first + 1]
        assert source.begins == [12]
