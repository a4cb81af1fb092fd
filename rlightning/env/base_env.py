"""The base class of every env."""

# ruff: noqa: B027 - the hooks that do nothing here are for a subclass to override or not

from __future__ import annotations

import logging
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlightning.env.utils.options import check_extras
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import ConfigError
from rlightning.latency import LatencyStats
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.conversions import map_leaves
from rlightning.utils.utils import InternalFlag

logger = logging.getLogger(__name__)


class BaseEnv(ABC):
    """An env, or a fixed number of rows of one env that are stepped together.

    A subclass sets `env` (or overrides the two space getters), and implements `reset` and `step`.
    An env of one row returns a plain observation, a number and two flags, and is reset by whoever
    steps it. An env of several rows returns leaves with the leading dimension `num_envs`, resets a
    row in the step that ends its episode, and then puts `final_rows` and `final_observation` into
    `info` (see `EnvRet`).

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group or server; None counts as 0.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Attributes:
        config: The section of the config.
        env_id: Unique id, `<uuid4>-<worker_index>`.
        worker_index: The number given.
        env: The gymnasium env or vector env beneath, if there is one.
        num_envs: Rows.
        max_episode_steps: Steps after which an episode is truncated; None: the env's own limit.
        row_seeds: Seeds of the rows at their first reset; None if they had none.
        timing_raw: `{"count", "total", "avg"}` in seconds of each timed operation: `reset`, `step`,
            and `transition_policy_to_env` if the flag DEBUG was set when the env was made.
        latency: The same durations, of the last minute, with percentiles.
        option_names: Keys that its section may have beside those of `EnvConfig`, for a subclass to
            override; None: any, as it reads them itself.
        vectorises: Whether it heeds `config.vectorization_mode`, for a subclass to override; what
            does not is hosted with `async` as a whole, in a process that may have no children.

    Raises:
        ConfigError: The section has another key.
    """

    option_names: ClassVar[Collection[str] | None] = None
    vectorises: ClassVar[bool] = False

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        check_extras(config, self.option_names, type(self).__name__)
        self.config = config.model_copy(deep=True)
        self.worker_index = worker_index or 0
        self.env_id = f"{uuid.uuid4()}-{self.worker_index}"
        self.env: Any = None
        self.num_envs = config.num_envs
        self.max_episode_steps = config.max_episode_steps
        self.row_seeds: list[int] | None = None
        self.timing_raw: dict[str, dict[str, float]] = {}
        self.latency = LatencyStats()
        self._preprocess_fn = preprocess_fn or default_env_preprocess_fn
        self._debug = InternalFlag.DEBUG
        self._episode_stats: dict[str, list[float]] = {}

    def init(self) -> EnvMeta:
        """Prepares the env for its first reset; returns its metadata."""
        return self.get_metadata()

    @abstractmethod
    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins a new episode.

        Returns:
            The first observation; reward and flags are zero.
        """

    @abstractmethod
    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the action of a response.

        Returns:
            The observation after it, with the reward and flags of this step.
        """

    def step_async(self, policy_resp_list: list[PolicyResponse]) -> None:
        """Only env servers step this way; `EnvGroup.step_async` does so for every env.

        Raises:
            NotImplementedError: Always, here.
        """
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous step of its own")

    def collect_async(self) -> list[EnvRet]:
        """Only env servers step this way; `EnvGroup.collect_async` does so for every env.

        Raises:
            NotImplementedError: Always, here.
        """
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous step of its own")

    def get_env_id(self) -> str:
        """Returns the unique id."""
        return self.env_id

    def get_max_episode_steps(self) -> int | None:
        """Returns the configured limit of an episode's steps."""
        return self.max_episode_steps

    def get_observation_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's observation; None without an env beneath."""
        return _space_of(self.env, "observation_space")

    def get_action_space(self) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
        """Returns the space of one row's action; None without an env beneath."""
        return _space_of(self.env, "action_space")

    def get_metadata(self) -> EnvMeta:
        """Returns id, spaces and number of rows."""
        return EnvMeta(
            env_id=self.env_id,
            action_space=self.get_action_space(),
            observation_space=self.get_observation_space(),
            num_envs=self.num_envs,
        )

    def get_env_stats(self, reset: bool = False) -> dict[str, list[float]]:
        """Returns statistics of finished episodes: what came in `info["episode_info"]`.

        Args:
            reset: Begin again from nothing.

        Returns:
            For each key `[sum, count]`.
        """
        stats = {key: list(pair) for key, pair in self._episode_stats.items()}
        if reset:
            self._episode_stats.clear()
        return stats

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long resets and steps took, in all and in the last minute, at level DEBUG.

        Args:
            reset: Begin again from nothing.
        """
        for name, timing in self.timing_raw.items():
            logger.debug(
                "%s %s: count %d, total %.3f s, average %.6f s; last minute: %s",
                self.env_id,
                name,
                timing["count"],
                timing["total"],
                timing["avg"],
                self.latency[name].summary(),
            )
        if reset:
            self.timing_raw = {}
            self.latency.clear()

    def is_finish(self) -> bool:
        """Whether the env has nothing more to do; to override."""
        return False

    def finish_rollout(self) -> None:
        """Called at the end of a rollout; to override."""

    def offload(self) -> None:
        """Frees device memory; to override."""

    def reload(self) -> None:
        """Takes device memory again; to override."""

    def apply_evaluate_cfg(self) -> None:
        """Applies `config.evaluate_cfg`; to override. A reset must follow.

        Raises:
            ConfigError: There is one, and the class does not override this.
        """
        if self.config.evaluate_cfg is not None:
            raise ConfigError(
                f"env.evaluate_cfg: {type(self).__name__} cannot change its env for an evaluation; "
                "override apply_evaluate_cfg and restore_evaluate_cfg, or leave evaluate_cfg out"
            )

    def restore_evaluate_cfg(self) -> None:
        """Undoes `apply_evaluate_cfg`; to override. A reset must follow."""

    def close(self) -> None:
        """Frees what the env holds; to override."""

    def _reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Resets with hooks and timing; what groups and servers call."""
        start = time.perf_counter()
        env_ret = self.reset(*args, **kwargs)
        self._record_timing("reset", time.perf_counter() - start)
        return self._after(env_ret)

    def _step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Steps with hooks and timing; what groups and servers call."""
        policy_resp = self._before(policy_resp)
        start = time.perf_counter()
        env_ret = self.step(policy_resp)
        self._record_timing("step", time.perf_counter() - start)
        return self._after(env_ret)

    def _before(self, policy_resp: PolicyResponse) -> PolicyResponse:
        """Brings tensors to the CPU, in a copy: the caller keeps its response as it was."""
        taken = policy_resp.corrected_latency() if self._debug else None
        if taken is not None:
            self._record_timing("transition_policy_to_env", *taken)
        torch = sys.modules.get("torch")
        if torch is None:  # nothing in the response can be a tensor
            return policy_resp
        response = policy_resp.copy()
        for name, value in policy_resp.to_dict().items():
            moved = map_leaves(
                lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value
            )
            setattr(response, name, moved)
        return response

    def _after(self, env_ret: EnvRet) -> EnvRet:
        episode_info = env_ret.info.get("episode_info")
        if episode_info:
            self._record_episodes(episode_info)
        if "torch" in sys.modules and InternalFlag.REMOTE_STORAGE:
            env_ret = env_ret.numpy()
        return env_ret.mark_env_sent()

    def _record_episodes(self, episode_info: dict[str, Any]) -> None:
        for key, value in episode_info.items():
            values = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
            if values.dtype.kind not in "biuf":
                continue
            pair = self._episode_stats.setdefault(key, [0.0, 0])
            pair[0] += float(values.sum(dtype=np.float64))
            pair[1] += values.size

    def _record_timing(self, name: str, seconds: float, uncertainty_s: float = 0.0) -> None:
        timing = self.timing_raw.get(name)
        if timing is None:
            timing = self.timing_raw[name] = {"count": 0, "total": 0.0, "avg": 0.0}
        self.latency.record(name, seconds, uncertainty_s)
        timing["count"] += 1
        timing["total"] += seconds
        timing["avg"] = timing["total"] / timing["count"]


def _space_of(env: Any, name: str) -> gym.Space[Any] | dict[str, gym.Space[Any]] | None:
    """Returns the space of one row: a vector env tells it from that of all rows."""
    single = getattr(env, f"single_{name}", None)
    space: gym.Space[Any] | None = getattr(env, name, None) if single is None else single
    return space
