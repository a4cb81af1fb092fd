"""Hosted groups: rows, episodes, errors, and where steps run."""

from __future__ import annotations

import socket
import threading

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env import BaseEnv
from rlightning.env.episodes import EpisodeLog, EpisodeRecord
from rlightning.env.hosting import (
    HostedGroup,
    StepPlacement,
    close_groups,
    group_name,
    host_envs,
)
from rlightning.env.lockstep import Round
from rlightning.env.replica import replica_name, replica_seed
from rlightning.errors import ConfigError, EnvError, ResetNeededError
from rlightning.types import ActionSource, EnvRet
from rlightning.utils.config import Config
from tests.unit.env.envs import answer, config

ENVS = "tests.unit.env.envs"


async def hosted(task=f"{ENVS}:Counting", *, depth=1, **values):
    log = EpisodeLog()
    groups = await host_envs([config(task, **values)], pipeline_depth=depth, log=log)
    return groups, log


async def close(groups):
    for group in groups:
        await group.close()


async def test_rows_are_split_into_groups():
    groups = await host_envs(
        [config(num_envs=5, num_workers=2), config(num_envs=1), config(name="b c/d", num_envs=2)],
        pipeline_depth=2,
        seed=3,
    )
    assert [(group.env_id, group.meta.num_envs) for group in groups] == [
        ("test-0-0", 3),
        ("test-0-1", 2),
        ("test-1-0", 3),
        ("test-1-1", 2),
        ("test-2-0", 1),
        ("b_c_d-0-0", 1),
        ("b_c_d-0-1", 1),
    ]
    assert [group.meta.env_id for group in groups] == [group.env_id for group in groups]
    firsts = [await group.reset() for group in groups]
    rows = np.concatenate([env_ret.observation for env_ret in firsts])
    assert len(np.unique(rows, axis=0)) == len(rows)  # every row of every group has its own seed
    await close(groups)


async def test_replicas_differ_in_ids_and_in_seeds():
    firsts = []
    for replica in (None, "one", "two"):
        groups = await host_envs([config(num_envs=2, seed=7)], pipeline_depth=2, replica=replica)
        own = "" if replica is None else f"{replica}-"
        assert [group.env_id for group in groups] == [f"test-{own}0-0", f"test-{own}0-1"]
        firsts += [(await group.reset()).observation for group in groups]
        await close(groups)
    assert len(np.unique(np.concatenate(firsts), axis=0)) == 6


def test_the_seed_of_a_replica_is_always_the_same_and_fits_simulators():
    assert replica_seed(0, "a") == replica_seed(0, "a")
    seeds = {replica_seed(seed, name) for seed in range(20) for name in ("a", "b", "1")}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_replica_may_be_called_as_its_host(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "robot lab/3")
    assert replica_name("auto") == "robot_lab_3"
    assert replica_name("mine") == "mine"
    assert replica_name(None) is None


def test_group_names_fit_into_ids():
    assert group_name("a b/ü" + "x" * 50) == ("a_b__" + "x" * 50)[:40]
    assert group_name("") == "env"


async def test_episodes_steps_and_records():
    (group,), log = await hosted(num_envs=2, seed=4)
    env_ret = await group.reset()
    assert env_ret.episode_id.tolist() == [0, 1]
    assert env_ret.step.tolist() == [0, 0]
    assert (env_ret.last_reward.dtype, env_ret.last_terminated.tolist()) == (
        np.float32,
        [False, False],
    )
    kept = env_ret
    for version in range(1, 4):
        env_ret = await group.step(answer(group.env_id, np.zeros((2, 1)), policy_version=version))
    assert env_ret.episode_id.tolist() == [2, 3]
    assert env_ret.step.tolist() == [0, 0]
    assert kept.episode_id.tolist() == [0, 1]
    assert env_ret.info["final_rows"].tolist() == [0, 1]
    assert env_ret.info["final_observation"].tolist() == [[0, 3], [0, 3]]
    assert group.env_steps == 6
    records = log.since(0)
    assert [(r.row, r.episode_id, r.episode_return, r.length) for r in records] == [
        (0, 0, 6.0, 3),
        (1, 1, 6.0, 3),
    ]
    assert {(r.policy_version, r.reason, r.env_id) for r in records} == {
        (3, "terminated", "test-0-0")
    }
    assert len({r.seed for r in records}) == 2
    for _ in range(4):
        env_ret = await group.step(answer(group.env_id, np.zeros((2, 1))))
    assert [r.reason for r in log.since(2)] == ["truncated", "truncated"]
    await close([group])


