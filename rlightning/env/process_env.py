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
from rlightning.errors import EnvError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig


class EnvInProcess(BaseEnv):
    """Hosts the env of a config, all its rows, in a process of its own.

    The thread that steps it holds no lock of the interpreter meanwhile. Hooks and timing are those
    of this side, the `preprocess_fn` is applied on the other. A process that has ended is started
    anew at the next reset, and its env is brought as far as the one before was: `init` and
    `apply_evaluate_cfg` are called again.

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
        make = partial(backend_class(config.backend), self.config, worker_index, preprocess_fn)
        self._make = partial(_Telling, make)
        self._meta: EnvMeta | None = None  # what `init` returned
        self._finished = self._evaluates = self._closed = False
        self._start()

    def init(self) -> EnvMeta:
        """Prepares the env; returns its metadata."""
        self._meta = self._worker.call("init")
        self._take_over()
        return self.get_metadata()

    def get_metadata(self) -> EnvMeta:
        """Returns id, spaces and number of rows, as `init` did, or as far as is known before."""
        meta: EnvMeta = self._meta or self._worker.call("get_metadata")
        return replace(meta, env_id=self.env_id)

    def get_observation_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's observation."""
        return self.get_metadata().observation_space

    def get_action_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's action."""
        return self.get_metadata().action_space

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins a new episode; arguments are those of the adapter.

        Raises:
            EnvError: The env raised, its process could not be started again, or it was closed.
        """
        if self._closed:
            raise EnvError("reset of an env that is closed")
        if self._worker.has_ended:
            self._worker.close()
            self._start()
        return self._call("reset", *args, **kwargs)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the action of a response.

        Raises:
            EnvError: The env raised, or its process has ended; it must be reset.
        """
        return self._call("step", policy_resp)

    def is_finish(self) -> bool:
        """Whether the env had nothing more to do after its last reset or step."""
        return self._finished

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
        self._evaluates = True

    def restore_evaluate_cfg(self) -> None:
        """Undoes `apply_evaluate_cfg`; reset the env then."""
        self._evaluates = False
        self._worker.call("restore_evaluate_cfg")

    def close(self) -> None:
        """Closes the env and ends its process."""
        self._closed = True
        self._worker.close()

    def _start(self) -> None:
        """Starts a process, and brings its env as far as that of the one before was."""
        self._worker = start_all([self._make])[0]
        try:
            self._take_over()
            if self._meta is not None:
                self.init()
            if self._evaluates:
                self._worker.call("apply_evaluate_cfg")
        except BaseException:
            self._worker.close()  # so that the next reset starts another one
            raise

    def _take_over(self) -> None:
        for name in ("max_episode_steps", "num_envs", "row_seeds"):
            setattr(self, name, self._worker.get_env_attr(name))

    def _call(self, command: str, *args: Any, **kwargs: Any) -> EnvRet:
        env_ret: EnvRet
        env_ret, self._finished = self._worker.call(command, *args, **kwargs)
        env_ret.env_id = self.env_id
        return env_ret


class _Telling:
    """The env, in its process: tells with each return whether it has finished."""

    def __init__(self, make: Callable[[], BaseEnv]) -> None:
        self._env = make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, *args: Any, **kwargs: Any) -> tuple[EnvRet, bool]:
        env_ret = self._env.reset(*args, **kwargs)
        return env_ret, bool(self._env.is_finish())

    def step(self, policy_resp: PolicyResponse) -> tuple[EnvRet, bool]:
        env_ret = self._env.step(policy_resp)
        return env_ret, bool(self._env.is_finish())
