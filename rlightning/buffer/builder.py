"""Buffers by the name of their kind."""

from __future__ import annotations

from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.utils.config import BufferConfig
from rlightning.utils.registry import BUFFERS


def build_data_buffer(config: BufferConfig, **functions: Any) -> DataBuffer:
    """Makes the buffer that a config names; `init` readies it.

    Args:
        config: Its section of the configuration.
        **functions: Preprocessors and preprocess functions, as of `DataBuffer`.
    """
    buffer: DataBuffer = BUFFERS.get(config.type)(config, **functions)
    return buffer
