"""Buffers by the name of their kind."""

from __future__ import annotations

from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.functions import load_functions
from rlightning.buffer.utils.postprocess import n_step_postprocess_fn
from rlightning.errors import ConfigError
from rlightning.utils.config import BufferConfig
from rlightning.utils.registry import BUFFERS


def build_data_buffer(buffer_type: str, config: BufferConfig, **functions: Any) -> DataBuffer:
    """Makes a buffer of a kind; `init` readies it.

    Args:
        buffer_type: As `buffer.type`, or another name that is registered in `BUFFERS`.
        config: Its section of the configuration.
        **functions: Preprocessors and preprocess functions, as of `DataBuffer`; they come before
            those that `functions` of the section names.

    Raises:
        KeyError: No buffer is registered under that name.
        ConfigError: A function that is named cannot be imported, or does what `n_step` does.
    """
    named = load_functions(config.functions)
    if config.n_step > 1 and config.type == "ReplayBuffer":
        if "postprocess_fn" in named:
            raise ConfigError("buffer.n_step and buffer.functions.postprocess_fn: expected one")
        named["postprocess_fn"] = n_step_postprocess_fn(config.n_step, config.n_step_gamma)
    buffer: DataBuffer = BUFFERS.get(buffer_type)(config, **{**named, **functions})
    return buffer
