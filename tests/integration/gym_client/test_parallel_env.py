"""A remote multi-agent env as a PettingZoo parallel env, on a real server over a real socket."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.env.gym_client import RemoteEnv, RemoteParallelEnv
from rlightning.errors import ConfigError, NotFoundError
from rlightning.types import MultiAgentEnvRet
from tests.integration.gym_client.serving import env_server, hosted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of deprecated envs that it imports
    from pettingzoo.test import parallel_api_test

pytestmark = pytest.mark.timeout(60)
BACKEND = f"{__name__}:Relay"


class Relay(BaseEnv):
    """Three runners; each leaves the episode after as many steps as its number, by turns."""

    AGENTS = ("one", "two", "three")

    def get_observation_space(self):
        return {agent: gym.spaces.Box(-1, 1, (2,), np.float32) for agent in self.AGENTS}

    def get_action_space(self):
        return {agent: gym.spaces.Discrete(3) for agent in self.AGENTS}

    def reset(self, *, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.steps = 0
        self.running = list(self.AGENTS)
        return self._returned(self.AGENTS, {}, {})

    def step(self, response):
        self.steps += 1
        runners, self.running = self.running, self.running[self.steps // 5 :]
        rewards = {agent: 0.1 * int(response.action[agent]) for agent in runners}
        ended = {agent: agent not in self.running for agent in runners}
        return self._returned(runners, rewards, ended)

    def _returned(self, agents, rewards, ended):
        return MultiAgentEnvRet(
            self.env_id,
            {agent: self.random.uniform(-1, 1, 2).astype(np.float32) for agent in agents},
            rewards,
            ended,
            dict.fromkeys(rewards, False),
            {agent: {"steps": self.steps} for agent in agents},
        )


class Liar(Relay):
    """Gives another observation than it declares."""

    def _returned(self, agents, rewards, ended):
        env_ret = super()._returned(agents, rewards, ended)
        if rewards:
            env_ret.observation["one"] = np.zeros(3, np.float32)
        return env_ret


def test_pettingzoos_test_is_content():
    with env_server(hosted(backend=BACKEND)) as server:
        env = RemoteParallelEnv(server.address)
        parallel_api_test(env, num_cycles=60)
        env.close()


def test_what_agents_do_and_get_travels():
    with env_server(hosted(backend=BACKEND)) as server:
        env = RemoteParallelEnv(server.address)
        assert env.possible_agents == ["one", "two", "three"]
        first, _ = env.reset(seed=4)
        again, infos = env.reset(seed=4)
        assert env.agents == list(Relay.AGENTS)
        assert infos == {agent: {"steps": 0} for agent in Relay.AGENTS}
        for agent in Relay.AGENTS:
            np.testing.assert_array_equal(first[agent], again[agent])
            assert again[agent].dtype == np.float32
            again[agent][:] = 0  # the caller's own
        _, rewards, terminated, truncated, infos = env.step({"one": 0, "two": 1, "three": 2})
        assert rewards == {"one": 0.0, "two": 0.1, "three": 0.2}
        assert not any(terminated.values())
        assert not any(truncated.values())
        assert infos["two"] == {"steps": 1}
        for _ in range(4):
            terminated = env.step(dict.fromkeys(env.agents, 1))[2]
        assert terminated == {"one": True, "two": False, "three": False}
        assert env.agents == ["two", "three"]
        env.close()


def test_other_envs_are_refused():
    with env_server(hosted(backend=BACKEND), hosted(name="cart")) as server:
        with pytest.raises(ConfigError, match="one agent only"):
            RemoteParallelEnv(server.address, "cart-0-0")
        with pytest.raises(ConfigError, match="RemoteParallelEnv"):
            RemoteEnv(server.address, "env-0-0")
        env = RemoteEnv(server.address)
        assert env.env_id == "cart-0-0"
        env.close()


def test_an_observation_outside_of_its_space_is_told():
    with env_server(hosted(backend=f"{__name__}:Liar")) as server:
        env = RemoteParallelEnv(server.address)
        env.reset()
        with pytest.raises(Exception, match="one: expected float32"):
            env.step(dict.fromkeys(env.agents, 1))
        env.close()
    with env_server(hosted()) as server:
        with pytest.raises(
            NotFoundError, match=r"no env here fits; .* \['env-0-0 of num_envs 1'\]"
        ):
            RemoteParallelEnv(server.address)
