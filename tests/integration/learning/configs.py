"""Configs of small trainings on Reach."""

from rlightning.utils.config import MainConfig

HERE = "tests.integration.learning.reach"
REPLAY = {"type": "ReplayBuffer"}
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


def make_config(algorithm, folder, **train):
    task, policy, buffer, learner = ALGORITHMS[algorithm]
    usual = {"gamma": 0.9, "learning_starts": 128, "max_lead": 64, "publish_interval": 8}
    steps = {"max_env_steps": 30_000, "target_return": -1.2, "target_episodes": 40}
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
            "train": {**steps, "batch_size": 64, "lr": 3e-3, **train},
            "learner": {"algorithm": algorithm, **usual, **learner},
            "log": {"log_dir": str(folder), "backend": "none"},
        }
    )
