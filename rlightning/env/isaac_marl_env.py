"""Isaac Lab's vectorised multi-agent envs; needs Isaac Lab, see docs/environments.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.env.isaac_env import IsaacEnv, to_arrays
from rlightning.env.utils.agents import team_outcome
from rlightning.types import MultiAgentEnvRet
from rlightning.utils.registry import ENVS


@ENVS.register("isaac_marl")
class IsaacMARLEnv(IsaacEnv):
    """Hosts a direct multi-agent env of Isaac Lab: `config.task` is its id.

    Observations, actions, rewards and flags are dicts by agent, of all `possible_agents`, on the
    CPU. A row is reset in the step in which all its agents have terminated, or all have timed out;
    an agent's time-out that does not end the episode of its row is not shown as `truncated`.
    `info["state"]` is the state of the whole, where the task has one. The return in
    `info["episode_info"]` is the sum over agents.

    Options and errors are those of `IsaacManagerBasedRLEnv`.
    """

    backend = "isaac_marl"

    def get_observation_space(self) -> dict[str, gym.Space[Any]]:
        """Returns the space of each agent's observation."""
        return dict(self.env.unwrapped.observation_spaces)

    def get_action_space(self) -> dict[str, gym.Space[Any]]:
        """Returns the space of each agent's action."""
        return dict(self.env.unwrapped.action_spaces)

    def _first(self, observation: Any, extras: Mapping[str, Any]) -> MultiAgentEnvRet:
        agents = list(self.env.unwrapped.possible_agents)
        rows = self.num_envs
        return MultiAgentEnvRet(
            self.env_id,
            to_arrays(observation),
            {agent: np.zeros(rows, np.float32) for agent in agents},
            {agent: np.zeros(rows, bool) for agent in agents},
            {agent: np.zeros(rows, bool) for agent in agents},
            self._info(),
        )

    def _stepped(self, *outcome: Any) -> MultiAgentEnvRet:
        observation, reward, terminated, truncated, extras = map(to_arrays, outcome)
        dead = np.stack(list(terminated.values())).all(axis=0)
        late = np.stack(list(truncated.values())).all(axis=0)
        ended = np.asarray(dead | late)
        for agent, flags in truncated.items():
            truncated[agent] = flags & ended
        total, *_ = team_outcome(reward, terminated, truncated)
        final = (
            {agent: extras[agent]["final_obs"] for agent in observation} if ended.any() else None
        )
        info = self._info()
        self._finals(info, final, ended, total)
        return MultiAgentEnvRet(self.env_id, observation, reward, terminated, truncated, info)

    def _info(self) -> dict[str, Any]:
        state = self.env.unwrapped.state()
        return {} if state is None else {"state": to_arrays(state)}
