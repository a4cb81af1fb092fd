"""What a policy and a buffer must know of an env."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym


@dataclass
class EnvMeta:
    """Spaces and size of an env.

    A multi-agent env gives a dict of spaces by agent in place of a space.
    """

    _fields: ClassVar[tuple[str, ...]] = (
        "env_id",
        "action_space",
        "observation_space",
        "num_envs",
    )

    env_id: str | None = None
    """Id of the env, or of its group of rows."""
    action_space: gym.Space[Any] | dict[str, gym.Space[Any]] | None = None
    """Space of one row's action."""
    observation_space: gym.Space[Any] | dict[str, gym.Space[Any]] | None = None
    """Space of one row's observation."""
    num_envs: int | None = None
    """Number of rows stepped together."""
    lossy: tuple[str, ...] = ()
    """Keys of the observation, joined by dots, of pictures that are not bit for bit what the env
    gave, since its client shrinks or compresses them; `observation` for the whole of it."""
