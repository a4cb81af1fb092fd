"""Envs of an env server, as envs of other libraries: gymnasium, PettingZoo, Stable-Baselines3.

What hosts them needs `driver: external` in its config; any library then trains in them unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.env.gym_client.scalar_env import RemoteEnv
from rlightning.env.gym_client.vector_env import RemoteVectorEnv
from rlightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from rlightning.env.gym_client.parallel_env import RemoteParallelEnv
    from rlightning.env.gym_client.sb3 import RemoteVecEnv

__all__ = ["RemoteEnv", "RemoteParallelEnv", "RemoteVecEnv", "RemoteVectorEnv"]

# Each needs a library that the others do without.
__getattr__ = lazy_names(__name__, {"RemoteParallelEnv": "parallel_env", "RemoteVecEnv": "sb3"})
