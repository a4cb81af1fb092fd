"""PettingZoo's parallel envs, one or many rows of them; needs the extra `pettingzoo`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.actions import ActionFitter
from rlightning.env.utils.agents import has_ended
from rlightning.env.utils.extras import load_extra, load_named
from rlightning.env.utils.making import call_maker
from rlightning.env.utils.spaces import as_declared, mismatch, one_row, stack, zeros
from rlightning.errors import ConfigError, ObservationError, ResetNeededError
from rlightning.types import MultiAgentEnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

Spaces = dict[str, gym.Space[Any]]


@ENVS.register("pettingzoo")
class PettingZooEnv(BaseEnv):
    """Hosts an env with PettingZoo's parallel API: all agents act at once.

    `config.task` is a module that has a `parallel_env`, such as `mpe2.simple_spread_v3`, or
    `module:attribute` of what makes an env; `env_kwargs` are its arguments.

    Observations, actions, rewards and flags are dicts by agent, of all `possible_agents`, in every
    step. An agent that has left keeps its last observation and its flags and gets no reward; its
    actions are not executed. One that never took part has zeros, and is terminated. The episode
    ends when all agents have left, or after `max_episode_steps`. `info` is by agent.

    With `num_envs` > 1 every leaf has the leading dimension of rows, and a row is reset in the step
    that ends its episode (see `EnvRet`); infos of agents are left out then. Actions are cast and
    clipped as in `GymnasiumEnv`.

    With `config.seed` the first reset is seeded, each row of each worker differently; later resets
    go on from there.

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group or server; None counts as 0.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Raises:
        ConfigError: There is no such env, it does not take the arguments, or PettingZoo is missing.
        EnvError: It could not be made.
    """

    option_names: ClassVar[Collection[str] | None] = ()

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        make = _maker(self.config.task)
        kwargs = self.config.env_kwargs.to_dict()
        self._rows = [
            _Row(call_maker(self.config, make, kwargs), self.config) for _ in range(self.num_envs)
        ]
        self.env = self._rows[0].env
        self._space = gym.spaces.Dict(self._rows[0].observation_spaces)
        self._batched = self.num_envs > 1
        self._fitter = ActionFitter(
            gym.spaces.Dict(self._rows[0].action_spaces),
            self.num_envs if self._batched else None,
            self.env_id,
        )
        if self.config.seed is not None:
            sequence = np.random.SeedSequence([self.config.seed, self.worker_index])
            words = sequence.generate_state(self.num_envs, np.uint32)
            self.row_seeds = [int(word) >> 1 for word in words]
        self._unused_seeds = self.row_seeds
        self._is_reset = False

    def get_observation_space(self) -> Spaces:
        """Returns the space of each agent's observation."""
        return self._rows[0].observation_spaces

    def get_action_space(self) -> Spaces:
        """Returns the space of each agent's action."""
        return self._rows[0].action_spaces

    def reset(self, *args: Any, **kwargs: Any) -> MultiAgentEnvRet:
        """Begins a new episode in every row.

        Args:
            *args: None.
            **kwargs: `seed`, of the first row, those after it following on, and `options`.
        """
        seeds, self._unused_seeds = self._unused_seeds, None
        if kwargs.get("seed") is not None:
            first = int(kwargs.pop("seed"))
            seeds = list(range(first, first + self.num_envs))
        for i, row in enumerate(self._rows):
            row.reset(None if seeds is None else seeds[i], kwargs.get("options"))
        self._is_reset = True
        return self._gathered([row.shown() for row in self._rows])

    def step(self, policy_resp: PolicyResponse) -> MultiAgentEnvRet:
        """Executes the actions of a response.

        Raises:
            ResetNeededError: There was no reset before.
            EnvError: An action is not one that the env can execute; it is not stepped then.
        """
        if not self._is_reset:
            raise ResetNeededError(f"env {self.env_id!r}: reset it before the first step")
        fitted = self._fitter.fit(self._preprocess_fn(policy_resp))
        finals: dict[int, MultiAgentEnvRet] = {}
        stats: list[dict[str, float]] = []
        shown = []
        for i, row in enumerate(self._rows):
            action = fitted.action
            if self._batched:
                action = one_row(fitted.action, i)
            row.step(action)
            outcome = row.shown()
            if has_ended(outcome):
                stats.append({"return": row.episode_return, "episode_len": row.steps})
                if self._batched:
                    finals[i] = outcome
                    row.reset(None, None)
            shown.append(outcome)
        env_ret = self._gathered(shown, finals)
        if stats:
            columns = {key: np.array([one[key] for one in stats]) for key in stats[0]}
            env_ret.info["episode_info"] = (
                columns if self._batched else {key: value[0] for key, value in columns.items()}
            )
        if fitted.source is not None:
            env_ret.executed_action = fitted.executed
            env_ret.action_source = fitted.source
        return env_ret

    def close(self) -> None:
        """Closes every row."""
        for row in self._rows:
            row.env.close()
        self._is_reset = False

    def _gathered(
        self, shown: list[MultiAgentEnvRet], finals: dict[int, MultiAgentEnvRet] | None = None
    ) -> MultiAgentEnvRet:
        if not self._batched:
            shown[0].env_id = self.env_id
            return shown[0]
        observations = [
            row.observation if finals and i in finals else shown[i].observation
            for i, row in enumerate(self._rows)
        ]
        agents = self._rows[0].agents
        outcome: list[Any] = [
            {
                agent: np.array([getattr(one, name)[agent] for one in shown], dtype)
                for agent in agents
            }
            for name, dtype in (
                ("last_reward", np.float32),
                ("last_terminated", np.bool_),
                ("last_truncated", np.bool_),
            )
        ]
        info: dict[str, Any] = {}
        if finals:
            info["final_rows"] = np.array(list(finals), np.int32)
            last = [final.observation for final in finals.values()]
            info["final_observation"] = stack(self._space, last)
        reward, terminated, truncated = outcome
        observation = stack(self._space, observations)
        return MultiAgentEnvRet(self.env_id, observation, reward, terminated, truncated, info)