async def test_a_scalar_env_is_a_group_of_one_row():
    (group,), log = await hosted(num_envs=1)
    env_ret = await group.reset()
    assert env_ret.observation.shape == (1, 2)
    for step in range(1, 4):
        env_ret = await group.step(answer(group.env_id, np.array([[9.0]])))
        assert env_ret.last_reward.tolist() == [1.0 + step]
        assert env_ret.action_source.tolist() == [ActionSource.CLIPPED]
        assert env_ret.executed_action.tolist() == [[1.0]]
    assert env_ret.observation.tolist() == [[1, 0]]
    assert env_ret.last_terminated.tolist() == [True]
    assert env_ret.info["final_rows"].tolist() == [0]
    assert env_ret.info["final_observation"].tolist() == [[0, 3]]
    assert env_ret.info["final_info"]["k"].tolist() == [3]
    assert env_ret.info["episode_info"]["return"].tolist() == [9.0]
    assert (env_ret.step.tolist(), env_ret.episode_id.tolist()) == ([0], [1])
    assert [r.length for r in log.since(0)] == [3]
    await close([group])


async def test_a_scalar_env_with_nested_spaces():
    (group,), _ = await hosted(f"{ENVS}:Nested")
    env_ret = await group.reset()
    action = {"grip": np.array([1]), "move": np.array([[0.0, 5.0]])}
    for _ in range(2):
        env_ret = await group.step(answer(group.env_id, action))
    assert env_ret.observation["image"].shape == (1, 2, 2, 3)
    assert env_ret.observation["task"] == ("step 0",)
    assert env_ret.info["final_observation"]["pose"][0].shape == (1, 3)
    assert env_ret.executed_action["move"].tolist() == [[0.0, 1.0]]
    await close([group])


async def test_an_env_that_raises_is_named_and_its_episodes_are_cut():
    (group,), log = await hosted(f"{ENVS}:Breaking", num_envs=2)
    await group.reset()
    for _ in range(4):
        await group.step(answer(group.env_id, np.zeros((2, 1)), policy_version=5))
    with pytest.raises(EnvError, match="'test-0-0': step raised RuntimeError: the arm fell off"):
        await group.step(answer(group.env_id, np.zeros((2, 1))))
    env_ret = await group.reset()
    assert env_ret.episode_id.tolist() == [4, 5]
    assert [(r.reason, r.length, r.policy_version) for r in log.since(2)] == [("cut", 1, 5)] * 2
    await close([group])


async def test_a_step_needs_a_reset():
    (group,), _ = await hosted()
    with pytest.raises(ResetNeededError):
        await group.step(answer(group.env_id, np.zeros((1, 1))))
    await close([group])


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("CartPol-v1", ConfigError, "did you mean CartPole"),
        (f"{ENVS}:WrongShape", EnvError, r"expected float32\[5\], got float32\[2\]"),
    ],
)
async def test_what_cannot_be_hosted_is_refused(task, error, message):
    before = threading.active_count()
    with pytest.raises(error, match=message):
        await hosted(task, num_envs=2)
    assert threading.active_count() <= before + 1  # its thread may be about to end


