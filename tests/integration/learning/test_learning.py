"""Every algorithm learns, through the actor loop, the batcher and the buffer of this process."""

import json
from pathlib import Path

import pytest

from rlightning.cluster.train import train
from rlightning.utils.config import MainConfig, load_config
from tests.e2e.command import ROOT

pytestmark = pytest.mark.timeout(180)

HERE = "tests.integration.learning.reach"
REPLAY = {"type": "ReplayBuffer", "capacity": 10_000}
ALGORITHMS = {
    "ppo": ("Reach-v0", "actor_critic", {"type": "RolloutBuffer", "rollout_length": 16}, {}),
    "vtrace": (
        "Reach-v0",
        "actor_critic",
        {"type": "RolloutBuffer", "rollout_length": 16, "max_rollouts": 4},
        {},
    ),
    "dqn": (
        "Reach-v0",
        "q_network",
        {**REPLAY, "sampler": {"type": "prioritised"}, "n_step": 2, "n_step_gamma": 0.9},
        {"epsilon_steps": 1000, "updates_per_step": 0.25, "max_grad_norm": 10.0, "tau": 0.05},
    ),
    "sac": (
        "ReachBox-v0",
        "sac_actor",
        REPLAY,
        {"updates_per_step": 0.25, "alpha_init": 0.1, "tau": 0.05},
    ),
}


def make_config(algorithm, tmp_path, **train):
    task, policy, buffer, learner = ALGORITHMS[algorithm]
    return MainConfig.from_dict(
        {
            "env": {
                "name": "reach",
                "backend": "gymnasium",
                "task": f"{HERE}:{task}",
                "num_envs": 8,
            },
            "policy": {"type": policy, "model_cfg": {"hidden": [32], "activation": "relu"}},
            "buffer": {"capacity": 10_000, **buffer},
            "train": {
                "max_env_steps": 30_000,
                "target_return": -1.2,
                "target_episodes": 40,
                "batch_size": 64,
                "lr": 3e-3,
                **train,
            },
            "learner": {
                "algorithm": algorithm,
                "gamma": 0.9,
                "learning_starts": 128,
                "max_lead": 64,
                "publish_interval": 8,
                **learner,
            },
            "log": {"log_dir": str(tmp_path), "backend": "none"},
        }
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_learns(algorithm, tmp_path):
    assert train(make_config(algorithm, tmp_path), in_process=True, quiet=True)
    run = tmp_path / "reach" / "1"
    end = json.loads((run / "manifest.json").read_text())["summary"]
    # The mean of the last episodes, exploration included.
    assert end["mean_return"] >= -1.2
    assert (run / "checkpoints" / "latest" / "learner.safetensors").exists()


@pytest.mark.parametrize("algorithm", ["policy", "ppo"])
def test_the_custom_policy_learns_with_its_own_loss_and_with_ppo(algorithm, tmp_path, monkeypatch):
    example = ROOT / "examples" / "custom_policy"
    monkeypatch.syspath_prepend(str(example))
    overrides = [f"learner.algorithm={algorithm}", f"log.log_dir={tmp_path}", "log.backend=none"]
    config = load_config(Path(example) / "config.yaml", [*overrides, "train.target_return=60"])
    assert train(config, in_process=True, quiet=True)
