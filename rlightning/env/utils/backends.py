"""The class behind a backend's name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rlightning.errors import ConfigError
from rlightning.utils.registry import ENVS

if TYPE_CHECKING:
    from rlightning.env.base_env import BaseEnv


def backend_class(backend: str) -> type[BaseEnv]:
    """Returns the class of a backend: a key of `ENVS`, or `module:Class`.

    Raises:
        ConfigError: There is no such class, or it is no env.
    """
    from rlightning.env.base_env import BaseEnv

    if ":" not in backend:
        try:
            env_class: type[BaseEnv] = ENVS.get(backend)
        except KeyError as error:
            raise ConfigError(f"env.backend: {error.args[0]}") from None
        return env_class
    module_name, _, name = backend.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(f"env.backend '{backend}': cannot import it: {error}") from error
    if not (isinstance(target, type) and issubclass(target, BaseEnv)):
        raise ConfigError(f"env.backend '{backend}': expected a subclass of BaseEnv, got {target}")
    return target
