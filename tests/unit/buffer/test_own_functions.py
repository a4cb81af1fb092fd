"""Functions of the user make what is stored."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.buffer.utils import utils
from rlightning.buffer.utils.preprocessors import BoxFlattenPreprocessor
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from tests.unit.buffer.lone_env import add, replay, step
from tests.unit.buffer.scripted import meta


def test_the_default_postprocess_function_agrees_with_the_buffer() -> None:
    buffer = replay(auto_truncate_episode=True)
    add(buffer, 5, ends=True)
    rets, responses = zip(*(step(t, done=t == 4) for t in range(5)), strict=True)
    episode = {name: [ret.to_dict()[name] for ret in rets] for name in rets[0].to_dict()}
    episode |= {name: [r.to_dict()[name] for r in responses] for name in ("action", "value")}
    stored = buffer.get_all()
    for name, column in default_postprocess_fn(episode).items():
        np.testing.assert_array_equal(column, stored[name])
        assert column.dtype == stored[name].dtype


def test_preprocessors_see_every_observation_of_a_transition() -> None:
    space = gym.spaces.Box(-1, 1, (2, 2), np.float32)
    buffer = ReplayBuffer(
        BufferConfig(type="ReplayBuffer", capacity=10, auto_truncate_episode=True),
        obs_preprocessor=BoxFlattenPreprocessor(space),
        reward_preprocessor=lambda reward: reward * 10,
    )
    buffer.init([meta(2, observation=space)])
    for t in range(2):
        ends = np.array([t == 1, t == 1])
        env_ret = EnvRet(
            "env", np.full((2, 2, 2), t, np.float32), np.full(2, t), ends, ~ends & ends
        )
        if t:
            env_ret.info = {
                "final_rows": [0, 1],
                "final_observation": np.full((2, 2, 2), 7, np.float32),
            }
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=np.zeros(2)))
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["next_observation"], np.full((2, 4), 7))
    np.testing.assert_array_equal(columns["reward"], [10, 10])


def test_own_preprocess_functions_decide_what_is_stored() -> None:
    def preprocess(data: dict, env_ret: Any, response: Any, *functions: Any) -> dict:
        assert len(functions) == 4
        return {
            "observation": env_ret.observation[:1],
            "last_reward": env_ret.last_reward,
            "last_terminated": False,
            "last_truncated": False,
            "doubled": 2 * response.action,
        }

    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=10), preprocess_fn=preprocess)
    buffer.init([EnvMeta("env")])
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    assert buffer.get_all()["observation"].shape == (2, 1)
    np.testing.assert_array_equal(buffer.get_all()["doubled"], [0, 20])


@pytest.mark.parametrize(
    "functions",
    [
        ("obs_preprocessor", "env_ret_preprocess_fn"),
        ("reward_preprocessor", "preprocess_fn"),
        ("env_ret_preprocess_fn", "preprocess_fn"),
        ("policy_resp_preprocess_fn", "preprocess_fn"),
    ],
)
def test_functions_that_exclude_each_other(functions: tuple[str, str]) -> None:
    config = BufferConfig(type="ReplayBuffer", capacity=10)
    for name in functions:
        ReplayBuffer(config, **{name: lambda *args: args[0]})
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBuffer(config, **{name: lambda *args: args[0] for name in functions})


@pytest.mark.parametrize(
    "names",
    [
        ("obs_preprocessor", "reward_preprocessor", "policy_resp_preprocess_fn", "postprocess_fn"),
        ("env_ret_preprocess_fn", "policy_resp_preprocess_fn", "postprocess_fn"),
        ("preprocess_fn", "postprocess_fn"),
    ],
)
def test_functions_that_go_together(names: tuple[str, ...]) -> None:
    config, called = BufferConfig(type="ReplayBuffer", capacity=10), []

    def noting(name: str) -> Any:
        function = getattr(utils, f"default_{name}")
        return lambda *args: called.append(name) or function(*args)

    buffer = ReplayBuffer(config, **{name: noting(name) for name in names})
    buffer.init()
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    assert buffer.get_all()["reward"].tolist() == [1, 2]
    assert set(called) == set(names)
