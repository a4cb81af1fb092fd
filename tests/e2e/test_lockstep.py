"""In lockstep, a run that was killed ends with the same bytes as one that was not."""

import json
import os
import signal

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, Command, is_running, run, settings

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

# An algorithm whose state tells which batches it was given, to the bit.
RECORDED = """
import hashlib

import numpy as np

from rlightning.learner import DQN, PPO


def ppo(policy, learner, train, *, seed):
    return Recorded(PPO(policy, learner, train, seed=seed))


def dqn(policy, learner, train, *, seed):
    return Recorded(DQN(policy, learner, train, seed=seed))


class Recorded:
    def __init__(self, inner):
        self.inner = inner
        self.digest = ""

    def update(self, columns):
        digest = hashlib.sha256(self.digest.encode())
        for name, column in sorted(columns.items()):
            digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
        self.digest = digest.hexdigest()
        return self.inner.update(columns)

    def state(self):
        return {"inner": self.inner.state(), "digest": self.digest}

    def restore(self, state):
        self.inner.restore(state["inner"])
        self.digest = state["digest"]

    def weights(self):
        return self.inner.weights()

    def explore(self, env_steps):
        self.inner.explore(env_steps)

    @property
    def priorities(self):
        return self.inner.priorities
"""

COMMON = (
    "env.num_envs=3",
    "buffer.rollout_length=16",
    "train.batch_size=16",
    "train.target_return=null",
    "train.max_env_steps=1000000",
)
ALGORITHMS = {
    "ppo": (*COMMON, "learner.algorithm=recorded:ppo", "train.save_interval=3"),
    "dqn": (
        *COMMON,
        "learner.algorithm=recorded:dqn",
        "policy.type=q_network",
        "buffer.type=ReplayBuffer",
        "buffer.capacity=300",  # so that rows are overwritten
        "buffer.sampler.type=prioritised",
        "learner.learning_starts=48",
        "learner.updates_per_step=0.0625",  # three updates from one round
        "learner.epsilon_steps=1000",
        "learner.publish_interval=2",
        "train.save_interval=8",
    ),
}


def kill_learner(command):
    command.process.kill()


def kill_all(command):
    for pid in (command.process.pid, *command.services().values()):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("algorithm", "kill"), [("ppo", kill_learner), ("dqn", kill_all)])
def test_2n_updates_are_n_and_a_kill_and_n(tmp_path, algorithm, kill):
    (tmp_path / "recorded.py").write_text(RECORDED)
    options = [CARTPOLE, *settings(*ALGORITHMS[algorithm]), "--lockstep"]
    data = settings("buffer.data_dir=data") if algorithm == "dqn" else ()
    with Command("train", *options, *data, *settings("log.name=killed"), cwd=tmp_path) as command:
        latest = tmp_path / "runs" / "killed" / "1" / "checkpoints" / "latest"
        wait_until((latest / "manifest.json").exists, 120, "no checkpoint was written")
        pids = list(command.services().values())
        kill(command)
        command.process.wait()
    wait_until(lambda: not any(map(is_running, pids)), 30, "services outlive their parent")
    updates = 2 * json.loads((latest / "manifest.json").read_text())["updates"]
    assert updates > 0
    until = settings(f"train.max_epochs={updates}")
    end = {}
    for name, arguments in (
        ("killed/2", ("--resume", "runs/killed/1", "--lockstep", *until)),
        # The same again in one process: nothing depends on where the parts are.
        ("whole/1", (*options, "--launcher", "in-process", *settings("log.name=whole"), *until)),
    ):
        code, _, err = run("train", *arguments, cwd=tmp_path, timeout_s=120)
        assert code == 0, err
        folder = tmp_path / "runs" / name / "checkpoints" / "latest"
        end[name] = json.loads((folder / "manifest.json").read_text())
        end[name].pop("mean_return")  # of the episodes of this run alone
        end[name].pop("buffer_checkpoint")
    assert end["killed/2"] == end["whole/1"]  # the checksums of weights and state among it
    assert end["whole/1"]["updates"] == updates
