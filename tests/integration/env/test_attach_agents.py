"""An attached env of several agents that the actor loop steps, on real servers and real sockets."""

from __future__ import annotations

import asyncio

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.policy import BasePolicy
from rlightning.testing import assert_eventually
from rlightning.types import EnvMeta, MultiAgentEnvRet, MultiAgentPolicyResponse
from rlightning.utils.config import EnvConfig
from tests.integration.env.attaching import PATIENCE_S, attached, cluster, raw_client, stepped

pytestmark = pytest.mark.timeout(120)


class Pair(BaseEnv):
    """Two agents that count; each is told its number and the step, and acts by saying them."""

    agents = ("left", "right")
    length = 5

    def __init__(self):
        super().__init__(EnvConfig(name="pair", backend="x:Pair", task="pair"))
        self.wrong = 0

    def get_observation_space(self):
        return {agent: gym.spaces.Box(0, 2**40, (2,), np.int64) for agent in self.agents}

    def get_action_space(self):
        return {agent: gym.spaces.Box(0, 2**40, (2,), np.int64) for agent in self.agents}

    def _seen(self):
        return {agent: np.array([number, self.steps]) for number, agent in enumerate(self.agents)}

    def reset(self, *args, **kwargs):
        self.steps = 0
        return MultiAgentEnvRet(self.env_id, self._seen())

    def step(self, policy_resp):
        expected = self._seen()
        self.wrong += any((policy_resp.action[a] != expected[a]).any() for a in self.agents)
        self.steps += 1
        rewards = {agent: float(number + 1) for number, agent in enumerate(self.agents)}
        ended = dict.fromkeys(self.agents, self.steps == self.length)
        going = dict.fromkeys(self.agents, False)
        return MultiAgentEnvRet(self.env_id, self._seen(), rewards, ended, going)


class Same(BasePolicy):
    """Each agent acts with what it sees."""

    def construct_network(self, env_meta, **kwargs):
        import torch

        self.net = torch.nn.Linear(1, 1)

    def rollout_step(self, env_ret):
        return MultiAgentPolicyResponse(env_ret.env_id, action=dict(env_ret.observation))


async def test_agents_that_attach_are_stored_by_agent():
    async with cluster([], {"type": f"{__name__}:Same"}, min_clients=1) as running:
        async with attached(running.env_address, Pair()) as client:
            await stepped(client, 40)
            episodes = (await running.client.describe()).episodes
            assert {(e.length, e.episode_return) for e in episodes} == {(5, 15.0)}
            assert client.env.wrong == 0
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
        columns = await running.buffer.get()
    for number, agent in enumerate(Pair.agents):
        seen, after = columns["observation"][agent], columns["next_observation"][agent]
        assert len(seen) >= 35
        assert (columns["reward"][agent] == number + 1).all()
        np.testing.assert_array_equal(seen[:, 0], np.full(len(seen), number))
        np.testing.assert_array_equal(after[:, 1], seen[:, 1] + 1)
        np.testing.assert_array_equal(columns["action"][agent], seen)


async def test_agents_where_there_are_none_are_refused():
    async with cluster() as running, raw_client(running) as client:
        one = client.env_ret
        client.env_ret = MultiAgentEnvRet("raw", one.observation)
        await client.send((1, True))
        assert (await client.call.code()).name == "INVALID_ARGUMENT"
        assert "expected no return of several agents" in await client.call.details()


async def test_an_executed_action_without_that_of_an_agent_is_refused():
    env = Pair()
    spec = EnvMeta(None, env.get_action_space(), env.get_observation_space(), 1)
    seen = {agent: np.zeros((1, 2), np.int64) for agent in Pair.agents}
    async with cluster([], {"type": f"{__name__}:Same"}, min_clients=1) as running:
        for executed in ({"left": seen["left"]}, seen["left"]):
            async with raw_client(running, spec=spec) as client:
                client.env_ret = MultiAgentEnvRet("raw", seen, executed_action=executed)
                await client.send((1, True))
                code = await asyncio.wait_for(client.call.code(), 20)
                assert code.name == "INVALID_ARGUMENT"
                assert "executed_action: expected agents" in await client.call.details()
