"""Makes the learner that a config asks for."""

from __future__ import annotations

import torch

from rlightning.errors import ConfigError
from rlightning.learner.ppo import PPO, ActorCritic
from rlightning.policy import build_policy
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig


def build_learner(config: MainConfig, env_meta: EnvMeta) -> PPO:
    """Returns the algorithm with a policy to train, its weights drawn from `policy.seed`.

    Sets the number of torch's threads in this process.

    Args:
        config: Config of the run.
        env_meta: Spaces of the envs.

    Raises:
        ConfigError: The policy cannot be made, or the algorithm cannot train it.
    """
    torch.set_num_threads(config.learner.torch_threads)
    policy = build_policy(config.policy, "train")
    policy.init_train(config.train, env_meta)
    if not isinstance(policy, ActorCritic):
        raise ConfigError(
            f"learner.algorithm 'ppo' cannot train policy.type '{config.policy.type}': it needs "
            "the modules 'actor' and 'critic' and a method 'distribution', as ActorCriticPolicy has"
        )
    return PPO(policy, config.learner, config.train, seed=config.train.seed)
