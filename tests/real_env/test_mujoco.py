"""MuJoCo through real servers, and stepped directly."""

from __future__ import annotations

import os

import gymnasium as gym
import pytest

from tests.real_env.harness import assert_same, collect, in_own_process, row_seeds, step_rows

pytestmark = pytest.mark.real_env


def directly(task, rows, actions):
    return step_rows([gym.make(task) for _ in range(rows)], row_seeds(rows), actions)


@pytest.mark.parametrize(
    ("task", "rows", "mode"),
    [("HalfCheetah-v5", 1, "auto"), ("Hopper-v5", 3, "sync"), ("Hopper-v5", 2, "independent")],
)
async def test_transitions_are_those_of_the_env_itself(tmp_path, task, rows, mode):
    env = {"backend": "mujoco", "task": task, "num_envs": rows, "vectorization_mode": mode}
    got = await collect(tmp_path, env)
    assert_same(got, in_own_process(directly, task, rows, got["action"]))
    if task == "Hopper-v5":
        assert got["terminated"].any()  # falls within 200 random steps


def picture(backend):
    os.environ["MUJOCO_GL"] = backend
    env = gym.make("Hopper-v5", render_mode="rgb_array", width=64, height=64)
    env.reset(seed=0)
    frame = env.render()
    env.close()
    return frame


def test_a_picture_without_a_display():
    frame = in_own_process(picture, "egl")
    assert frame.shape == (64, 64, 3)
    assert frame.std() > 5  # not one colour
