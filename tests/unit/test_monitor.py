"""What the monitor makes of what it sees; the cluster is a fake."""

import csv
import threading

import numpy as np
import pytest

from rlightning.cluster.backend import ClusterState
from rlightning.cluster.display import Display
from rlightning.cluster.monitor import Monitor
from rlightning.cluster.progress import describe_run
from rlightning.cluster.runs import Run
from rlightning.cluster.scalars import Scalars
from rlightning.env.episodes import EpisodeRecord
from rlightning.errors import UnavailableError
from rlightning.learner.loop import LearnerStats, Update
from rlightning.utils.config import MainConfig, TrainConfig


def make_episode(episode_return, reason="terminated"):
    return EpisodeRecord(
        episode_return=episode_return,
        length=1,
        env_id="e",
        row=0,
        episode_id=0,
        seed=None,
        policy_version=0,
        reason=reason,
        ts_end_ns=0,
    )


class FakeBackend:
    """Answers each look with the next of some states, or raises it; then repeats the last one."""

    def __init__(self, *states):
        self._states = list(states)
        self.seen = threading.Event()

    def observe(self):
        if len(self._states) == 1:
            self.seen.set()
            state = self._states[0]
            return ClusterState(state.env_steps, [], state.policy_version, {})
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state


def make_state(env_steps, *returns):
    return ClusterState(env_steps, [make_episode(value) for value in returns], 3, {})


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr("rlightning.cluster.monitor._PERIOD_S", 0.001)
    run = Run.create(MainConfig.from_dict({"log": {"log_dir": str(tmp_path)}}), command=[])

    def _watch(backend, *, env_steps=0, **train):
        display = Display(quiet=True, to_stderr=False, total_steps=1)
        config = TrainConfig(**{"target_return": 10, "target_episodes": 2, **train})
        return Monitor(
            backend,
            LearnerStats(updates=7, env_steps=env_steps),
            run=run,
            display=display,
            scalars=Scalars(None),
            train=config,
        )

    _watch.run = run
    return _watch


@pytest.mark.parametrize("returns", [[30.0], [float("inf")] * 9, [float("nan")] * 9])
def test_the_target_needs_the_mean_of_enough_episodes_and_a_number(watch, returns):
    backend = FakeBackend(make_state(1, *returns), make_state(1))
    with watch(backend) as monitor:
        assert backend.seen.wait(30)
        assert not monitor.reached.is_set()


def test_the_target_is_the_mean_of_the_last_episodes(watch):
    backend = FakeBackend(make_state(1, 0.0, 9.0), make_state(2, 11.0), make_state(2))
    with watch(backend) as monitor:
        assert monitor.reached.wait(30)
    assert monitor.progress.mean_return == 10.0
    assert monitor.progress.episodes == 3
    assert monitor.progress.policy_version == 3


def test_what_was_reached_is_kept_beside_the_last_mean(watch):
    late = make_state(4, 0.0)
    backend = FakeBackend(make_state(1, 0.0, 9.0), make_state(2, 11.0), late, make_state(4))
    with watch(backend, env_steps=100) as monitor:
        assert backend.seen.wait(30)
    progress = monitor.progress
    assert (progress.mean_return, progress.reached_return, progress.reached_steps) == (5.5, 10, 102)
    assert monitor.reached.is_set()
    told = describe_run(progress, "solved")
    assert (told["mean_return"], told["reached_return"]) == (5.5, 10.0)


def test_every_episode_is_recorded_once(watch):
    backend = FakeBackend(make_state(1, 1.0, 2.0), make_state(2, 3.0), make_state(2))
    with watch(backend):
        assert backend.seen.wait(30)
    rows = list(csv.DictReader(watch.run.episodes.read_text().splitlines()))
    assert [row["return"] for row in rows] == ["1.0", "2.0", "3.0"]


def test_an_env_that_fails_is_told_of_once(watch, monkeypatch):
    told = []
    monkeypatch.setattr(Display, "message", lambda _, text: told.append(text))
    cut = ClusterState(1, [make_episode(5.0, "cut"), make_episode(6.0, "cut")], 3, {})
    backend = FakeBackend(make_state(1, 1.0), cut, cut, make_state(2))
    with watch(backend) as monitor:
        assert backend.seen.wait(30)
    assert len(told) == 1
    assert told[0].startswith("env e failed in the middle of an episode and was reset")
    assert monitor.progress.mean_return == 1.0


def test_an_absent_service_is_not_the_end(watch):
    backend = FakeBackend(UnavailableError("gone"), make_state(7))
    with watch(backend) as monitor:
        assert backend.seen.wait(30)
        monitor.check()
    assert monitor.progress.env_steps == 7


def test_steps_count_on_from_a_checkpoint(watch):
    backend = FakeBackend(make_state(7), make_state(7))
    with watch(backend, env_steps=100) as monitor:
        assert backend.seen.wait(30)
    assert monitor.progress.env_steps == 107
    assert monitor.progress.steps_before == 100


def test_any_other_error_reaches_the_trainer(watch):
    with watch(FakeBackend(ZeroDivisionError(), make_state(1))) as monitor:
        assert monitor.failed.wait(30)
        with pytest.raises(ZeroDivisionError):
            monitor.check()


def test_the_learner_is_shown(watch, monkeypatch):
    backend = FakeBackend(make_state(1), make_state(1))
    update = Update(
        number=7, policy_version=8, rows=10, staleness=1.5, max_staleness=2, metrics={"losses/x": 1}
    )
    scalars = {}
    with watch(backend) as monitor:
        monkeypatch.setattr(monitor._scalars, "add", lambda values, step: scalars.update(values))
        monitor._learner.staleness.record(np.array([1, 2]))
        monitor.updated(update)
    assert monitor.progress.updates == 7
    assert monitor.progress.staleness == 1.5
    assert (scalars["losses/x"], scalars["charts/max_staleness"]) == (1, 2.0)
    shown = describe_run(monitor.progress, "running")["staleness_versions"]
    assert shown == {"count": 2, "mean": 1.5, "p50": 1, "p90": 2, "p99": 2, "max": 2}
    assert (scalars["charts/staleness_p50"], scalars["charts/staleness_p99"]) == (1, 2)
