"""ManiSkill on the CPU through real servers, and stepped directly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from tests.real_env.harness import assert_same, collect, in_own_process, row_seeds, step_rows

pytestmark = pytest.mark.real_env

LIMIT = 40


def made(obs_mode):
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    kwargs = {"sensor_configs": {"width": 32, "height": 32}} if obs_mode == "rgb" else {}
    env = gym.make(
        "PickCube-v1",
        obs_mode=obs_mode,
        control_mode="pd_ee_delta_pose",
        sim_backend="cpu",
        render_backend="cpu",
        max_episode_steps=LIMIT,
        enhanced_determinism=True,
        **kwargs,
    )
    return CPUGymWrapper(env)


def states(rows, actions):
    return step_rows([made("state") for _ in range(rows)], row_seeds(rows), actions)


class Picture(gym.ObservationWrapper):
    def observation(self, observation):
        picture = observation["sensor_data"]["base_camera"]["rgb"]
        return {"images": picture.transpose(2, 0, 1)}


def pictures(actions):
    return step_rows([Picture(made("rgb"))], row_seeds(1), actions)


async def test_states_are_those_of_the_env_itself(tmp_path):
    env = {
        "backend": "maniskill",
        "task": "PickCube-v1",
        "num_envs": 2,
        "max_episode_steps": LIMIT,
        "policy_setup": "panda",
        "init_params": {"obs_mode": "state", "control_mode": "pd_ee_delta_pose"},
    }
    got = await collect(tmp_path, env)
    assert_same(got, in_own_process(states, 2, got["action"]))
    assert got["truncated"].sum() == 2 * 200 // LIMIT


async def test_pictures_are_those_of_the_env_itself(tmp_path):
    """60 steps: a software renderer makes the pictures."""
    env = {
        "backend": "maniskill",
        "task": "PickCube-v1",
        "max_episode_steps": LIMIT,
        "policy_setup": "panda",
        "init_params": {
            "obs_mode": "rgb",
            "control_mode": "pd_ee_delta_pose",
            "sensor_configs": {"width": 32, "height": 32},
        },
        "env_kwargs": {"camera": "base_camera", "task_descriptions": False},
    }
    got = await collect(tmp_path, env, steps=60)
    assert_same(got, in_own_process(pictures, got["action"]))
    assert got["observation"]["images"].shape == (60, 1, 3, 32, 32)
    assert got["observation"]["images"].std() > 10


def options():
    from rlightning.env.maniskill_env import ManiskillEnv
    from rlightning.errors import ConfigError
    from rlightning.types import PolicyResponse
    from rlightning.utils.config import EnvConfig

    def made(**values):
        values.setdefault(
            "init_params", {"obs_mode": "rgb", "sensor_configs": {"width": 32, "height": 32}}
        )
        defaults = {
            "name": "m",
            "backend": "maniskill",
            "task": "PickCube-v1",
            "policy_setup": "panda",
            "seed": 3,
        }
        return ManiskillEnv(EnvConfig(**{**defaults, **values}))

    with pytest.raises(ConfigError, match="camera: 'nose' gives no picture; .*: base_camera"):
        made(env_kwargs={"camera": "nose"})
    with pytest.raises(ConfigError, match="env_kwargs.zoom: no such option"):
        made(env_kwargs={"zoom": 3})
    with pytest.raises(ConfigError, match="sim_backend: expected 'cpu', got 'gpu'"):
        made(init_params={"sim_backend": "gpu"})
    env = made(
        max_episode_steps=2,
        env_kwargs={"camera": "base_camera", "use_fixed_reset_state_ids": True, "use_rel_reward": True, "ignore_terminations": True, "binary_gripper": True},
    )  # fmt: skip
    first = env._reset()
    assert first.observation["task_descriptions"] == "PickCube-v1"
    rewards = []
    action = np.zeros(env.get_action_space().shape, np.float32)
    for _ in range(2):
        env_ret = env._step(PolicyResponse(env.env_id, action=action))
        rewards.append(env_ret.last_reward)
    assert abs(rewards[1]) < 0.1 < rewards[0] or rewards[0] < 0.1  # what it has grown by
    assert env_ret.last_truncated
    assert {"success_once", "success_at_end", "return", "reward"} <= set(
        env_ret.info["episode_info"]
    )
    again = env._reset()
    assert np.array_equal(again.observation["images"], first.observation["images"])
    env.close()
    with pytest.raises(ConfigError, match="env_kwargs.auto_reset: several rows reset"):
        made(num_envs=2, env_kwargs={"auto_reset": False})
    with tempfile.TemporaryDirectory() as folder:
        video = {"save_video": True, "info_on_video": True, "video_base_dir": folder}
        small = {"width": 32, "height": 32}
        for params, camera in (
            ({"obs_mode": "rgb", "sensor_configs": small}, {"camera": "base_camera"}),
            ({"obs_mode": "state", "human_render_camera_configs": small}, {}),  # what it renders
        ):
            env_kwargs = {"video_cfg": video, **camera}
            env = made(max_episode_steps=1, init_params=params, env_kwargs=env_kwargs)
            action = np.zeros(env.get_action_space().shape, np.float32)
            env._reset()
            env._step(PolicyResponse(env.env_id, action=action))
            env.close()
        sizes = sorted(film.stat().st_size for film in Path(folder).glob("m-*/1.mp4"))
        assert len(sizes) == 2
        assert sizes[0] > 500


def test_options_and_metrics():
    in_own_process(options)
