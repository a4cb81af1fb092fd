"""Atari through real servers, and stepped directly."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from tests.real_env.harness import (
    Recorder,
    assert_same,
    collect,
    in_own_process,
    row_seeds,
    step_rows,
)

pytestmark = pytest.mark.real_env

LIMIT = 60


def frames(task, rows, actions):
    import ale_py

    gym.register_envs(ale_py)
    envs = [gym.make(task, max_episode_steps=LIMIT) for _ in range(rows)]
    return step_rows(envs, row_seeds(rows), actions)


def preprocessed(task, rows, actions):
    import ale_py

    gym.register_envs(ale_py)
    envs = []
    for _ in range(rows):
        env = gym.wrappers.AtariPreprocessing(gym.make(task, frameskip=1), noop_max=10)
        envs.append(gym.wrappers.TimeLimit(gym.wrappers.FrameStackObservation(env, 3), LIMIT))
    return step_rows(envs, row_seeds(rows), actions)


def natively(game, rows, actions):
    from ale_py import AtariVectorEnv

    env = AtariVectorEnv(
        game,
        rows,
        autoreset_mode="SameStep",
        max_num_frames_per_episode=4 * LIMIT,
        repeat_action_probability=0.25,
        noop_max=10,
        reward_clipping=False,
        use_fire_reset=False,
    )
    recorder = Recorder()
    now, _ = env.reset(seed=np.array(row_seeds(rows)))
    for action in actions:
        after, reward, terminated, truncated, info = env.step(action)
        ended = terminated | truncated
        last = np.where(ended[:, None, None, None], info.get("final_obs", after), after)
        recorder.add(now, reward.astype(np.float32), terminated, truncated, last)
        now = after.copy()
    return recorder.columns()


@pytest.mark.parametrize(
    ("task", "rows", "more", "directly"),
    [
        ("ALE/Breakout-v5", 1, {}, frames),
        ("ALE/Breakout-v5", 2, {"init_params": {"noop_max": 10, "frame_stack": 3}, "vectorization_mode": "sync"}, preprocessed),
    ],
    ids=["frames", "preprocessed"],
)  # fmt: skip
async def test_transitions_are_those_of_the_env_itself(tmp_path, task, rows, more, directly):
    env = {"backend": "ale", "task": task, "num_envs": rows, "max_episode_steps": LIMIT, **more}
    got = await collect(tmp_path, env)
    assert_same(got, in_own_process(directly, task, rows, got["action"]))
    assert got["truncated"].any()


async def test_transitions_are_those_of_the_native_vector_env(tmp_path):
    env = {
        "backend": "ale",
        "task": "ALE/SpaceInvaders-v5",
        "num_envs": 4,
        "max_episode_steps": LIMIT,
        "init_params": {"noop_max": 10},
        "vectorization_mode": "vector_entry_point",
    }
    got = await collect(tmp_path, env)
    assert got["observation"].shape == (200, 4, 4, 84, 84)
    assert_same(got, in_own_process(natively, "space_invaders", 4, got["action"]))
    assert got["truncated"].sum() >= 12
