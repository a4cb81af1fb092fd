"""The class behind a backend's name, and its env, here or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlightning.env.utils.extras import load_named
from rlightning.errors import ConfigError
from rlightning.types import PolicyResponse
from rlightning.utils.config import EnvConfig
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
    target = getattr(load_named(module_name, f"env.backend '{backend}'"), name, None)
    if not (isinstance(target, type) and issubclass(target, BaseEnv)):
        raise ConfigError(f"env.backend '{backend}': expected a subclass of BaseEnv, got {target}")
    return target


def make_base_env(
    config: EnvConfig,
    worker_index: int | None = 0,
    preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
) -> BaseEnv:
    """Makes the env of a config, in a process of its own where `vectorization_mode` says so.

    Args:
        config: Its section; `backend` names the class.
        worker_index: Number of the env among those of its group or server.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Raises:
        ConfigError: There is no such backend, or it has no such mode; or what the class raises.
        EnvError: It could not be made.
    """
    env_class, mode = backend_class(config.backend), config.vectorization_mode
    if not env_class.vectorises:
        if mode == "vector_entry_point" or (mode == "independent" and config.num_envs > 1):
            raise ConfigError(
                f"env.vectorization_mode: {env_class.__name__} steps all its rows at once: "
                f"expected auto, sync or async, got {mode}"
            )
        if mode in ("async", "independent"):
            from rlightning.env.process_env import EnvInProcess

            env_class = EnvInProcess
    return env_class(config, worker_index, preprocess_fn)
