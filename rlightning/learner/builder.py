"""Makes the learner that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from rlightning.errors import ConfigError, RLightningError
from rlightning.learner.dqn import DQN, QNetwork
from rlightning.learner.loop import Algorithm
from rlightning.learner.own_loss import OwnLoss
from rlightning.learner.ppo import PPO, ActorCritic
from rlightning.learner.random_stream import RandomStream
from rlightning.learner.ranks import ALONE, Ranks
from rlightning.learner.recurrent_ppo import RecurrentActorCritic, RecurrentPPO
from rlightning.learner.replay_loop import ReplayAlgorithm
from rlightning.learner.sac import SAC, SquashedActorCritics
from rlightning.learner.vtrace import VTracePPO
from rlightning.policy import BasePolicy, build_policy
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig

# What makes each algorithm, what it asks of a policy, and how to say that.
_ALGORITHMS: dict[str, tuple[Callable[..., Algorithm], type, str]] = {
    "ppo": (
        PPO,
        ActorCritic,
        "the modules 'actor' and 'critic' and a method 'distribution', as ActorCriticPolicy has",
    ),
    "vtrace": (
        VTracePPO,
        ActorCritic,
        "the modules 'actor' and 'critic' and a method 'distribution', as ActorCriticPolicy has",
    ),
    "dqn": (
        DQN,
        QNetwork,
        "the module 'q_network' and the tensor 'epsilon', as QNetworkPolicy has",
    ),
    "sac": (
        SAC,
        SquashedActorCritics,
        "the modules 'actor' and 'critics' and a method 'gaussian', as SACActorPolicy has",
    ),
    "policy": (OwnLoss, BasePolicy, "the methods 'update_dataset' and 'train'"),
}


def build_learner(config: MainConfig, env_meta: EnvMeta, ranks: Ranks = ALONE) -> Algorithm:
    """Returns the algorithm with a policy to train, its weights drawn from `policy.seed`.

    Sets the number of torch's threads in this process.

    Args:
        config: Config of the run.
        env_meta: Spaces of the envs.
        ranks: The learners of the run, of which this is one.

    Raises:
        ConfigError: The policy cannot be made, or the algorithm cannot train it.
    """
    torch.set_num_threads(config.learner.torch_threads)
    device = ranks.device(config.policy.device)
    policy = build_policy(config.policy.model_copy(update={"device": device}), "train")
    # Networks of the user's own draw from the global generator: they begin with the same weights in
    # every process, too.
    with RandomStream(config.policy.seed or 0, policy.device)():
        policy.init_train(config.train, env_meta)
    name = config.learner.algorithm
    if ":" in name:
        make = _find(name)
    else:
        make, needs, has = _ALGORITHMS[name]
        own = type(policy)
        trains_itself = (
            own.update_dataset is not BasePolicy.update_dataset
            and own.train is not BasePolicy.train
        )
        if not isinstance(policy, needs) or (name == "policy" and not trains_itself):
            raise ConfigError(
                f"learner.algorithm '{name}' cannot train policy.type '{config.policy.type}': it "
                f"needs {has}"
            )
        if name != "policy" and policy.initial_state(1) is not None:
            make = _recurrent(name, policy, config)
    try:
        algorithm: Algorithm = make(
            policy, config.learner, config.train, seed=_seed(config.train.seed, ranks)
        )
    except RLightningError:
        raise
    except Exception as error:
        if ":" not in name:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"learner.algorithm '{name}' failed: {reason}") from error
    replays = config.sampled.type == "ReplayBuffer"
    if not isinstance(algorithm, ReplayAlgorithm if replays else Algorithm):
        methods = "update, weights, state and restore" + (", explore, priorities" * replays)
        raise ConfigError(f"learner.algorithm '{name}' made {algorithm!r}, which lacks {methods}")
    if ranks.world_size > 1:
        if not hasattr(algorithm, "ranks"):
            raise ConfigError(
                f"learner.algorithm '{name}' made {algorithm!r}, which has no attribute 'ranks': "
                "it learns alone"
            )
        algorithm.ranks = ranks
    return algorithm


def _recurrent(name: str, policy: BasePolicy, config: MainConfig) -> Callable[..., Algorithm]:
    """Returns what trains a policy that keeps state."""
    if name != "ppo" or not isinstance(policy, RecurrentActorCritic):
        raise ConfigError(
            f"learner.algorithm '{name}' cannot train policy.type '{config.policy.type}': it looks "
            "at single steps, and the policy remembers (initial_state); 'ppo' trains one with a "
            "module 'memory', as RecurrentActorCriticPolicy has, and 'policy' any"
        )
    if not config.policy.store_state:
        raise ConfigError(
            f"policy.store_state must be true to train policy.type '{config.policy.type}': "
            "sequences begin with the state that was stored"
        )
    return RecurrentPPO


def _seed(seed: int, ranks: Ranks) -> int:
    """Returns the seed of what an algorithm draws: each rank draws for its own rows."""
    if ranks.rank == 0:
        return seed
    return int(np.random.SeedSequence([seed, ranks.rank]).generate_state(1)[0])


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    try:
        found = getattr(import_module(module_name), function)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"learner.algorithm '{name}' cannot be loaded: {reason}") from error
    if not callable(found):
        raise ConfigError(f"learner.algorithm '{name}' cannot be called")
    made: Callable[..., Any] = found
    return made
