"""Envs that were made already, as `BaseEnv`s."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rlightning.env.base_env import BaseEnv
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.making import normalised
from rlightning.errors import ConfigError
from rlightning.utils.config import EnvConfig


def as_base_env(env: Any) -> BaseEnv:
    """Returns an env as a `BaseEnv`; one that is one already as it is.

    Args:
        env: A `gymnasium.Env`, a vector env, or a `BaseEnv`.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(env, BaseEnv):
        return env
    if isinstance(env, VectorEnv):
        if env.num_envs < 2:
            raise ConfigError("a vector env of one row: attach the env in it instead")
        return _GivenEnv(normalised(env, "the vector env"), env.num_envs)
    if isinstance(env, gym.Env):
        return _GivenEnv(env, 1)
    raise ConfigError(f"expected a gymnasium env or a BaseEnv, got {type(env).__name__}")


class _GivenEnv(GymnasiumEnv):
    """Hosts a gymnasium env that was made by somebody else."""

    def __init__(self, env: Any, rows: int) -> None:
        self._given = env
        name = type(env.unwrapped).__name__
        super().__init__(EnvConfig(name=name, backend="gymnasium", task=name, num_envs=rows))

    def _make(self, config: EnvConfig) -> Any:
        return self._given
