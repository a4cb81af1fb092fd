"""Learners on replayed transitions, and the transitions."""

import gymnasium as gym
import numpy as np

from rlightning.learner import build_learner
from rlightning.learner.state_file import dump_state, load_state
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig

VECTOR = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
B = 32


def make_learner(algorithm, action, *, seed=0, observation=VECTOR, policy=None, **learner):
    config = MainConfig.from_dict(
        {
            "policy": {
                "type": {"dqn": "q_network", "sac": "sac_actor"}[algorithm],
                "seed": 1,
                "device": "cpu",
                "model_cfg": {"hidden": [16], "activation": "relu"},
                **(policy or {}),
            },
            "buffer": {"type": "ReplayBuffer", "capacity": 100},
            "train": {"seed": seed, "lr": 0.01},
            "learner": {"algorithm": algorithm, **learner},
        }
    )
    return build_learner(config, EnvMeta("env", action, observation, B))


def make_columns(action, rng=0, **overrides):
    rng = np.random.default_rng(rng)
    flags = np.zeros(B, bool)
    return {
        "observation": rng.uniform(-1, 1, (B, 3)).astype(np.float32),
        "next_observation": rng.uniform(-1, 1, (B, 3)).astype(np.float32),
        "action": action,
        "reward": rng.normal(size=B).astype(np.float32),
        "terminated": flags.copy(),
        "truncated": flags.copy(),
        "cut": flags.copy(),
        **overrides,
    }


def copy_of(learner, make):
    """A new learner that goes on from a file with the state of another."""
    other = make()
    other.restore(load_state(dump_state(learner.state())))
    return other