class _Row:
    """One parallel env, whose agents are all there in every step."""

    def __init__(self, env: Any, config: EnvConfig) -> None:
        if not hasattr(env, "possible_agents") or not hasattr(env, "observation_space"):
            raise ConfigError(
                f"env.task '{config.task}' gave {type(env).__name__}, which has not the parallel "
                "API of PettingZoo"
            )
        self.env = env
        self.agents: list[str] = [str(agent) for agent in env.possible_agents]
        self.observation_spaces: Spaces = {a: env.observation_space(a) for a in self.agents}
        self.action_spaces: Spaces = {a: env.action_space(a) for a in self.agents}
        self.steps = 0
        self.episode_return = 0.0
        self.observation: dict[str, Any] = {}
        self._limit = config.max_episode_steps
        self._reward: dict[str, float] = {}
        self._terminated: dict[str, bool] = {}
        self._truncated: dict[str, bool] = {}
        self._infos: dict[str, Any] = {}

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        observations, self._infos = self.env.reset(seed=seed, options=options)
        self.steps, self.episode_return = 0, 0.0
        self.observation = {a: zeros(s) for a, s in self.observation_spaces.items()}
        self._reward = dict.fromkeys(self.agents, 0.0)
        self._terminated = {agent: agent not in observations for agent in self.agents}
        self._truncated = dict.fromkeys(self.agents, False)
        self._see(observations)

    def step(self, action: dict[str, Any]) -> None:
        living = set(self.env.agents)
        outcome = self.env.step({agent: action[agent] for agent in self.agents if agent in living})
        observations, rewards, terminated, truncated, self._infos = outcome
        self.steps += 1
        self._reward = {agent: float(rewards.get(agent, 0.0)) for agent in self.agents}
        self.episode_return += sum(self._reward.values())
        for flags, told in ((self._terminated, terminated), (self._truncated, truncated)):
            flags.update({agent: bool(told[agent]) for agent in living if agent in told})
        if self.steps == self._limit:
            for agent in self.agents:
                self._truncated[agent] |= not self._terminated[agent]
        self._see(observations)

    def shown(self) -> MultiAgentEnvRet:
        return MultiAgentEnvRet(
            "",
            dict(self.observation),
            dict(self._reward),
            dict(self._terminated),
            dict(self._truncated),
            {agent: info for agent, info in self._infos.items() if info},
        )

    def _see(self, observations: dict[str, Any]) -> None:
        for agent, value in observations.items():
            space = self.observation_spaces[agent]
            if difference := mismatch(space, value, name=f"observation.{agent}"):
                raise ObservationError(f"an observation is not in its space: {difference}")
            self.observation[agent] = as_declared(space, value)


def _maker(task: str) -> Callable[..., Any]:
    module_name, _, name = task.partition(":")
    try:
        module = load_named(module_name, f"env.task '{task}'")
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            # An env of one's own needs no PettingZoo; where it does, this says what is missing.
            load_extra("pettingzoo", extra="pettingzoo", backend="pettingzoo")
        raise
    try:  # PettingZoo's own packages import a module when it is asked for, or refuse an old version
        make: Callable[..., Any] | None = getattr(module, name or "parallel_env", None)
    except Exception as error:
        raise ConfigError(f"env.task '{task}': cannot import it: {error}") from error
    if make is None or not callable(make):
        raise ConfigError(
            f"env.task '{task}': module '{module_name}' has no {name or 'parallel_env'}"
        )
    return make