class Rows(BaseEnv):
    """Two rows that end in their second step; `leaves_out` breaks the contract."""

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        self.env = gym.Env()
        self.env.observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        self.env.action_space = gym.spaces.Discrete(2)
        self.threads = set()

    def reset(self, *args, **kwargs):
        self.steps = 0
        shape = (2, self.config.env_kwargs.get("width", 1))
        return EnvRet(self.env_id, np.zeros(shape, np.float32))

    def step(self, policy_resp):
        self.threads.add(threading.current_thread())
        self.steps += 1
        ended = self.steps % 2 == 0
        reward = [1.0, 2.0, 3.0] if self.config.env_kwargs.get("three") else [1.0, 2.0]
        return EnvRet(self.env_id, np.ones((2, 1), np.float32), reward, [ended] * 2, [False] * 2)


async def rows(**env_kwargs):
    env_config = config(num_envs=2, backend="tests.unit.env.test_hosting:Rows")
    env_config.env_kwargs = Config(**env_kwargs)
    return (await host_envs([env_config], pipeline_depth=1))[0]


async def test_a_users_env_of_rows_is_checked():
    group = await rows()
    await group.reset()
    env_ret = await group.step(answer(group.env_id, [0, 0]))
    assert (env_ret.last_reward.dtype, env_ret.last_terminated.dtype) == (np.float32, bool)
    with pytest.raises(EnvError, match=r"rows \[0, 1\] ended without final_rows"):
        await group.step(answer(group.env_id, [0, 0]))
    await group.close()
    with pytest.raises(EnvError, match=r"expected float32\[2, 1\], got float32\[2, 4\]"):
        await rows(width=4)
    group = await rows(three=True)
    await group.reset()
    with pytest.raises(EnvError, match=r"last_reward: expected \[2\], got \[3\]"):
        await group.step(answer(group.env_id, [0, 0]))
    await group.close()


async def test_commands_reach_the_env():
    group = await rows()
    seen = []
    await group.call(lambda env: seen.append((env.env_id, threading.current_thread().name)))
    ((env_id, thread),) = seen
    assert env_id == group.env_id
    assert thread.startswith(f"env-{group.env_id}")
    await group.close()


async def test_cheap_steps_move_to_the_event_loop():
    (group,), _ = await hosted("CartPole-v1", num_envs=2)
    await group.reset()
    group.placement = StepPlacement(10**9)
    for _ in range(StepPlacement.WINDOW):
        assert not group.placement.inline
        await group.step(answer(group.env_id, np.zeros(2, int)))
    assert group.placement.inline
    await group.step(answer(group.env_id, np.zeros(2, int)))
    await close([group])


def test_placement():
    placement = StepPlacement(200)
    for _ in range(StepPlacement.WINDOW):
        placement.record(100e-6)
    assert placement.inline
    placement.record(300e-6)
    assert placement.inline
    placement.record(2100e-6)
    assert not placement.inline
    for _ in range(StepPlacement.WINDOW):
        placement.record(150e-6)
    assert placement.inline
    for _ in range(StepPlacement.WINDOW):
        placement.record(250e-6)
    assert not placement.inline
    never = StepPlacement(0)
    for _ in range(100):
        never.record(0.0)
    assert not never.inline


@pytest.mark.parametrize("tell", ["record", "record_reset"])
def test_a_group_that_would_stop_the_loop_for_long_stays_in_its_thread(tell):
    placement = StepPlacement(200)
    for _ in range(StepPlacement.WINDOW):
        placement.record(100e-6)
    assert placement.inline
    getattr(placement, tell)(0.6)
    for _ in range(4 * StepPlacement.WINDOW):
        assert not placement.inline
        placement.record(100e-6)


