"""Adapters without their simulators: what they say when those are missing, and agents that come and go."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.hosting import host_envs
from rlightning.env.maniskill_env import grasp_reward
from rlightning.env.pettingzoo_env import PettingZooEnv
from rlightning.env.utils.backends import backend_class
from rlightning.env.utils.libero_utils import quat2axisangle
from rlightning.errors import ConfigError, ResetNeededError
from rlightning.types import MultiAgentEnvRet, MultiAgentPolicyResponse
from tests.unit.env.envs import config

HERE = "tests.unit.env.test_adapters"


@pytest.mark.parametrize(
    ("backend", "extra", "module"),
    [
        ("ale", "ale", "ale_py"),
        ("mujoco", "mujoco", "mujoco"),
        ("maniskill", "maniskill", "mani_skill"),
        ("libero", "libero", "libero"),
        ("isaac_manager_based", "isaac", "isaaclab_tasks"),
        ("isaac_marl", "isaac", "isaaclab_tasks"),
        ("piper", "piper", "piper_sdk"),
    ],
)
def test_a_missing_simulator_names_the_extra(monkeypatch, backend, extra, module):
    monkeypatch.setitem(sys.modules, module, None)
    make = backend_class(backend)
    rows = 1 if backend == "piper" else 2
    for _ in range(2):  # the first failure leaves nothing behind
        with pytest.raises(
            ConfigError, match=rf"'{backend}' needs {module}.*rlightning\[{extra}\]"
        ):
            make(config("Some-v0", backend=backend, num_envs=rows))


def test_a_missing_pettingzoo_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ConfigError, match=r"needs pettingzoo.*rlightning\[pettingzoo\]"):
        PettingZooEnv(config("no_such_module.v1", backend="pettingzoo"))
    with pytest.raises(ConfigError, match="'tests.unit.env.envs' has no parallel_env"):
        PettingZooEnv(config("tests.unit.env.envs", backend="pettingzoo"))
    with pytest.raises(ConfigError, match="gave Counting, which has not the parallel API"):
        PettingZooEnv(config("tests.unit.env.envs:Counting", backend="pettingzoo"))


def test_isaac_has_several_rows():
    with pytest.raises(ConfigError, match="'isaac_marl' takes 2 rows or more, got 1"):
        backend_class("isaac_marl")(config("Some-v0", backend="isaac_marl"))


class Leaving:
    """Two agents: `short` leaves in the second step, `long` in the fourth; `never` takes no part."""

    possible_agents = ["short", "long", "never"]

    def __init__(self, truncates=False):
        self.truncates = truncates
        self.taken = []
        self.seeds = []

    def observation_space(self, agent):
        return gym.spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents = ["short", "long"]
        self.count = 0
        return self.seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.taken.append({agent: float(action[0]) for agent, action in actions.items()})
        self.count += 1
        agents = self.agents
        left = {"short": self.count == 2, "long": self.count == 4}
        self.agents = [agent for agent in agents if not left[agent]]
        ended = {agent: left[agent] for agent in agents}
        nothing = dict.fromkeys(agents, False)
        flags = (nothing, ended) if self.truncates else (ended, nothing)
        return self.seen(agents), dict.fromkeys(agents, 1.0), *flags, {agents[0]: {"k": self.count}}

    def seen(self, agents):
        return {agent: np.array([len(agent), self.count]) for agent in agents}

    def close(self):
        pass


def acting(env_id, value, rows=None):
    shape = (1,) if rows is None else (rows, 1)
    action = {agent: np.full(shape, value) for agent in Leaving.possible_agents}
    return MultiAgentPolicyResponse(env_id, action=action)


def test_agents_that_leave_keep_what_they_saw_last():
    env = PettingZooEnv(config(f"{HERE}:Leaving", backend="pettingzoo", seed=3))
    with pytest.raises(ResetNeededError):
        env._step(acting(env.env_id, 0.0))
    first = env._reset()
    assert isinstance(first, MultiAgentEnvRet)
    assert first.observation["long"].tolist() == [4, 0]
    assert first.observation["never"].tolist() == [0, 0]
    assert first.last_terminated == {"short": False, "long": False, "never": True}
    env_rets = [env._step(acting(env.env_id, 0.5 * i)) for i in range(4)]
    assert [one.observation["short"].tolist() for one in env_rets] == [
        [5, 1],
        [5, 2],
        [5, 2],
        [5, 2],
    ]
    assert [one.last_terminated["short"] for one in env_rets] == [False, True, True, True]
    assert [one.last_reward["short"] for one in env_rets] == [1.0, 1.0, 0.0, 0.0]
    assert [one.last_terminated["long"] for one in env_rets] == [False, False, False, True]
    assert env_rets[3].info["episode_info"] == {"return": 6.0, "episode_len": 4}
    assert env_rets[0].info["short"] == {"k": 1}
    assert env.env.taken[2] == {"long": 1.0}
    assert env_rets[3].executed_action["long"].tolist() == [1.0]  # clipped
    env._reset()
    assert env.env.seeds == [*env.row_seeds, None]
    env.close()


async def test_rows_of_agents_are_hosted_like_any_other():
    for rows in (1, 2):
        (group,) = await host_envs(
            [config(f"{HERE}:Leaving", backend="pettingzoo", num_envs=rows, max_episode_steps=3)],
            pipeline_depth=1,
        )
        env_ret = await group.reset()
        assert env_ret.last_reward["long"].tolist() == [0.0] * rows
        for _ in range(3):
            env_ret = await group.step(acting(group.env_id, 0.0, rows))
        assert isinstance(env_ret, MultiAgentEnvRet)
        assert env_ret.info["final_rows"].tolist() == list(range(rows))
        assert env_ret.info["final_observation"]["long"].tolist() == [[4, 3]] * rows
        assert env_ret.observation["long"].tolist() == [[4, 0]] * rows
        assert env_ret.last_truncated["long"].tolist() == [True] * rows
        assert env_ret.last_truncated["short"].tolist() == [False] * rows
        assert env_ret.episode_id.tolist() == list(range(rows, 2 * rows))
        await group.close()


def test_the_reward_of_grasping():
    info = {"is_src_obj_grasped": np.array([True]), "consecutive_grasp": False, "success": True}
    assert grasp_reward(info) == pytest.approx(1.1)
    info.update(is_src_obj_grasped=False)
    assert grasp_reward(info) == 0.0


def test_rotations():
    half = np.sqrt(0.5)
    assert np.allclose(quat2axisangle([half, 0, 0, half]), [np.pi / 2, 0, 0])
    assert quat2axisangle([0, 0, 0, 1]).tolist() == [0, 0, 0]
