"""Remote envs as a `VecEnv` of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlightning.env.gym_client.rows import info_of_row
from rlightning.env.gym_client.vector_env import RemoteVectorEnv
from rlightning.utils.config import ClientAuthConfig, RpcConfig

try:
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError as error:
    raise ImportError(
        "RemoteVecEnv needs Stable-Baselines3: pip install 'rlightning[sb3]'"
    ) from error


class RemoteVecEnv(VecEnv):  # type: ignore[misc,unused-ignore]
    """Rows of an env server as Stable-Baselines3 wants them.

    ```python
    PPO("MlpPolicy", RemoteVecEnv("127.0.0.1:50051")).learn(100_000)
    ```

    Its arguments and errors are those of `RemoteVectorEnv`. Attributes and methods of the envs are
    out of reach: they are in another process.

    Args:
        address: `HOST:PORT` of the env server.
        env_ids: Which of its envs, in this order; None: all that are free and alike.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server, and for a free env, in seconds.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.

    Raises:
        ImportError: Stable-Baselines3 is not installed.
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
        self._envs = RemoteVectorEnv(
            address,
            env_ids,
            auth=auth,
            rpc=rpc,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
        )
        super().__init__(
            self._envs.num_envs,
            self._envs.single_observation_space,
            self._envs.single_action_space,
        )

    def reset(self) -> Any:
        """Begins a new episode in every row; returns the observations.

        Of what `seed` was given, the first row's seed counts. Options have to be the same for all.

        Raises:
            ValueError: They are not.
        """
        options = self._options[0] or None
        if any((one or None) != options for one in self._options):
            raise ValueError("set_options: rows of remote envs take the same options")
        observations, infos = self._envs.reset(seed=self._seeds[0], options=options)
        self.reset_infos = [info_of_row(infos, row) for row in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Sends an action for every row."""
        self._envs.step_async(actions)

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Returns observations, rewards float32 [rows], dones bool [rows] and an info per row.

        The info of a row that ended holds `terminal_observation` and `TimeLimit.truncated`.
        """
        observations, rewards, terminated, truncated, infos = self._envs.step_wait()
        dones = terminated | truncated
        of_rows: list[dict[str, Any]]
        if infos:
            of_rows = [info_of_row(infos, row) for row in range(self.num_envs)]
        else:
            of_rows = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(dones).tolist():
            begun = of_rows[row]
            final, of_rows[row] = begun.pop("final_obs"), begun.pop("final_info", {})
            of_rows[row]["terminal_observation"] = final
            self.reset_infos[row] = begun
        for row, info in enumerate(of_rows):
            info["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
        return observations, rewards.astype(np.float32), dones, of_rows

    def close(self) -> None:
        """Leaves the envs to others. Safe to repeat."""
        self._envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns `render_mode`, which is None; nothing else of the envs is within reach.

        Raises:
            AttributeError: Another attribute is asked for.
        """
        if attr_name != "render_mode":
            raise AttributeError(f"{attr_name!r} of remote envs is in another process")
        return [None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Nothing of the envs is within reach.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{attr_name!r} of remote envs is in another process")

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Nothing of the envs is within reach.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{method_name!r} of remote envs is in another process")

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Returns False for every row: no wrapper of this process is around them."""
        return [False for _ in self._get_indices(indices)]
