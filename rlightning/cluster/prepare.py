"""Fills in what a config leaves to the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig


def prepare(config: MainConfig) -> MainConfig:
    """Returns a copy in which every seed has a value, derived from `train.seed`.

    Raises:
        ConfigError: There is no env.
    """
    if not config.env:
        raise ConfigError("the config has no env; add a section 'env'")
    prepared = config.model_copy(deep=True)
    seeds = np.random.SeedSequence(config.train.seed).generate_state(1 + len(config.env))
    # Simulators and torch take what fits a signed 32-bit integer.
    policy_seed, *env_seeds = (int(seed) >> 1 for seed in seeds)
    if prepared.policy.seed is None:
        prepared.policy.seed = policy_seed
    for env, seed in zip(prepared.env, env_seeds, strict=True):
        if env.seed is None:
            env.seed = seed
    return prepared


def own_state(config: MainConfig, run: Path) -> None:
    """Lets published weights outlive the policy server: in the run's folder, unless told otherwise.

    A config that was saved by another run names that run's folder, which stays that run's own.
    """
    state_dir = config.policy.state_dir
    if state_dir is None or (Path(state_dir).parent / "manifest.json").exists():
        config.policy.state_dir = str(run / "policy")
