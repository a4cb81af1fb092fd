"""Buffers by the name of their kind."""

from __future__ import annotations

from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.utils.postprocess import n_step_postprocess_fn
from rlightning.utils.config import BufferConfig
from rlightning.utils.registry import BUFFERS


def build_data_buffer(config: BufferConfig, **functions: Any) -> DataBuffer:
    """Makes the buffer that a config names; `init` readies it.

    Args:
        config: Its section of the configuration.
        **functions: Preprocessors and preprocess functions, as of `DataBuffer`.
    """
    if config.n_step > 1 and config.type == "ReplayBuffer":
        functions = {
            "postprocess_fn": n_step_postprocess_fn(config.n_step, config.n_step_gamma),
            **functions,
        }
    buffer: DataBuffer = BUFFERS.get(config.type)(config, **functions)
    return buffer
