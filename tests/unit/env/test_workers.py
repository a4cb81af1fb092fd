"""Envs in worker processes that do not wait for each other."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.env.env_group import EnvGroup
from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.hosting import host_envs
from rlightning.env.pettingzoo_env import PettingZooEnv
from rlightning.errors import ConfigError, EnvError
from rlightning.testing import wait_until
from rlightning.types import BatchedData, MultiAgentEnvRet
from rlightning.utils.config import Config
from tests.unit.env.envs import answer, config
from tests.unit.env.test_adapters import acting

pytestmark = pytest.mark.slow


def gated(folder, rows, mode):
    folder.mkdir(exist_ok=True)
    env_kwargs = Config(folder=str(folder))
    return config(
        "tests.unit.env.envs:Gated", num_envs=rows, vectorization_mode=mode, env_kwargs=env_kwargs, info_keys=["k"]
    )  # fmt: skip


async def transitions(env_config, is_enough):
    """What each env has in a buffer once the list of envs that each step showed is long enough."""
    (group,) = await host_envs([env_config], pipeline_depth=1)
    buffer = ReplayBuffer(
        BufferConfig(type="ReplayBuffer", capacity=100_000, auto_truncate_episode=True)
    )
    buffer.init([group.meta])
    env_ret, shown = await group.reset(), []
    while not is_enough(shown):
        action = (env_ret.observation[:, 1:] / 8.0 - 0.5).astype(np.float32)
        response = answer(group.env_id, action)
        buffer.add_transition(group.env_id, env_ret, response)
        env_ret = await group.step(response)
        shown.append((env_ret.observation[:, 0] // 100).tolist())
    await group.close()
    columns, found = buffer.get_all(), {}
    for i in range(len(columns["reward"])):
        observation = columns["observation"][i]
        found.setdefault(int(observation[0]) // 100, []).append(
            (
                *observation.tolist(),
                *columns["next_observation"][i].tolist(),
                float(columns["action"][i][0]),
                float(columns["reward"][i]),
                bool(columns["terminated"][i]),
                bool(columns["truncated"][i]),
            )
        )
    return {env: sorted(items) for env, items in found.items()}


async def test_a_row_that_stands_still_holds_no_other(tmp_path):
    whole = await transitions(gated(tmp_path / "sync", 3, "sync"), lambda shown: len(shown) == 40)
    gate = tmp_path / "rows" / "closed"
    gate.parent.mkdir()
    gate.touch()

    def is_enough(shown):
        if len(shown) == 30:  # which would never be if the others waited for env 0
            assert sum(0 in some for some in shown) <= 2
            gate.unlink()
        return sum(0 in some for some in shown) == 8

    found = await transitions(gated(tmp_path / "rows", 3, "independent"), is_enough)
    assert set(found) == set(whole) == {0, 1, 2}
    for env, items in found.items():
        common = min(len(items), len(whole[env]))
        assert common >= 6
        assert items[:common] == whole[env][:common]


def test_the_process_of_a_row_that_has_ended_is_made_anew_at_the_reset(tmp_path):
    env = GymnasiumEnv(gated(tmp_path, 2, "independent"))

    def step_until(row, action=0, shown=1):
        """Steps until a row was shown so often; it gets an action that the other one does not."""
        while True:
            actions = np.where(env.env.awaited[:, None] == row, np.float32(action), np.float32(0))
            env_ret = env._step(answer(env.env_id, actions))
            shown -= row in env_ret.row_ids()
            if not shown:
                return int(env_ret.info["pid"][env_ret.row_ids().index(row)])

    env._reset()
    pids = [step_until(row) for row in range(2)]
    with pytest.raises(EnvError, match="ended with code 3"):
        step_until(0, action=1, shown=3)
    with pytest.raises(EnvError, match="cannot be pickled"):
        env.env.reset(seed=[1, threading.Lock()])
    env._reset()  # which takes nothing for its own that came of the one before
    again = [step_until(row) for row in range(2)]
    assert again[1] == pids[1]
    assert again[0] not in (*pids, os.getpid())
    env.close()


def test_envs_of_a_group_have_processes_of_their_own(tmp_path):
    gate = tmp_path / "closed"
    gate.touch()
    group = EnvGroup([gated(tmp_path, 1, "async") for _ in range(2)])
    try:
        group.init()
        slow, fast = group.env_ids
        env_rets, _ = group.reset()
        zero = np.zeros(1, np.float32)
        pids = set()
        for _ in range(2):
            group.step_async(BatchedData([slow, fast], [answer(one, zero) for one in (slow, fast)]))
            env_rets, _ = group.collect_async(wait_all=True)
            pids |= {env_ret.info["pid"] for env_ret in env_rets.values()}
        assert len(pids | {os.getpid()}) == 3
        group.step_async(BatchedData([slow], [answer(slow, zero)]))
        for _ in range(10):
            group.step_async(BatchedData([fast], [answer(fast, zero)]))
            env_rets, _ = group.collect_async()
            assert env_rets.ids() == (fast,)
            if env_rets[fast].last_terminated or env_rets[fast].last_truncated:
                group[fast]._reset()
        gate.unlink()
        wait_until(lambda: group.collect_async()[0].ids() == (slow,))
        with pytest.raises(EnvError, match="ended with code 3"):
            group[fast]._step(answer(fast, np.ones(1, np.float32)))
        group[fast]._reset()  # in another process
    finally:
        gate.unlink(missing_ok=True)
        group.close()


def test_what_independent_rows_are_not_for():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'nonsense'"):
        GymnasiumEnv(config(vectorization_mode="async", env_kwargs=Config(nonsense=1)))
    with pytest.raises(ValueError, match="with driver external.*take async"):
        config(vectorization_mode="independent", driver="external")


class Dying(PettingZooEnv):
    """Ends its process with an action of one; what it is told is in its info."""

    told = ""

    def step(self, policy_resp):
        if self._preprocess_fn(policy_resp)["long"].max() == 1.0:
            os._exit(3)
        env_ret = super().step(policy_resp)
        env_ret.info.update(pid=os.getpid(), told=self.told)
        return env_ret

    def offload(self):
        self.told += "offload"


async def test_any_env_may_have_a_process_of_its_own():
    section = config(
        "tests.unit.env.test_adapters:Leaving",
        backend=f"{__name__}:Dying",
        num_envs=2,
        max_episode_steps=3,
        seed=3,
    )
    (here,) = await host_envs([section], pipeline_depth=1)
    apart = section.model_copy(update={"vectorization_mode": "async"})
    (there,) = await host_envs([apart], pipeline_depth=1)
    assert there.meta == replace(here.meta, env_id=there.meta.env_id)
    await there.call(lambda env: env.offload())
    env_rets = [await group.reset() for group in (here, there)]
    pids = set()
    for number in range(5):
        one, other = env_rets
        assert type(other) is MultiAgentEnvRet
        assert other.env_id == one.env_id
        pids.add(other.info.pop("pid", 0))
        told = other.info.pop("told", "offload")
        one.info = {k: v for k, v in one.info.items() if k not in ("pid", "told")}
        assert told == "offload"
        for name in ("observation", "last_reward", "last_terminated", "last_truncated", "info"):
            assert repr(getattr(one, name)) == repr(getattr(other, name))
        env_rets = [
            await group.step(acting(group.env_id, 0.1 * number, 2)) for group in (here, there)
        ]
    assert len(pids - {0, os.getpid()}) == 1
    assert "reset" in there._env.timing_raw
    with pytest.raises(EnvError, match="ended with code 3"):
        await there.step(acting(there.env_id, 1.0, 2))
    await there.reset()
    env_ret = await there.step(acting(there.env_id, 0.0, 2))
    assert env_ret.info["pid"] not in pids
    for group in (here, there):
        await group.close()


def test_what_steps_its_rows_at_once_says_so():
    section = {"backend": "pettingzoo", "num_envs": 2, "vectorization_mode": "independent"}
    with pytest.raises(ConfigError, match="PettingZooEnv steps all its rows at once: expected"):
        EnvGroup([config("tests.unit.env.test_adapters:Leaving", **section)])
