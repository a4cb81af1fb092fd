"""envpool through real servers, and stepped directly."""

from __future__ import annotations

import numpy as np
import pytest

from tests.real_env.harness import assert_same, collect, in_own_process, row_seeds

pytestmark = pytest.mark.real_env

ROWS = 3


def directly(actions):
    """Steps all rows; the action of a row that has ended is ignored, and a reset no transition."""
    import envpool

    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=ROWS, seed=row_seeds(1)[0])
    found = [[] for _ in range(ROWS)]
    now, ended = pool.reset()[0].copy(), np.zeros(ROWS, bool)
    while min(map(len, found)) < len(actions):
        taken = [min(len(one), len(actions) - 1) for one in found]
        after, reward, terminated, truncated, _ = pool.step(actions[taken, range(ROWS)])
        for row in np.flatnonzero(~ended):
            outcome = reward[row], terminated[row], truncated[row]
            found[row].append((now[row].copy(), *outcome, after[row].copy()))
        now, ended = after.copy(), terminated | truncated
    names = ("observation", "reward", "terminated", "truncated", "next_observation")
    columns = [list(zip(*one[: len(actions)], strict=True)) for one in found]
    return {n: np.stack([np.stack(one[i]) for one in columns], 1) for i, n in enumerate(names)}


async def test_transitions_are_those_of_the_pool_itself(tmp_path):
    env = {"backend": "envpool", "task": "CartPole-v1", "num_envs": ROWS}
    got = await collect(tmp_path, env)
    assert_same(got, in_own_process(directly, got["action"]))
    assert got["terminated"].sum() > 3 * ROWS


def options():
    from rlightning.env.envpool_env import EnvPoolEnv
    from rlightning.errors import ConfigError
    from rlightning.utils.config import EnvConfig

    def made(task="Pong-v5", rows=2, **env_kwargs):
        kwargs = {"num_envs": rows, "env_kwargs": env_kwargs, "max_episode_steps": 7}
        return EnvPoolEnv(EnvConfig(name="p", backend="envpool", task=task, **kwargs))

    with pytest.raises(ConfigError, match="envpool has no such env; did you mean .*Pong-v5"):
        made("Pong-v55")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'zoom'"):
        made(zoom=3)
    with pytest.raises(ConfigError, match="takes 2 rows or more, got 1"):
        made(rows=1)
    env = made(stack_num=2)
    first = env._reset(seed=5).observation
    assert first.shape == (2, 2, 84, 84)
    assert np.array_equal(env._reset(seed=5).observation, first)
    with pytest.raises(ConfigError, match=r"no options, got \['mode'\]"):
        env._reset(options={"mode": 1})
    env.close()


def test_options():
    in_own_process(options)
