"""One remote env as a `gymnasium.Env`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import numpy as np

from rlightning.env.gym_client.connection import Connection
from rlightning.env.gym_client.rows import scalar_info
from rlightning.env.utils.spaces import row_of, stack
from rlightning.errors import ConfigError, EnvError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig


class RemoteEnv(gym.Env[Any, Any]):
    """An env of one row of an env server, stepped from here.

    ```python
    env = RemoteEnv("127.0.0.1:50051")
    observation, info = env.reset(seed=1)
    ```

    It is this program's alone until `close`. Seeds and options reach the env, and its infos come
    back, but for what the wire cannot carry. After a cut it goes on, and nothing is stepped twice.
    An env that a client has attached to the server can be stepped too; it takes no seed and no
    options, since it resets itself.

    Args:
        address: `HOST:PORT` of the env server.
        env_id: Which one of its envs; None: the first that is free.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server, and for a free env, in seconds.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.

    Attributes:
        env_id: The env.

    Raises:
        ConfigError: The env has several rows, or several agents.
        PreconditionError: The actor loop of the server steps it; the message names the key.
        NotFoundError: There is no such env.
        AlreadyExistsError: Another program steps it.
        UnavailableError: No server answered in time.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as gymnasium declares it

    def __init__(
        self,
        address: str,
        env_id: str | None = None,
        *,
        auth: ClientAuthConfig | None = None,
        rpc: RpcConfig | None = None,
        connect_timeout_s: float = 30.0,
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        self.render_mode = None
        self._connection = Connection(
            address,
            auth=auth,
            rpc=rpc,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
        )
        try:
            ids = None if env_id is None else [env_id]
            (meta,) = self._connection.take(_is_scalar, ids, count=1)
            if not _is_scalar(meta):
                raise ConfigError(
                    f"env {meta.env_id!r}: expected one row of one agent, got {meta.num_envs} of "
                    f"{type(meta.observation_space).__name__}; see RemoteVectorEnv and "
                    "RemoteParallelEnv"
                )
        except BaseException:
            self._connection.close()
            raise
        self.env_id = str(meta.env_id)
        self.observation_space = cast("gym.Space[Any]", meta.observation_space)
        self.action_space = cast("gym.Space[Any]", meta.action_space)
        # An attached env has begun its next episode in the step that ended one.
        self._next: EnvRet | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode.

        Args:
            seed: Seed of the env; None: it goes on with its own.
            options: Options of the env.

        Raises:
            RemoteError: The env failed, or the server is gone for good.
        """
        super().reset(seed=seed)
        begun, self._next = self._next, None
        if begun is None or seed is not None or options is not None:
            begun = self._connection.reset(self.env_id, seed=seed, options=options)
            return self._observation(begun.observation), scalar_info(begun.info)
        return self._observation(begun.observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Executes an action.

        Raises:
            RemoteError: The env failed, or has begun anew with its server (`reason` is STATE_LOST),
                or the server is gone for good.
        """
        response = PolicyResponse(self.env_id, action=stack(self.action_space, [action]))
        env_ret = self._connection.step(response, autoreset=False)
        observation, info = env_ret.observation, env_ret.info
        if "final_observation" in info:
            self._next = env_ret
            observation, info = info["final_observation"], info.get("final_info", {})
        return (
            self._observation(observation),
            float(np.asarray(env_ret.last_reward)[0]),
            bool(np.asarray(env_ret.last_terminated)[0]),
            bool(np.asarray(env_ret.last_truncated)[0]),
            scalar_info(info),
        )

    def close(self) -> None:
        """Leaves the env to others. Safe to repeat."""
        self._connection.close()

    def _observation(self, observation: Any) -> Any:
        try:
            return row_of(self.observation_space, observation, 0)
        except (TypeError, LookupError, ValueError) as error:
            raise EnvError(f"env {self.env_id!r}: not in its space: {observation!r}") from error


def _is_scalar(meta: EnvMeta) -> bool:
    return meta.num_envs == 1 and isinstance(meta.observation_space, gym.Space)
