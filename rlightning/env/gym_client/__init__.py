"""Envs of an env server, as envs of other libraries: gymnasium, PettingZoo, Stable-Baselines3.

What hosts them needs `driver: external` in its config; any library then trains in them unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlightning.env.gym_client.scalar_env import RemoteEnv
from rlightning.env.gym_client.vector_env import RemoteVectorEnv

if TYPE_CHECKING:
    from rlightning.env.gym_client.parallel_env import RemoteParallelEnv
    from rlightning.env.gym_client.sb3 import RemoteVecEnv

__all__ = ["RemoteEnv", "RemoteParallelEnv", "RemoteVecEnv", "RemoteVectorEnv"]


def __getattr__(name: str) -> Any:
    # Each needs a library that the others do without.
    if name == "RemoteParallelEnv":
        from rlightning.env.gym_client.parallel_env import RemoteParallelEnv

        return RemoteParallelEnv
    if name == "RemoteVecEnv":
        from rlightning.env.gym_client.sb3 import RemoteVecEnv

        return RemoteVecEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
