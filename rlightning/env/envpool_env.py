"""Envs of envpool, stepped in threads of C++; needs the extra `envpool`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gymnasium.vector import VectorWrapper

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.making import call_maker, normalised
from rlightning.errors import ConfigError
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS


@ENVS.register("envpool")
class EnvPoolEnv(GymnasiumEnv):
    """Hosts rows of an env of envpool: `config.task` is its id, such as `Pong-v5`.

    `env_kwargs` are the options that `envpool.make` takes for it, such as `stack_num` and
    `num_threads`; `config.max_episode_steps` is one of them. Rows are 2 or more. A row that has
    ended is reset in the next step of all, and shown no more until then (`EnvRet.rows`). All rows
    have one generator. For everything else see `GymnasiumEnv`.
    """

    def _make(self, config: EnvConfig) -> Any:
        library = load_extra("envpool", extra="envpool", backend="envpool")
        if config.vectorization_mode not in ("auto", "vector_entry_point"):
            raise ConfigError(
                "env.vectorization_mode: envpool steps its rows itself: expected auto, got "
                f"{config.vectorization_mode}"
            )
        if config.num_envs < 2:
            raise ConfigError("env.num_envs: backend 'envpool' takes 2 rows or more, got 1")
        known = library.list_all_envs()
        if config.task not in known:
            near = difflib.get_close_matches(config.task, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"env.task '{config.task}': envpool has no such env{hint}")
        kwargs: dict[str, Any] = config.env_kwargs.to_dict()
        if config.max_episode_steps is not None:
            kwargs["max_episode_steps"] = config.max_episode_steps
        make = partial(library.make, config.task, env_type="gymnasium", num_envs=config.num_envs)
        pool = _Seeded(partial(call_maker, config, make), kwargs)
        return normalised(pool, f"env.task '{config.task}'")


class _Seeded(VectorWrapper):
    """A pool that is made anew for a seed, which envpool takes at no other time.

    Args:
        make: Makes it, given its options.
        kwargs: The options.
    """

    def __init__(self, make: Callable[[dict[str, Any]], Any], kwargs: dict[str, Any]) -> None:
        super().__init__(make(kwargs))
        self._remake = make
        self._kwargs = kwargs

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode in every row.

        Raises:
            ConfigError: There are options, which envpool does not take.
        """
        if options:
            raise ConfigError(f"reset: envpool takes no options, got {sorted(options)}")
        if seed is not None:
            self.env.close()
            self.env = self._remake({**self._kwargs, "seed": seed})
        outcome: tuple[Any, dict[str, Any]] = self.env.reset()
        return outcome
