"""A remote multi-agent env as a PettingZoo parallel env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from rlightning.env.gym_client.connection import Connection
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.utils.conversions import map_leaves

try:
    from pettingzoo import ParallelEnv
except ModuleNotFoundError as error:
    raise ImportError(
        "RemoteParallelEnv needs PettingZoo: pip install 'rlightning[pettingzoo]'"
    ) from error


class RemoteParallelEnv(ParallelEnv):  # type: ignore[misc,type-arg,unused-ignore]
    """A multi-agent env of an env server, stepped from here.

    The env there returns `MultiAgentEnvRet`s: observations, rewards and flags by agent, for those
    agents that took part, and infos by agent in `info`. All else is as for `RemoteEnv`.

    Args:
        address: `HOST:PORT` of the env server.
        env_id: Which one of its envs; None: the first that is free.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server, and for a free env, in seconds.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.

    Attributes:
        env_id: The env.
        possible_agents: All agents that there may be.
        agents: Those whose episode goes on.

    Raises:
        ImportError: PettingZoo is not installed.
        ConfigError: The env has one agent only.
        PreconditionError: The actor loop of the server steps it; the message names the key.
        NotFoundError: There is no such env.
        AlreadyExistsError: Another program steps it.
        UnavailableError: No server answered in time.
    """

    metadata = {"render_modes": [], "name": "remote"}  # noqa: RUF012 - as PettingZoo declares it

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
            (meta,) = self._connection.take(_has_agents, ids, count=1)
            if not _has_agents(meta):
                raise ConfigError(f"env {meta.env_id!r} has one agent only; see RemoteEnv")
        except BaseException:
            self._connection.close()
            raise
        self.env_id = str(meta.env_id)
        self.observation_spaces: dict[str, gym.Space[Any]] = dict(meta.observation_space)  # type: ignore[arg-type]
        self.action_spaces: dict[str, gym.Space[Any]] = dict(meta.action_space)  # type: ignore[arg-type]
        self.possible_agents = list(self.observation_spaces)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """Returns the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gym.Space[Any]:
        """Returns the space of an agent's actions."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begins a new episode.

        Returns:
            Observations and infos by agent.

        Raises:
            RemoteError: The env failed, or the server is gone for good.
        """
        env_ret = self._connection.reset(self.env_id, seed=seed, options=options)
        self.agents = [agent for agent in self.possible_agents if agent in env_ret.observation]
        return self._observations(env_ret), self._infos(env_ret)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]:
        """Executes an action of each agent.

        Returns:
            Observations, rewards, terminated, truncated and infos by agent.

        Raises:
            RemoteError: The env failed, or has begun anew with its server (`reason` is STATE_LOST),
                or the server is gone for good.
        """
        response = PolicyResponse(self.env_id, action=dict(actions))
        env_ret = self._connection.step(response, autoreset=False)
        rewards: Any = env_ret.last_reward
        terminated: Any = env_ret.last_terminated
        truncated: Any = env_ret.last_truncated
        self.agents = [
            agent
            for agent in self.agents
            if agent in terminated and not (terminated[agent] or truncated[agent])
        ]
        return (
            self._observations(env_ret),
            {agent: float(reward) for agent, reward in rewards.items()},
            {agent: bool(flag) for agent, flag in terminated.items()},
            {agent: bool(flag) for agent, flag in truncated.items()},
            self._infos(env_ret),
        )

    def close(self) -> None:
        """Leaves the env to others. Safe to repeat."""
        self._connection.close()

    def _observations(self, env_ret: EnvRet) -> dict[str, Any]:
        return {
            agent: map_leaves(_copied, observation)
            for agent, observation in env_ret.observation.items()
        }

    def _infos(self, env_ret: EnvRet) -> dict[str, Any]:
        return {agent: env_ret.info.get(agent, {}) for agent in env_ret.observation}


def _has_agents(meta: EnvMeta) -> bool:
    return isinstance(meta.observation_space, dict)


def _copied(leaf: Any) -> Any:
    """Returns an array that can be written to; what has no axes as a number."""
    if not hasattr(leaf, "shape"):
        return leaf
    return leaf.copy() if leaf.shape else leaf[()]