async def test_a_group_tells_what_it_is_busy_with():
    seen = []

    class Looking(BaseEnv):
        def init(self):
            return self.get_metadata()

        def get_observation_space(self):
            return gym.spaces.Discrete(2)

        def get_action_space(self):
            return gym.spaces.Discrete(2)

        def reset(self):
            seen.append(("reset", activity.state, activity.busy_since_ns > 0))
            return EnvRet(self.env_id, 0)

        def step(self, policy_resp):
            seen.append(("step", activity.state, activity.busy_since_ns > 0))
            return EnvRet(self.env_id, 0, 0.0, True, False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlightning.env.hosting.make_base_env", Looking)
        group = HostedGroup(config(num_envs=1), "e", worker_index=0, log=EpisodeLog())
        activity = group.activity
        await group.start()
        await group.reset()
        await group.step(answer("e", np.zeros(1, int)))
        await group.close()
    # The reset within the step is told of as one.
    assert seen == [("reset", 2, True), ("step", 1, True), ("reset", 2, True)]
    assert (activity.state, activity.busy_since_ns) == (1, 0)


def record(number):
    return EpisodeRecord("e", 0, number, 1.0, 1, None, 0, "terminated", 0)


def test_the_log_keeps_the_last_and_readers_have_cursors():
    log = EpisodeLog(capacity=3)
    assert (log.since(0), log.cursor) == ([], 0)
    for number in range(5):
        log.append(record(number))
    assert [r.episode_id for r in log.since(0)] == [2, 3, 4]
    assert [r.episode_id for r in log.since(4)] == [4]
    assert log.since(log.cursor) == []
    assert [r.episode_id for r in log.since(99)] == [2, 3, 4]  # of another process's log


async def test_a_round_of_lockstep_begins_the_same_whatever_came_before():
    async def play(steps_before, begin, index=0):
        groups, _ = await hosted("CartPole-v1", num_envs=2)
        await groups[0].reset()
        for _ in range(steps_before):
            await groups[0].step(answer(groups[0].env_id, np.array([1, 0])))
        one = Round(groups[0], index, begin, seed=3)
        first = await one.reset()
        then = await one.step(answer(groups[0].env_id, np.array([0, 1])))
        again = await one.reset()  # as after an error of the env
        await close(groups)
        return [first, then, again]

    for one, other in zip(await play(0, 16), await play(50, 16), strict=True):
        np.testing.assert_array_equal(one.observation, other.observation)
        np.testing.assert_array_equal(one.episode_id, other.episode_id)
    first, _, again = await play(0, 16)
    assert not np.array_equal(first.observation, again.observation)
    assert len({*first.episode_id.tolist(), *again.episode_id.tolist()}) == 4
    for other in (await play(0, 17), await play(0, 16, index=1)):
        assert not np.array_equal(first.observation, other[0].observation)
    assert first.episode_id.max() + 1000 < (await play(0, 17))[0].episode_id.min()


class Stamped(BaseEnv):
    """One row whose every step ends its episode; its observations are stamped 1, 2, 3."""

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        self.env = gym.Env()
        self.env.observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
        self.env.action_space = gym.spaces.Discrete(2)
        self.seen = 0

    def reset(self, *args, **kwargs):
        self.seen += 1
        return EnvRet(self.env_id, np.zeros(1, np.float32), ts_observed_ns=self.seen)

    def step(self, policy_resp):
        env_ret = self.reset()
        env_ret.last_terminated = True
        return env_ret


async def test_the_stamp_of_an_observation_is_its_own_where_an_episode_ends():
    (group,) = await host_envs([config(backend="tests.unit.env.test_hosting:Stamped")])
    assert (await group.reset()).ts_observed_ns == 1
    env_ret = await group.step(answer(group.env_id, np.array([0])))
    assert env_ret.info["final_rows"].tolist() == [0]
    assert env_ret.ts_observed_ns == 3  # that of the reset: the second one is the last observation
    await group.close()


async def test_a_group_that_cannot_be_closed_keeps_no_other_one_open(caplog):
    groups = await host_envs([config(f"{ENVS}:Unclosable"), config("CartPole-v1")])
    seen = []
    await groups[1].call(lambda env: seen.append(env))
    await close_groups(groups)
    assert caplog.messages == ["env 'test-0-0': close raised OSError: the arm is stuck"]
    assert seen[0].env is None
    await groups[0].close()  # again, without its thread
