"""Remote rows as a `VecEnv` of Stable-Baselines3, on a real server over a real socket."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from tests.integration.gym_client.serving import env_server, hosted
from tests.integration.gym_client.test_vector_env import Telling

pytestmark = [pytest.mark.real_env, pytest.mark.timeout(300)]

TELLING = "tests.integration.gym_client.test_vector_env:Telling"


@pytest.fixture(scope="module")
def kind():
    from rlightning.env.gym_client import RemoteVecEnv

    return RemoteVecEnv


@pytest.mark.parametrize("layout", [(4, 1), (1, 4)], ids=["rows", "workers"])
def test_it_returns_what_its_own_vec_env_does(kind, layout):
    from stable_baselines3.common.vec_env import DummyVecEnv

    rows, workers = layout
    local = DummyVecEnv([Telling] * 4)
    with env_server(hosted(TELLING, num_envs=rows, num_workers=workers)) as server:
        envs = kind(server.address)
        assert envs.num_envs == 4
        for one in (local, envs):
            one.seed(3)
        np.testing.assert_array_equal(envs.reset(), local.reset())
        assert envs.reset_infos == local.reset_infos
        envs.action_space.seed(2)
        ends = 0
        for _ in range(20):
            actions = np.array([envs.action_space.sample() for _ in range(4)])
            got, expected = envs.step(actions), local.step(actions)
            for one, other in zip(got[:3], expected[:3], strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
            for one, other in zip(got[3], expected[3], strict=True):
                final, theirs = (
                    one.pop("terminal_observation", None),
                    other.pop("terminal_observation", None),
                )
                np.testing.assert_array_equal(final, theirs)
                ends += final is not None
                assert one == other
            assert envs.reset_infos == local.reset_infos
        assert ends > 8
        assert envs.get_attr("render_mode") == [None] * 4
        assert envs.env_is_wrapped(gym.Wrapper) == [False] * 4
        with pytest.raises(AttributeError, match="in another process"):
            envs.get_attr("length")
        envs.close()


def test_an_unmodified_ppo_learns_cartpole(kind):
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    with env_server(hosted(num_envs=8)) as server:
        envs = VecMonitor(kind(server.address))
        model = PPO(
            "MlpPolicy",
            envs,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gae_lambda=0.8,
            gamma=0.98,
            learning_rate=1e-3,
            seed=0,
            device="cpu",
        )
        before, _ = evaluate_policy(model, envs, n_eval_episodes=16, deterministic=False)
        model.learn(40_000)
        after, _ = evaluate_policy(model, envs, n_eval_episodes=16, deterministic=False)
        assert before < 100
        assert after > 200
        envs.close()
