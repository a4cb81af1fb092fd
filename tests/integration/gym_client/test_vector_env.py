"""Remote rows as a `gymnasium.vector.VectorEnv`, on a real server over a real socket."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlightning.env.gym_client import RemoteVectorEnv
from rlightning.errors import ConfigError, RemoteError
from tests.integration.gym_client.serving import env_server, hosted

ENVS = "tests.unit.env.envs"
pytestmark = pytest.mark.timeout(60)


def same(got, expected, *, rewards=False):
    """Asserts that what gymnasium's vector env returned and what came over the wire are alike."""
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key, value in expected.items():
            same(got[key], value)
    elif isinstance(expected, tuple):
        assert isinstance(got, tuple)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        assert got.dtype == object
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected.astype(np.float32) if rewards else expected)
    else:
        assert got == expected


class Telling(gym.Env):
    """An episode of 2 to 4 steps by turns; its infos are there in some rows only."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 5))
        self.steps = 0
        return np.zeros(2, np.float32), {"length": self.length}

    def step(self, action):
        self.steps += 1
        info = {"odd": 0.5 * self.steps} if action % 2 else {"even": {"twice": 2 * int(action)}}
        observation = np.array([self.steps, action], np.float32)
        return observation, 0.1 * action, self.steps == self.length, False, info


@pytest.mark.parametrize("layout", [(6, 1), (2, 3), (1, 6)], ids=["rows", "both", "workers"])
@pytest.mark.parametrize("task", [f"{__name__}:Telling", f"{ENVS}:Nested"])
def test_it_returns_what_gymnasiums_own_vector_env_does(task, layout):
    rows, workers = layout
    module, _, name = task.partition(":")
    kind = Telling if name == "Telling" else getattr(__import__(module, fromlist=[name]), name)
    local = SyncVectorEnv([kind] * 6, autoreset_mode=AutoresetMode.SAME_STEP)
    with env_server(hosted(task, num_envs=rows, num_workers=workers)) as server:
        envs = RemoteVectorEnv(server.address)
        assert envs.num_envs == 6
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        for name in ("single_observation_space", "single_action_space", "action_space"):
            assert getattr(envs, name) == getattr(local, name)
        envs.action_space.seed(1)
        same(envs.reset(seed=11), local.reset(seed=11))
        ends = 0
        for _ in range(12):
            actions = envs.action_space.sample()
            got, expected = envs.step(actions), local.step(actions)
            same(got[0], expected[0])
            same(got[1], expected[1], rewards=rows > 1)
            same(got[2:], expected[2:])
            ends += int((got[2] | got[3]).sum())
        assert ends > 6
        envs.close()


def test_native_rows_of_cartpole():
    with env_server(hosted(num_envs=8)) as server:
        envs = RemoteVectorEnv(server.address)
        observation, _ = envs.reset(seed=0)
        envs.action_space.seed(0)
        assert observation.shape == (8, 4)
        observation[:] = 0  # the caller's own
        ends = 0
        for _ in range(100):
            observation, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
            assert reward.dtype == np.float64
            ended = terminated | truncated
            ends += ended.sum()
            if ended.any():
                np.testing.assert_array_equal(info["_final_obs"], ended)
                for row in range(8):
                    final = info["final_obs"][row]
                    assert (final is not None) == ended[row]
                    if ended[row]:
                        assert final.dtype == np.float32
                        assert abs(final[2]) > 0.2 or abs(final[0]) > 2.4
                        assert (abs(observation[row]) <= 0.05).all()
        assert ends > 8
        envs.close()


def test_wrappers_of_gymnasium_go_around_it():
    with env_server(hosted(num_envs=4)) as server:
        envs = gym.wrappers.vector.RecordEpisodeStatistics(RemoteVectorEnv(server.address))
        envs.reset(seed=3)
        envs.action_space.seed(3)
        for _ in range(60):
            envs.step(envs.action_space.sample())
        assert len(envs.return_queue) > 4
        assert list(envs.return_queue) == list(envs.length_queue)
        envs.close()


def test_rows_that_differ_and_actions_that_do_not_fit():
    with env_server(hosted(num_envs=2), hosted("Pendulum-v1", name="other")) as server:
        with pytest.raises(ConfigError, match="observation_space: env 'env-0-0' has Box"):
            RemoteVectorEnv(server.address, ["env-0-0", "other-0-0"])
        envs = RemoteVectorEnv(server.address)
        assert envs.env_ids == ["env-0-0"]
        envs.reset()
        with pytest.raises(RemoteError, match="row 1: action 5 is not in"):
            envs.step(np.array([0, 5]))
        with pytest.raises(TypeError, match="seed"):
            envs.reset(seed=[1, 2])
        envs.step(np.array([0, 1]))
        envs.close()


def test_rows_that_come_some_at_a_time_are_refused():
    task, kwargs = "tests.unit.env.test_autoreset:Rows", {"mode": "NextStep"}
    with env_server(hosted(task, num_envs=3, env_kwargs=kwargs)) as server:
        envs = RemoteVectorEnv(server.address)
        envs.reset()
        with pytest.raises(ConfigError, match="gave only its rows .* in the same step"):  # noqa: PT012
            for _ in range(6):
                envs.step(np.zeros((3, 1), np.float32))
        envs.close()


def test_a_failing_row_is_told_and_the_others_are_there():
    with env_server(hosted(f"{ENVS}:Breaking", num_workers=2)) as server:
        envs = RemoteVectorEnv(server.address)
        envs.reset()
        envs.reset()
        actions = np.zeros((2, 1), np.float32)
        envs.step(actions)
        with pytest.raises(RemoteError, match="env 'env-[01]-0'.* the arm fell off"):
            envs.step(actions)
        envs.reset()
        envs.step(actions)
        envs.close()


def test_a_row_that_fails_is_told_when_the_others_have_ended_their_step():
    with env_server(hosted(f"{ENVS}:BreakingOrSlow", num_workers=2)) as server:
        envs = RemoteVectorEnv(server.address)
        envs.reset()
        with pytest.raises(RemoteError, match="env 'env-0-0'.* the arm fell off"):
            envs.step(np.array([[1], [0]], np.float32))
        envs.reset()
        envs.close()
