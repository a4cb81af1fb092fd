"""Which vector env stands behind a task."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.errors import ConfigError, EnvError
from rlightning.utils.config import Config
from tests.unit.env.envs import answer, config
from tests.unit.env.vector_envs import Vector

HERE = "tests.unit.env.vector_envs"


def made(task, **values):
    return GymnasiumEnv(config(task, num_envs=3, **values))


def test_a_native_vector_env_that_resets_in_the_same_step_is_used():
    env = made(f"{HERE}:TestNative-v0", seed=1, env_kwargs=Config(offset=5))
    assert isinstance(env.env, Vector)
    assert env.env.autoreset_mode is AutoresetMode.SAME_STEP
    first = env._reset()
    assert env.env.seed == env.row_seeds[0]
    for _ in range(3):
        env_ret = env._step(answer(env.env_id, np.zeros((3, 1))))
    assert first.observation.tolist() == [[5, 5]] * 3  # not the env's own buffer
    assert env_ret.observation.tolist() == [[0, 0]] * 3
    assert env_ret.info["final_rows"].tolist() == [0, 1, 2]
    assert env_ret.info["final_observation"].tolist() == [[3, 3]] * 3


@pytest.mark.parametrize(
    ("task", "env_kwargs"),
    [
        ("TestScaled-v0", {}),  # its spaces are not those of the single env
        ("TestAbsent-v0", {}),  # an extra that is not installed
        ("TestStrict-v0", {}),  # no say in when it resets
        ("TestNative-v0", {"shift": 1}),  # only the single env takes it
    ],
)
def test_single_envs_are_stepped_where_the_native_one_would_differ(task, env_kwargs):
    env = made(f"{HERE}:{task}", env_kwargs=Config(**env_kwargs))
    assert isinstance(env.env, SyncVectorEnv)


def test_a_vector_env_of_a_module():
    env = made(f"{HERE}:Vector", env_kwargs=Config(offset=2))
    assert env._reset().observation.tolist() == [[2, 2]] * 3
    with pytest.raises(ConfigError, match="nope"):
        made(f"{HERE}:Vector", env_kwargs=Config(nope=1))


def test_who_steps_the_rows_can_be_said():
    assert isinstance(made(f"{HERE}:TestNative-v0", vectorization_mode="sync").env, SyncVectorEnv)
    native = made(f"{HERE}:TestNative-v0", vectorization_mode="vector_entry_point")
    assert isinstance(native.env, Vector)
    with pytest.raises(ConfigError, match="'.*TestScaled-v0' has no vector env that takes these"):
        made(f"{HERE}:TestScaled-v0", vectorization_mode="vector_entry_point")


def test_a_vector_env_that_hides_final_observations_is_refused():
    env = made(f"{HERE}:Silent")
    env._reset()
    response = answer(env.env_id, np.zeros((3, 1)))
    env._step(response)
    env._step(response)
    with pytest.raises(EnvError, match=r"rows \[0, 1, 2\] ended without info\['final_obs'\]"):
        env._step(response)
