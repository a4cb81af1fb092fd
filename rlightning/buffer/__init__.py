"""Buffers: what was seen and done goes in, transitions come out."""

from __future__ import annotations

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.builder import build_data_buffer
from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.utils.tensordicts import tensordict_of
from rlightning.buffer.where import Where
from rlightning.utils.config import BufferConfig, SamplerConfig, StorageConfig

__all__ = [
    "BufferConfig",
    "DataBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "SamplerConfig",
    "StorageConfig",
    "Where",
    "build_data_buffer",
    "tensordict_of",
]
