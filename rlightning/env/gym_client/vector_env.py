"""Remote envs as a `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlightning.env.gym_client.connection import Connection
from rlightning.env.gym_client.rows import join_rows, slice_rows, vector_info
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig

_Step = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]


class RemoteVectorEnv(VectorEnv[Any, Any, Any]):
    """Rows of an env server, stepped together from here.

    ```python
    envs = RemoteVectorEnv("127.0.0.1:50051")
    observations, infos = envs.reset(seed=1)
    ```

    All rows of an env (`num_envs` in its config) cost one message and one answer in each step;
    several envs with the same spaces are stepped at the same time. A row is reset in the step that
    ends its episode (`AutoresetMode.SAME_STEP`): its last observation and info are in
    `infos["final_obs"]` and `infos["final_info"]`. Rewards are float64 and, of an env of several
    rows, have the precision of float32. All else is as for `RemoteEnv`.

    Args:
        address: `HOST:PORT` of the env server.
        env_ids: Which of its envs, in this order; None: all that are free and alike.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server, and for a free env, in seconds.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.

    Attributes:
        env_ids: The envs.

    Raises:
        ConfigError: The envs differ, or have several agents.
        PreconditionError: The actor loop of the server steps one; the message names the key.
        NotFoundError: There is no such env.
        AlreadyExistsError: Another program steps one.
        UnavailableError: No server answered in time.
    """

    def __init__(
        self,
        address: str,
        env_ids: Sequence[str] | None = None,
        *,
        auth: ClientAuthConfig | None = None,
        rpc: RpcConfig | None = None,
        connect_timeout_s: float = 30.0,
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self._connection = Connection(
            address,
            auth=auth,
            rpc=rpc,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
        )
        try:
            metas = self._connection.take(_has_space, env_ids, count=None)
            _check_alike(metas)
        except BaseException:
            self._connection.close()
            raise
        self.env_ids = [str(meta.env_id) for meta in metas]
        sizes = [int(meta.num_envs or 1) for meta in metas]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.num_envs = self._starts[-1]
        self.single_observation_space = cast("gym.Space[Any]", metas[0].observation_space)
        self.single_action_space = cast("gym.Space[Any]", metas[0].action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._stepping: Future[list[EnvRet]] | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode in every row.

        Args:
            seed: Seed of the first row; each one after it gets one more. None: they go on with
                their own.
            options: Options of the envs.

        Raises:
            TypeError: `seed` is no integer.
            RemoteError: An env failed, or the server is gone for good.
        """
        if seed is not None and not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
        super().reset(seed=None if seed is None else int(seed))
        resets = [
            self._connection.begin_reset(
                env_id, seed=None if seed is None else int(seed) + start, options=options
            )
            for env_id, start in zip(self.env_ids, self._starts, strict=False)
        ]
        wait(resets)  # also if one fails: the next command would find the others busy
        env_rets = [reset.result() for reset in resets]
        return self._observations(env_rets), self._infos(env_rets)

    def step(self, actions: Any) -> _Step:
        """Executes an action in every row.

        Returns:
            Observations, rewards float64 [rows], terminated and truncated bool [rows], infos.

        Raises:
            ConfigError: An env has rows that reset in the next step (`AutoresetMode.NEXT_STEP`).
            RemoteError: An env failed, or has begun anew with its server (`reason` is STATE_LOST),
                or the server is gone for good.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Sends an action for every row; `step_wait` returns what comes of them."""
        space, starts = self.single_action_space, self._starts
        responses = [
            PolicyResponse(env_id, action=slice_rows(space, actions, starts[i], starts[i + 1]))
            for i, env_id in enumerate(self.env_ids)
        ]
        self._stepping = self._connection.begin_steps(responses, autoreset=True)

    def step_wait(self) -> _Step:
        """Returns what came of the actions of `step_async`, as `step` does."""
        stepping, self._stepping = self._stepping, None
        if stepping is None:
            raise ConfigError("step_wait without a step_async before")
        try:
            env_rets = stepping.result()
        finally:
            stepping.cancel()  # when a KeyboardInterrupt ended the wait
        for one in env_rets:
            if one.rows is not None:
                raise ConfigError(
                    f"env {one.env_id!r} gave only its rows {one.rows.tolist()}; a vector env "
                    "has all of them, so it needs one that resets rows in the same step"
                )
        return (
            self._observations(env_rets),
            np.concatenate([np.asarray(one.last_reward, np.float64) for one in env_rets]),
            np.concatenate([np.asarray(one.last_terminated, bool) for one in env_rets]),
            np.concatenate([np.asarray(one.last_truncated, bool) for one in env_rets]),
            self._infos(env_rets),
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Leaves the envs to others."""
        self._connection.close()

    def _observations(self, env_rets: Sequence[EnvRet]) -> Any:
        return join_rows(self.single_observation_space, [one.observation for one in env_rets])

    def _infos(self, env_rets: Sequence[EnvRet]) -> dict[str, Any]:
        return vector_info(self.single_observation_space, env_rets, self.num_envs)


def _has_space(meta: EnvMeta) -> bool:
    return isinstance(meta.observation_space, gym.Space)


def _check_alike(metas: Sequence[EnvMeta]) -> None:
    first = metas[0]
    for meta in metas:
        if not _has_space(meta):
            raise ConfigError(f"env {meta.env_id!r} has several agents; see RemoteParallelEnv")
        for name in ("observation_space", "action_space"):
            if getattr(meta, name) != getattr(first, name):
                raise ConfigError(
                    f"{name}: env {first.env_id!r} has {getattr(first, name)}, "
                    f"{meta.env_id!r} has {getattr(meta, name)}"
                )
