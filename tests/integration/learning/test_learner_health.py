"""What the learner's health says from its start to its end, and of one that is stuck."""

import os
import signal
import threading

import pytest

from rlightning.cluster.learner_health import LearnerHealth
from rlightning.cluster.past_runs import outcome_of
from rlightning.cluster.train import train
from rlightning.errors import ConfigError, RemoteError
from rlightning.learner import PPO
from rlightning.rpc import health
from rlightning.rpc.health import ServingStatus, check_health
from rlightning.rpc.loop import shared_loop
from rlightning.testing import free_address, wait_until
from tests.integration.learning.configs import make_config

SERVING, NOT_SERVING = ServingStatus.SERVING, ServingStatus.NOT_SERVING


class Paused(PPO):
    """PPO that is stuck in its third update until it is let go."""

    inside, go = threading.Event(), threading.Event()
    updates = 0

    def update(self, columns):
        self.updates += 1
        if self.updates == 3:
            self.inside.set()
            assert self.go.wait(60)
        return super().update(columns)


def paused(policy, learner, train, *, seed):
    return Paused(policy, learner, train, seed=seed)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("rlightning.cluster.learner_health.STILL_S", 1.0)
    monkeypatch.setattr("rlightning.cluster.learner_health._LOOK_S", 0.02)


def says(address, *expected):
    """Says whether liveness and readiness are those."""
    names = ("liveness", "readiness")
    asked = (health.check(address, name, timeout_s=30) for name in names)
    return tuple(map(shared_loop().run, asked)) == expected


def test_a_learner_is_ready_once_its_loop_comes_round_and_not_while_it_is_stuck():
    with LearnerHealth("127.0.0.1:0") as learner:
        assert says(learner.address, SERVING, NOT_SERVING)
        for _ in range(2):
            wait_until(lambda: learner.came_round() or says(learner.address, SERVING, SERVING))
            wait_until(lambda: says(learner.address, NOT_SERVING, NOT_SERVING))
        with pytest.raises(
            ConfigError, match=f"learner.health: cannot listen on {learner.address}"
        ):
            LearnerHealth(learner.address).__enter__()
    with pytest.raises(RemoteError):
        says(learner.address, SERVING, SERVING)


def test_a_run_tells_its_health_until_it_is_stopped(tmp_path):
    config = make_config("ppo", tmp_path, target_return=None, max_env_steps=1000)
    config.train.after_target = "serve"
    config.learner.algorithm = f"{__name__}:paused"
    config.learner.health = address = free_address()
    seen = []

    def look():
        try:
            assert Paused.inside.wait(60)
            wait_until(lambda: says(address, NOT_SERVING, NOT_SERVING))
            seen.append("stuck")
            Paused.go.set()
            wait_until(lambda: says(address, SERVING, SERVING))
            run = tmp_path / "reach" / "latest"
            wait_until(lambda: outcome_of(run) == "finished")
            assert not ended.wait(1.5)  # longer than what came before is enough for
            wait_until(lambda: says(address, SERVING, SERVING))
            seen.append("serves on")
        finally:
            Paused.go.set()
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    ended, looking = threading.Event(), threading.Thread(target=look)
    looking.start()
    try:
        train(config, in_process=True, quiet=True)
    finally:
        ended.set()
        looking.join()
    assert seen == ["stuck", "serves on"]
    assert not check_health(address)
