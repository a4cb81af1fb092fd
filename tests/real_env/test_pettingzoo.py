"""PettingZoo's parallel envs through real servers, and stepped directly."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.real_env.harness import Recorder, _stack, assert_same, collect, in_own_process, row_seeds

pytestmark = pytest.mark.real_env

LIMIT = 30


def directly(module, kwargs, rows, actions):
    envs = [importlib.import_module(module).parallel_env(**kwargs) for _ in range(rows)]
    agents = envs[0].possible_agents
    recorder = Recorder()
    seeds = row_seeds(rows)
    now = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    for t in range(len(actions[agents[0]])):
        outcomes = []
        for i, env in enumerate(envs):
            outcomes.append(env.step({agent: actions[agent][t, i] for agent in env.agents}))
        after = [outcome[0] for outcome in outcomes]
        recorder.add(
            _stack(now),
            *(
                {a: np.array([outcome[k][a] for outcome in outcomes], dtype) for a in agents}
                for k, dtype in ((1, np.float32), (2, bool), (3, bool))
            ),
            _stack(after),
        )
        now = [
            outcome[0] if env.agents else env.reset()[0]
            for env, outcome in zip(envs, outcomes, strict=True)
        ]
    return recorder.columns()


@pytest.mark.parametrize("rows", [1, 2])
async def test_transitions_are_those_of_the_env_itself(tmp_path, rows):
    kwargs = {"N": 2, "max_cycles": LIMIT, "continuous_actions": False}
    env = {
        "backend": "pettingzoo",
        "task": "mpe2.simple_spread_v3",
        "num_envs": rows,
        "env_kwargs": kwargs,
    }
    got = await collect(tmp_path, env)
    expected = in_own_process(directly, "mpe2.simple_spread_v3", kwargs, rows, got["action"])
    assert_same(got, expected)
    assert set(got["reward"]) == {"agent_0", "agent_1"}
    assert got["truncated"]["agent_0"].sum() == rows * (200 // LIMIT)
