"""A buffer in the process, and a lone env whose steps say which they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer
from rlightning.types import EnvRet, PolicyResponse


def replay(metas: Any = None, **config: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(BufferConfig(**{"type": "ReplayBuffer", "capacity": 100, **config}))
    buffer.init(metas)
    return buffer


def step(t: int, *, done: bool = False, env_id: str = "env") -> tuple[EnvRet, PolicyResponse]:
    """Step t of a lone env: observation t, reward t, action 10 t."""
    env_ret = EnvRet(env_id, np.full(3, t, np.float32), float(t), done, False)
    return env_ret, PolicyResponse(env_id, action=np.int64(10 * t), value=np.float32(t))


def add(buffer: DataBuffer, steps: int, *, ends: bool = False, env_id: str = "env") -> None:
    for t in range(steps):
        buffer.add_transition(env_id, *step(t, done=ends and t == steps - 1, env_id=env_id))
