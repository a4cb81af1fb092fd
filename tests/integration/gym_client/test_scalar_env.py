"""One remote env as a `gymnasium.Env`, on a real server over a real socket."""

from __future__ import annotations

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlightning.env.gym_client import RemoteEnv
from rlightning.env.utils.making import make_env
from rlightning.env.utils.spaces import mismatch
from rlightning.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    PreconditionError,
    RemoteError,
    UnavailableError,
)
from rlightning.utils.config import EnvConfig
from tests.integration.gym_client.serving import FAST, env_server, hosted

ENVS = "tests.unit.env.envs"
pytestmark = pytest.mark.timeout(60)


def same(got, expected):
    """Asserts that two nestings are equal in structure, dtype and value."""
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            same(got[key], value)
    elif isinstance(expected, tuple):
        assert isinstance(got, tuple)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
@pytest.mark.filterwarnings("ignore:.*not having a spec.*", "ignore:.*Box .* space .*")
def test_gymnasiums_checker_is_content(task):
    with env_server(hosted(task)) as server:
        env = RemoteEnv(server.address)
        check_env(env)
        env.close()


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", f"{ENVS}:Nested", "FrozenLake-v1"])
def test_it_is_the_env_that_it_stands_for(task):
    local = make_env(EnvConfig(name="x", backend="gymnasium", task=task))
    with env_server(hosted(task)) as server:
        env = RemoteEnv(server.address, "env-0-0")
        assert env.observation_space == local.observation_space
        assert env.action_space == local.action_space
        env.action_space.seed(5)
        for episode in range(3):
            seed = 7 if episode != 1 else None  # then it goes on with its own
            same(env.reset(seed=seed), local.reset(seed=seed))
            ended = False
            while not ended:
                action = env.action_space.sample()
                got, expected = env.step(action), local.step(action)
                same(got, expected)
                assert mismatch(env.observation_space, got[0], exact=True) is None
                ended = got[2] or got[3] or episode == 2
        env.close()


class Picky(gym.Env):
    """Tells its options and what it was told; its infos hold what cannot be sent."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 1, {"options": str(options), "draw": float(self.np_random.random())}

    def step(self, action):
        return 2, 0.1, False, False, {"fine": 3, "simulator": object()}


def test_seeds_options_and_infos_travel():
    with env_server(hosted(f"{__name__}:Picky")) as server:
        env = RemoteEnv(server.address)
        _, info = env.reset(seed=3, options={"level": [1, 2]})
        assert info["options"] == "{'level': [1, 2]}"
        assert env.reset(seed=3)[1]["draw"] == info["draw"]
        assert env.reset(seed=4)[1]["draw"] != info["draw"]
        observation, reward, _, _, info = env.step(1)
        assert (observation, reward, info) == (2, 0.1, {"fine": 3})
        env.close()


def test_each_env_has_one_driver_and_is_free_again_at_once():
    with env_server(hosted(num_workers=2)) as server:
        first, second = RemoteEnv(server.address), RemoteEnv(server.address)
        assert {first.env_id, second.env_id} == {"env-0-0", "env-1-0"}
        with pytest.raises(AlreadyExistsError, match="is driven by client driver-"):
            RemoteEnv(server.address, connect_timeout_s=0.5)
        with pytest.raises(AlreadyExistsError, match="env-0-0"):
            RemoteEnv(server.address, "env-0-0", connect_timeout_s=0.5)
        first.close()
        first.close()
        third = RemoteEnv(server.address)
        assert third.env_id == first.env_id
        for env in (second, third):
            env.reset()
            env.close()


def test_what_cannot_be_done_is_said():
    with env_server(hosted(), hosted(name="rows", num_envs=2)) as server:
        with pytest.raises(NotFoundError, match="there is no env 'nowhere'"):
            RemoteEnv(server.address, "nowhere")
        with pytest.raises(ConfigError, match="expected one row of one agent, got 2 of Box"):
            RemoteEnv(server.address, "rows-0-0")
        env = RemoteEnv(server.address)
        with pytest.raises(PreconditionError, match="reset it before the first step"):
            env.step(0)
        env.reset()
        with pytest.raises(RemoteError, match="action"):
            env.step(7)
        env.step(0)
        env.close()
        with pytest.raises(ConfigError, match="the env is closed"):
            env.step(0)


def test_an_env_that_raises_says_so_and_lives_on():
    with env_server(hosted(f"{ENVS}:Breaking")) as server:
        env = RemoteEnv(server.address)
        action = np.zeros(1, np.float32)
        env.reset()
        env.reset()
        env.step(action)
        with pytest.raises(RemoteError, match="the arm fell off"):
            env.step(action)
        env.reset()
        env.step(action)
        env.close()


def test_nobody_there():
    with pytest.raises(UnavailableError, match="127.0.0.1:1"):
        RemoteEnv("127.0.0.1:1", connect_timeout_s=0.5)


def test_a_server_that_is_gone_for_good():
    with env_server(hosted()) as server:
        env = RemoteEnv(server.address, rpc=FAST, reconnect_timeout_s=1.0)
        env.reset()
        server.stop()
        with pytest.raises(UnavailableError, match=r"no connection for 1 s: .*cannot connect"):
            env.step(0)
        env.close()
        server.start()


def test_a_restarted_server_wants_a_reset():
    with env_server(hosted()) as server:
        env = RemoteEnv(server.address, rpc=FAST)
        env.reset()
        env.step(0)
        server.stop()
        server.start()
        with pytest.raises(PreconditionError, match="reset") as raised:
            env.step(0)
        assert raised.value.reason in ("STATE_LOST", "RESET_NEEDED")
        env.reset(seed=1)
        env.step(0)
        env.close()


def test_libraries_of_others_are_asked_for_by_name_and_only_when_needed():
    code = """
import sys
for name in ("pettingzoo", "stable_baselines3", "torch"):
    sys.modules[name] = None  # as if it were not installed
import rlightning.env.gym_client as gym_client
for name in ("RemoteParallelEnv", "RemoteVecEnv"):
    try:
        getattr(gym_client, name)
    except ImportError as error:
        print(error)
print(hasattr(gym_client, "RemoteNothing"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "RemoteParallelEnv needs PettingZoo: pip install 'rlightning[pettingzoo]'",
        "RemoteVecEnv needs Stable-Baselines3: pip install 'rlightning[sb3]'",
        "False",
    ]


def test_an_exit_without_close_frees_the_env():
    with env_server(hosted(), rpc=FAST.model_copy(update={"lease_s": 30.0})) as server:
        code = f"""
from rlightning.env.gym_client import RemoteEnv
env = RemoteEnv("{server.address}")
env.reset()
raise SystemExit(3)
"""
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
        assert done.returncode == 3
        env = RemoteEnv(server.address, connect_timeout_s=1.0)  # else a lease of 30 s
        env.reset()
        env.close()


def test_a_nan_action_is_an_error_and_the_next_one_is_not():
    with env_server(hosted("Pendulum-v1")) as server:
        env = RemoteEnv(server.address)
        env.reset()
        with pytest.raises(RemoteError, match="finite"):
            env.step(np.full(1, np.nan, np.float32))
        assert len(env.step(np.zeros(1, np.float32))) == 5
        env.close()
