"""Envs of several agents seen as a team: one space, one return, one end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.types import EnvRet


def one_space(space: Any) -> gym.Space[Any] | None:
    """Returns a space, or spaces by agent as one of dicts by agent; None if it is neither."""
    if isinstance(space, gym.Space):
        return space
    return gym.spaces.Dict(dict(space)) if isinstance(space, Mapping) and space else None


def team_outcome(
    reward: Any, terminated: Any, truncated: Any
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Returns reward and flags of rows: the sum over agents, and an end where all have ended.

    Args:
        reward: float32 [rows], or a dict of them by agent.
        terminated: bool [rows], or a dict of them by agent; an agent that has left keeps its flag.
        truncated: Likewise.

    Returns:
        Arrays [rows]. An end counts as truncated where the env cut any agent off.
    """
    if not isinstance(reward, Mapping):
        return reward, terminated, truncated
    total: npt.NDArray[np.float32] = np.stack(list(reward.values())).sum(axis=0, dtype=np.float32)
    cut = np.stack(list(truncated.values()))
    ended = (np.stack(list(terminated.values())) | cut).all(axis=0)
    return total, ended & ~cut.any(axis=0), ended & cut.any(axis=0)


def has_ended(env_ret: EnvRet) -> bool:
    """Returns whether the last step of a scalar env ended its episode: for each of its agents."""
    terminated, truncated = env_ret.last_terminated, env_ret.last_truncated
    if isinstance(terminated, Mapping):
        return all(terminated[agent] or truncated[agent] for agent in terminated)
    return bool(terminated or truncated)
