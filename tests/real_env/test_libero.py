"""LIBERO through real servers, and stepped directly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.real_env.harness import assert_same, collect, in_own_process, row_seeds, step_rows

pytestmark = pytest.mark.real_env

LIMIT = 25


class Direct:
    """LIBERO's own env with the first initial state of a task, and nothing of ours."""

    def __init__(self, suite, index, cameras):
        import os

        from libero.libero import benchmark, get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv

        suite = benchmark.get_benchmark_dict()[suite]()
        task = suite.get_task(index)
        path = os.path.join(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)
        self.state = suite.get_task_init_states(index)[7]
        self.cameras = cameras
        self.env = ControlEnv(
            bddl_file_name=path,
            use_camera_obs=cameras,
            has_offscreen_renderer=cameras,
            has_renderer=False,
            camera_heights=48,
            camera_widths=64,
        )

    def reset(self, seed=None):
        if seed is not None:
            self.env.seed(seed)
        self.env.reset()
        self.env.set_init_state(self.state)
        for _ in range(15):
            observation = self.env.step([0, 0, 0, 0, 0, 0, -1])[0]
        self.steps = 0
        return self.seen(observation), {}

    def step(self, action):
        observation, reward, done, _ = self.env.step(action.astype(np.float64))
        self.steps += 1
        return self.seen(observation), reward, bool(done), self.steps == LIMIT, {}

    def seen(self, observation):
        x, y, z, w = observation["robot0_eef_quat"]
        turn = np.array([x, y, z]) * 2.0 * np.arccos(w) / np.sqrt(1.0 - w * w)
        parts = [observation["robot0_eef_pos"], turn, observation["robot0_gripper_qpos"]]
        seen = {"states": np.concatenate(parts).astype(np.float32)}
        if self.cameras:
            seen["main_images"] = observation["agentview_image"][::-1, ::-1]
            seen["wrist_images"] = observation["robot0_eye_in_hand_image"][::-1, ::-1]
        return seen

    def close(self):
        self.env.close()


def directly(suite, index, cameras, actions):
    return step_rows([Direct(suite, index, cameras)], row_seeds(1), actions)


@pytest.mark.parametrize(
    ("suite", "index", "cameras", "steps"),
    [("libero_spatial", 3, False, 200), ("libero_object", 1, True, 30)],
    ids=["states", "pictures"],
)
async def test_transitions_are_those_of_the_env_itself(tmp_path, suite, index, cameras, steps):
    """30 steps with pictures: a software renderer makes them."""
    env = {
        "backend": "libero",
        "task": f"{suite}/{index}",
        "max_episode_steps": LIMIT,
        "init_params": {"camera_heights": 48, "camera_widths": 64},
        "env_kwargs": {
            "cameras": cameras,
            "task_descriptions": False,
            "specific_reset_id": 7,
        },
    }
    got = await collect(tmp_path, env, steps=steps)
    assert_same(got, in_own_process(directly, suite, index, cameras, got["action"]))
    assert got["truncated"].sum() == steps // LIMIT
    if cameras:
        assert got["observation"]["main_images"].shape == (30, 1, 48, 64, 3)
        assert got["observation"]["main_images"].std() > 10


def options():
    from rlightning.env.libero_env import LiberoEnv
    from rlightning.errors import ConfigError
    from rlightning.types import PolicyResponse
    from rlightning.utils.config import EnvConfig

    def made(task="libero_goal/2", rows=1, **env_kwargs):
        env_kwargs = {"cameras": False, **env_kwargs}
        return LiberoEnv(
            EnvConfig(
                name="l", backend="libero", task=task, seed=5, num_envs=rows, env_kwargs=env_kwargs
            )
        )

    with pytest.raises(ConfigError, match="no suite 'libero_spatail'; it has libero_spatial"):
        made("libero_spatail")
    with pytest.raises(ConfigError, match="the suite has tasks 0 to 9"):
        made("libero_goal/10")
    with pytest.raises(ConfigError, match="specific_reset_id: expected 0 to 49, got 50"):
        made(specific_reset_id=50)
    env = made(use_ordered_reset_state_ids=True)
    firsts = [env._reset() for _ in range(2)]
    assert [first.info["reset_id"] for first in firsts] == [0, 1]
    assert firsts[0].observation["task_descriptions"] == "put the wine bottle on top of the cabinet"
    env_ret = env._step(PolicyResponse(env.env_id, action=np.full(7, 3.0)))
    assert env_ret.executed_action.tolist() == [1.0] * 7
    env.close()
    env = made("libero_goal", specific_reset_id=60)  # the second task, by its number in the suite
    assert env._reset().info["task"] == 1
    env.close()
    env = made(is_eval=True)
    assert [env._reset().info["reset_id"] for _ in range(2)] == [0, 1]
    env.close()
    with pytest.raises(ConfigError, match="video_cfg.save_video: films need cameras: true"):
        made(video_cfg={"save_video": True})
    with tempfile.TemporaryDirectory() as folder:
        env = made(cameras=True, video_cfg={"save_video": True, "video_base_dir": folder})
        env._reset()
        env._step(PolicyResponse(env.env_id, action=np.zeros(7)))
        env.close()
        (film,) = Path(folder).glob("l-*/1.mp4")
        assert film.stat().st_size > 1000
    env = made(rows=2, group_size=2)
    assert env.row_seeds[0] == env.row_seeds[1]
    env.close()


def test_options():
    in_own_process(options)
