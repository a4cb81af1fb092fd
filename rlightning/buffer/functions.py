"""The preprocess and postprocess functions that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlightning.errors import ConfigError
from rlightning.utils.config import FunctionsConfig


def load_functions(config: FunctionsConfig) -> dict[str, Callable[..., Any]]:
    """Returns the functions that are named, as arguments of `DataBuffer`.

    Raises:
        ConfigError: One cannot be imported, or is no function; the message names the key.
    """
    named = ((key, getattr(config, key)) for key in FunctionsConfig.model_fields)
    return {key: _load(f"buffer.functions.{key}", name) for key, name in named if name is not None}


def _load(key: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{key}: expected module:function, got {name!r}")
    try:
        found: Any = getattr(import_module(module_name), function_name)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: '{name}' cannot be loaded: {reason}") from error
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{key}: '{name}' is no function but {found!r:.80}")
    function: Callable[..., Any] = found
    return function
