"""Several learners that torchrun starts, around one cluster."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from rlightning.policy.weights import parse_weights
from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, Command, is_running, run, settings

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "rlightning"),
)
# All rows of a rollout in one minibatch, so that the order of rows does not matter.
ROLLOUT = (
    *("env.num_envs=4", "buffer.rollout_length=16", "train.target_return=null"),
    *("train.max_epochs=1", "learner.epochs=8"),
)
REPLAY = (
    *("env.num_envs=4", "train.target_return=null", "train.save_interval=10"),
    *("buffer.type=ReplayBuffer", "policy.type=q_network", "learner.algorithm=dqn"),
    *("buffer.sampler.type=prioritised", "learner.learning_starts=100", "train.batch_size=16"),
    *("learner.updates_per_step=0.25", "train.max_env_steps=10000000"),
    *("buffer.tables.other.type=RolloutBuffer", "buffer.tables.all.capacity=5000"),
    "learner.table=all",
)


def test_two_ranks_train_the_same_policy_as_one_with_twice_the_batch(tmp_path):
    options = ["train", CARTPOLE, *settings(*ROLLOUT), "--lockstep", "--set"]
    two = [*options, "train.batch_size=32", *settings("log.name=two", "train.parallel=ddp")]
    code, _, err = run(*two, cwd=tmp_path, timeout_s=120, command=TORCHRUN)
    assert code == 0, err
    one = [*options, "train.batch_size=64", *settings("log.name=one"), "--launcher", "in-process"]
    code, _, err = run(*one, cwd=tmp_path, timeout_s=120)
    assert code == 0, err
    ends = [tmp_path / "runs" / name / "1" / "checkpoints" / "latest" for name in ("one", "two")]
    manifests = [json.loads((end / "manifest.json").read_text()) for end in ends]
    for key in ("updates", "rows", "env_steps"):
        assert manifests[0][key] == manifests[1][key], key
    expected, got = (parse_weights((end / "weights.safetensors").read_bytes()) for end in ends)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "runs" / "two" / "2").exists()  # one run, not one for each rank


def test_a_rank_that_dies_ends_all(tmp_path):
    options = ("train", CARTPOLE, *settings(*REPLAY))
    with Command(*options, cwd=tmp_path, command=TORCHRUN) as command:
        folder = tmp_path / "runs" / "cartpole" / "1"
        saved = folder / "checkpoints" / "latest" / "manifest.json"
        wait_until(saved.exists, 120, "no checkpoint was written")
        leader = json.loads((folder / "manifest.json").read_text())["pid"]
        ranks = [pid for pid in children(command.process.pid) if pid != leader]
        assert len(ranks) == 1
        services = children(leader)
        assert len(services) == 3
        os.kill(ranks[0], signal.SIGKILL)
        assert command.wait(60) == 1
        wait_until(lambda: not any(map(is_running, services)), 30, "services are left")
        assert "error: another rank of this learner has ended" in command.stderr
        assert f"Signal 9 (SIGKILL) received by PID {ranks[0]}" in command.stderr  # by torchrun
    assert json.loads((folder / "manifest.json").read_text())["outcome"] == "failed"


def test_ddp_without_torchrun_is_refused(tmp_path):
    code, _, err = run("train", CARTPOLE, *settings("train.parallel=ddp"), cwd=tmp_path)
    assert code == 2
    assert "train.parallel 'ddp': start it with torchrun" in err


def children(parent):
    """Process ids of the children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat[1]) == parent and stat[0] != "Z":
            found.append(int(folder.name))
    return found
