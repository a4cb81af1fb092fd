"""An env of one row as a group of rows that resets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.agents import has_ended, one_space
from rlightning.env.utils.spaces import stack
from rlightning.errors import EnvError
from rlightning.rpc.activity import Activity
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.conversions import map_leaves


class ScalarRow:
    """Gives the returns of a scalar env the leading dimension 1 and resets it when it has ended.

    So whoever steps groups need not know of scalar envs.

    Args:
        env: Has one row, and leaves its reset to the caller.
        activity: Is told of the resets at the end of episodes, which may take long.

    Raises:
        EnvError: It does not say its spaces.
    """

    def __init__(self, env: BaseEnv, activity: Activity) -> None:
        self._env = env
        self._activity = activity
        space = one_space(env.get_observation_space())
        if space is None:
            raise EnvError(f"env {env.env_id!r}: expected an observation space, got none")
        self._space = space

    def reset(self, **kwargs: Any) -> EnvRet:
        """Begins a new episode."""
        env_ret = self._env._reset(**kwargs)
        return self._row(env_ret, env_ret, _with_row(env_ret.info))

    def step(self, response: PolicyResponse, autoreset: bool = True) -> EnvRet:
        """Executes the only row of a response; begins a new episode if it ended one.

        Args:
            response: Leaves have the leading dimension 1.
            autoreset: False leaves the reset to the caller.
        """
        one = response.copy()
        one.action = map_leaves(lambda leaf: leaf[0], response.action)
        env_ret = self._env._step(one)
        if not (autoreset and has_ended(env_ret)):
            return self._row(env_ret, env_ret, _with_row(env_ret.info))
        with self._activity.resetting():
            first = self._env._reset()
        info, final_info = _with_row(first.info), _with_row(env_ret.info)
        if "episode_info" in final_info:
            info["episode_info"] = final_info.pop("episode_info")
        info["final_rows"] = np.zeros(1, np.int32)
        info["final_observation"] = stack(self._space, [env_ret.observation])
        if final_info:
            info["final_info"] = final_info
        return self._row(env_ret, first, info)

    def _row(self, env_ret: EnvRet, seen: EnvRet, info: dict[str, Any]) -> EnvRet:
        """Returns an EnvRet of one row: the outcome of one, the observation of another."""
        executed, source = env_ret.executed_action, env_ret.action_source
        return type(env_ret)(
            env_ret.env_id,
            stack(self._space, [seen.observation]),
            _row_of(env_ret.last_reward, np.float64),
            _row_of(env_ret.last_terminated, np.bool_),
            _row_of(env_ret.last_truncated, np.bool_),
            info,
            _with_row(env_ret._extra),
            env_ret.ts_env_sent_ns,
            executed_action=None if executed is None else _with_row(executed),
            action_source=None if source is None else np.array([source], np.int8),
            ts_observed_ns=seen.ts_observed_ns,
        )


def _row_of(value: Any, dtype: type[Any]) -> Any:
    """Returns a reward or flag, or a dict of them by agent, as arrays [1]."""
    if isinstance(value, Mapping):
        return {agent: np.array([one], dtype) for agent, one in value.items()}
    return np.array([value], dtype)


def _with_row(data: Any) -> Any:
    """Gives every number and array of a nesting the leading dimension 1."""
    return map_leaves(
        lambda leaf: (
            np.asarray(leaf)[None]
            if isinstance(leaf, (np.ndarray, np.generic, bool, int, float))
            else leaf
        ),
        data,
    )
