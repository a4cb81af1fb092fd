"""An env of any adapter in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.backends import backend_class
from rlightning.env.utils.venv import start_all
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig


class EnvInProcess(BaseEnv):
    """Hosts the env of a config, all its rows, in a process of its own.

    The thread that steps it holds no lock of the interpreter meanwhile. Hooks and timing are those
    of this side, the `preprocess_fn` is applied on the other. A process that has ended is started
    anew at the next reset.

    Args:
        config: As of the adapter that `config.backend` names; copied.
        worker_index: As of that adapter.
        preprocess_fn: As of that adapter; has to be picklable, by cloudpickle.

    Raises:
        ConfigError: As that adapter.
        EnvError: It could not be made, or the process ended.
    """

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        self._make = partial(
            backend_class(config.backend), self.config, worker_index, preprocess_fn
        )
        self._is_ready = False
        self._start()

    def init(self) -> EnvMeta:
        """Prepares the env; returns its metadata."""
        meta: EnvMeta = self._worker.call("init")
        self._is_ready = True
        self._meta = replace(meta, env_id=self.env_id)
        return self._meta

    def get_observation_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's observation."""
        return self._meta.observation_space

    def get_action_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's action."""
        return self._meta.action_space

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins a new episode; arguments are those of the adapter."""
        if self._worker.has_ended:
            self._worker.close()
            self._start()
            if self._is_ready:
                self.init()
        return self._named(self._worker.call("reset", *args, **kwargs))

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the action of a response.

        Raises:
            EnvError: The env raised, or its process has ended; it must be reset.
        """
        return self._named(self._worker.call("step", policy_resp))

    def is_finish(self) -> bool:
        """Whether the env has nothing more to do."""
        return bool(self._worker.call("is_finish"))

    def finish_rollout(self) -> None:
        """Tells the env that a rollout has ended."""
        self._worker.call("finish_rollout")

    def offload(self) -> None:
        """Lets the env free its device memory."""
        self._worker.call("offload")

    def reload(self) -> None:
        """Lets the env take its device memory again."""
        self._worker.call("reload")

    def apply_evaluate_cfg(self) -> None:
        """Applies `config.evaluate_cfg`; reset the env then."""
        self._worker.call("apply_evaluate_cfg")

    def restore_evaluate_cfg(self) -> None:
        """Undoes `apply_evaluate_cfg`; reset the env then."""
        self._worker.call("restore_evaluate_cfg")

    def close(self) -> None:
        """Closes the env and ends its process."""
        self._worker.close()

    def _start(self) -> None:
        self._worker = start_all([self._make])[0]
        meta: EnvMeta = self._worker.call("get_metadata")
        self._meta = replace(meta, env_id=self.env_id)
        self.row_seeds = self._worker.get_env_attr("row_seeds")

    def _named(self, env_ret: EnvRet) -> EnvRet:
        env_ret.env_id = self.env_id
        return env_ret
