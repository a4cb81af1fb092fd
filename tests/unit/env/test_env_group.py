"""Groups of envs: which env is stepped, reset, counted, and when."""

from __future__ import annotations

import threading
import warnings
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env import BaseEnv, EnvGroup, build_env_group
from rlightning.env.env_group import EnvStepCounter, ThroughputTracker
from rlightning.errors import ConfigError
from rlightning.types import (
    BatchedData,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from rlightning.utils.config import EnvConfig

HERE = "tests.unit.env.test_env_group"


class Scripted(BaseEnv):
    """Says whether it was reset or stepped; waits for `gate` before a step."""

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        self.gate = threading.Event()
        self.gate.set()
        self.calls = []
        self.ends_at = config.env_kwargs.get("ends_at", 0)
        self.fails = False
        self.space = gym.spaces.Box(-1, 1, tuple(config.env_kwargs.get("shape", (2,))), np.float32)

    def get_observation_space(self):
        return self.space

    def get_action_space(self):
        return self.space

    def reset(self, *args, **kwargs):
        self.calls.append("reset")
        return EnvRet(self.env_id, "reset", info=kwargs)

    def step(self, policy_resp):
        assert self.gate.wait(30)
        if self.fails:
            raise RuntimeError("broken")
        self.calls.append("step")
        ended = bool(self.ends_at) and self.calls[::-1].index("reset") == self.ends_at
        info = {"episode_info": {"return": self._preprocess_fn(policy_resp)}}
        return EnvRet(self.env_id, "step", 1.0, ended, info=info)

    def finish_rollout(self):
        self.calls.append("finish_rollout")


def scripted(max_episode_steps=None, **kwargs):
    return EnvConfig(
        name="s",
        backend=f"{HERE}:Scripted",
        task="none",
        max_episode_steps=max_episode_steps,
        env_kwargs=kwargs,
    )


def group(count=2, max_episode_steps=None, **kwargs):
    return EnvGroup([scripted(max_episode_steps, **kwargs) for _ in range(count)])


def responses(env_group, *positions):
    ids = [env_group.env_ids[i] for i in positions or range(len(env_group))]
    return BatchedData(ids, [PolicyResponse(env_id, action=1.0) for env_id in ids])


def kinds(batch):
    return [env_ret.observation for env_ret in batch.values()]


def test_construction():
    env_group = group(3)
    assert len(env_group) == env_group.size() == 3
    assert env_group.env_ids == [env.env_id for env in env_group.env_list]
    assert [env_id.rpartition("-")[2] for env_id in env_group.env_ids] == ["0", "1", "2"]
    assert env_group[env_group.env_ids[1]] is env_group.env_list[1]
    assert env_group.env_to_id[env_group.env_list[2]] == env_group.env_ids[2]
    assert env_group.env_servers == []
    assert [meta.env_id for meta in env_group.init()] == env_group.env_ids
    assert env_group.get_action_spaces() == [env.space for env in env_group.env_list]
    assert env_group.throughput is not EnvGroup.throughput
    with pytest.raises(ValueError, match="empty"):
        EnvGroup([])
    env, is_server = EnvGroup.build_env(scripted())
    assert isinstance(env, Scripted)
    assert not is_server


def test_preprocess_functions():
    double, triple = (lambda r: r.action * 2), (lambda r: r.action * 3)
    env_group = EnvGroup([scripted(), scripted()], [double, triple])
    env_group.reset()
    env_group.step(responses(env_group))
    assert [env.get_env_stats()["return"] for env in env_group.env_list] == [[2.0, 1], [3.0, 1]]
    for wrong in ([double], None):
        with pytest.raises(ValueError, match="list of 2"):
            EnvGroup([scripted(), scripted()], wrong)


def test_build_env_group_repeats_by_workers():
    two, one = scripted().model_copy(update={"num_workers": 2}), scripted()
    env_group = build_env_group([two, one], [lambda r: 1.0, lambda r: 5.0])
    assert len(env_group) == 3
    env_group.reset()
    env_group.step(responses(env_group))
    assert env_group.get_env_stats() == {"return": pytest.approx(7 / 3)}
    assert len(build_env_group(two)) == 2


@pytest.mark.parametrize(
    "backend", ["gymnasiun", "no_module:X", ":X", "tests.unit.env.leaving:X", f"{HERE}:responses"]
)
def test_unknown_backends_are_refused_by_name(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = EnvConfig(name="s", backend=backend, task="none")
    with pytest.raises(ConfigError, match=backend):
        EnvGroup([config])


def test_envs_of_one_group_need_like_spaces():
    env_group = EnvGroup([scripted(), scripted(shape=(3,))])
    with pytest.raises(ValueError, match=r"action_spaces alike.*\(2,\).*\(3,\)"):
        env_group.init()
    nested = EnvGroup(
        [
            EnvConfig(name="n", backend="gymnasium", task="tests.unit.env.envs:Nested", num_envs=n)
            for n in (1, 2)
        ]
    )
    assert len(nested.init()) == 2
    assert [env_ret.env_id for env_ret in nested.reset()[0].values()] == nested.env_ids


def test_reset_and_step_outside_of_auto_reset():
    env_group = group()
    batch, truncations = env_group.reset(seed=3)
    assert kinds(batch) == ["reset", "reset"]
    assert batch.values()[0].info == {"seed": 3}
    assert truncations == [False, False]
    batch, truncations = env_group.step(responses(env_group, 1))
    assert batch.ids() == (env_group.env_ids[1],)
    assert kinds(batch) == ["step"]
    assert truncations is None
    assert env_group.env_list[0].calls == ["reset"]


def test_ids_are_echoed_and_split_at_the_slash():
    env_group = group()
    env_group.reset()
    full = f"{env_group.env_ids[1]}/client"
    batch, _ = env_group.step(BatchedData([full], [PolicyResponse(full, action=0)]))
    assert batch.ids() == (full,)
    with pytest.raises(ValueError, match="no env 'nobody'"):
        env_group.step(BatchedData(["nobody"], [None]))
    with pytest.raises(ValueError, match="two responses"):
        env_group.step(responses(env_group, 0, 0))


def test_auto_reset_by_step_limit():
    env_group = group()
    with env_group.auto_reset(max_episode_steps=2):
        _, truncations = env_group.reset()
        assert truncations == [False, False]
        seen = []
        for _ in range(6):
            batch, truncations = env_group.step(responses(env_group))
            seen.append((kinds(batch)[0], truncations[0]))
        assert seen == [
            ("step", False),
            ("step", True),
            ("reset", False),
            ("step", False),
            ("step", True),
            ("reset", False),
        ]
    assert env_group.step_counter is None


def test_a_partial_batch_advances_only_its_envs():
    env_group = group()
    with env_group.auto_reset(2):
        env_group.reset()
        for expected in ("step", "step", "reset", "step"):
            assert kinds(env_group.step(responses(env_group, 0))[0]) == [expected]
        assert env_group.step_counter[env_group.env_ids[1]] == 0


def test_auto_reset_without_a_reset_inside():
    env_group = group(1)
    with env_group.auto_reset(2):
        assert kinds(env_group.step(responses(env_group))[0]) == ["reset"]  # never reset before
    env_group.reset()
    with env_group.auto_reset(2):
        assert kinds(env_group.step(responses(env_group))[0]) == ["step"]


@pytest.mark.parametrize(("reset_on_done", "third"), [(False, "step"), (True, "reset")])
def test_a_done_env_is_reset_only_if_wanted(reset_on_done, third):
    env_group = group(1, max_episode_steps=5, ends_at=2)
    with env_group.auto_reset(reset_on_done=reset_on_done):
        env_group.reset()
        env_group.step(responses(env_group))
        batch, truncations = env_group.step(responses(env_group))
        assert batch.values()[0].last_terminated
        assert truncations == [False]
        assert kinds(env_group.step(responses(env_group))[0]) == [third]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_auto_reset_refuses_bad_limits_and_stays_usable(limit):
    env_group = group(1)
    with pytest.raises(ValueError, match="positive integer"), env_group.auto_reset(limit):
        pass
    with pytest.raises(ValueError, match="none was given"), env_group.auto_reset():
        pass
    env_group.reset()
    assert env_group.step(responses(env_group))[1] is None


def test_auto_reset_warns_of_limits_that_give_way():
    env_group = group(1, max_episode_steps=7)
    with pytest.warns(UserWarning, match="7 gives way to 3"), env_group.auto_reset(3):
        pass
    with pytest.raises(KeyError, match="boom"), env_group.auto_reset():
        raise KeyError("boom")
    assert env_group.step_counter is None


def test_step_async_never_waits_for_an_env():
    env_group = group(3)
    env_group.reset()
    slow = env_group.env_list[1]
    slow.gate.clear()
    env_group.step_async(responses(env_group))
    with pytest.raises(ValueError, match="still steps"):
        env_group.step_async(responses(env_group, 1))
    with pytest.raises(ValueError, match="still steps"):
        env_group.step(responses(env_group, 1))
    with pytest.raises(ValueError, match="still steps"):
        env_group.reset()
    collected = set()
    while len(collected) < 2:
        batch, truncations = env_group.collect_async()
        assert truncations == [False] * len(batch)
        collected |= set(batch.ids())
    assert collected == {env_group.env_ids[0], env_group.env_ids[2]}
    env_group.step_async(responses(env_group, 0))  # the fast ones go on
    slow.gate.set()
    batch, _ = env_group.collect_async(wait_all=True)
    assert set(batch.ids()) == {env_group.env_ids[0], env_group.env_ids[1]}
    env_group.close()


def test_collect_async_with_a_timeout():
    env_group = group(2)
    env_group.reset()
    with pytest.raises(ValueError, match="above 0"):
        env_group.collect_async(timeout=0)
    with pytest.warns(UserWarning, match="without a step_async"):
        assert len(env_group.collect_async()[0]) == 0
    env_group.env_list[1].gate.clear()
    env_group.step_async(responses(env_group))
    batch, _ = env_group.collect_async(timeout=0.05)
    assert batch.ids() == (env_group.env_ids[0],)
    env_group.env_list[1].gate.set()
    with pytest.warns(UserWarning, match="takes no part"):
        batch, _ = env_group.collect_async(timeout=30, wait_all=True)
    assert batch.ids() == (env_group.env_ids[1],)
    env_group.close()


def test_auto_reset_in_async_steps():
    env_group = group(2)
    with env_group.auto_reset(1):
        env_group.reset()
        seen = []
        for _ in range(3):
            env_group.step_async(responses(env_group, 0))
            batch, truncations = env_group.collect_async(wait_all=True)
            seen.append((kinds(batch), truncations))
        assert seen == [(["step"], [True]), (["reset"], [False]), (["step"], [True])]
    env_group.close()


class Pair(BaseEnv):
    """Two agents, who are shown their last action; `left` has ended from step 2 on, `right` from 3."""

    ends = {"left": 2, "right": 3}

    def get_observation_space(self):
        return dict.fromkeys(self.ends, gym.spaces.Box(-9, 9, (1,), np.float32))

    get_action_space = get_observation_space

    def reset(self, *args, **kwargs):
        self.steps = 0
        return MultiAgentEnvRet(self.env_id, {agent: np.zeros(1) for agent in self.ends})

    def step(self, policy_resp):
        self.steps += 1
        ended = {agent: self.steps >= step for agent, step in self.ends.items()}
        return MultiAgentEnvRet(
            self.env_id,
            {agent: policy_resp.action[agent] for agent in self.ends},
            {agent: float(policy_resp.action[agent][0]) for agent in self.ends},
            ended,
            dict.fromkeys(self.ends, False),
        )


def step_in_turn(env_group, batch):
    return env_group.step(batch)


def step_at_once(env_group, batch):
    env_group.step_async(batch)
    found, truncations = env_group.collect_async(wait_all=True)
    order = [found.ids().index(env_id) for env_id in batch.ids()]
    values = [found.values()[i] for i in order]
    return BatchedData(batch.ids(), values), [truncations[i] for i in order]


@pytest.mark.parametrize("step", [step_in_turn, step_at_once])
@pytest.mark.parametrize("limit", [2, 5])
def test_agents_are_reset_by_the_limit_or_when_all_of_them_have_ended(step, limit):
    pair = EnvConfig(name="pair", backend=f"{HERE}:Pair", task="none", num_workers=2)
    env_group = build_env_group(pair)
    assert all(set(space) == {"left", "right"} for space in env_group.get_action_spaces())

    def acting(number):
        """Each agent of each env has an action of its own."""
        return BatchedData(
            env_group.env_ids,
            [
                MultiAgentPolicyResponse(
                    env_id, action={"left": np.array([number + i]), "right": np.array([-number])}
                )
                for i, env_id in enumerate(env_group.env_ids)
            ],
        )

    first = 2 if limit == 2 else 3  # the last step of an episode
    with env_group.auto_reset(limit, reset_on_done=True):
        batch, _ = env_group.reset()
        assert batch.ids() == tuple(env_group.env_ids)
        for number in (1, 2, 3, 4)[:first]:
            batch, truncations = step(env_group, acting(number))
            for i, env_ret in enumerate(batch.values()):
                assert env_ret.observation == {"left": [number + i], "right": [-number]}
                assert env_ret.last_reward == {"left": number + i, "right": -number}
                assert env_ret.last_terminated == {"left": number >= 2, "right": number >= 3}
            assert truncations == [number == limit] * 2
        batch, truncations = step(env_group, acting(9))  # takes no part: both are reset
        assert [env_ret.observation for env_ret in batch.values()] == [{"left": 0, "right": 0}] * 2
        assert truncations == [False] * 2
        batch, _ = step(env_group, acting(5))
        assert [env_ret.observation["left"] for env_ret in batch.values()] == [[5], [6]]
    env_group.close()


def test_an_env_that_raises_does_not_lose_the_others():
    env_group = group(2)
    env_group.reset()
    env_group.env_list[0].fails = True
    env_group.step_async(responses(env_group))
    with pytest.raises(RuntimeError, match="broken"):
        env_group.collect_async(wait_all=True)
    batch, _ = env_group.collect_async(wait_all=True)
    assert batch.ids() == (env_group.env_ids[1],)
    env_group.close()


class Closing(Scripted):
    """Cannot be made, or closed, if its options say so."""

    closed: ClassVar[list[int]] = []

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        if config.env_kwargs.get("unmakeable"):
            raise RuntimeError("no licence")

    def close(self):
        self.closed.append(self.worker_index)
        if self.config.env_kwargs.get("unclosable"):
            raise RuntimeError("stuck")


def closing(**kwargs):
    Closing.closed.clear()
    return scripted(**kwargs).model_copy(update={"backend": f"{HERE}:Closing"})


def test_an_env_that_cannot_be_made_leaves_no_other_one_open():
    with pytest.raises(RuntimeError, match="no licence"):
        EnvGroup([closing(), closing(unclosable=True), closing(unmakeable=True)])
    assert sorted(Closing.closed) == [0, 1]


def test_an_env_that_cannot_be_closed_leaves_no_other_one_open():
    env_group = EnvGroup([closing(), closing(unclosable=True), closing()])
    with pytest.raises(RuntimeError, match="stuck"):
        env_group.close()
    assert sorted(Closing.closed) == [0, 1, 2]


def test_statistics_are_means_and_end_the_rollout():
    env_group = group(2)
    env_group.reset()
    for _ in range(2):
        env_group.step(responses(env_group))
    assert env_group.get_env_stats(reset=True) == {"return": 1.0}
    assert env_group.env_list[0].calls[-1] == "finish_rollout"
    assert env_group.get_env_stats() == {}


def test_the_fan_out_reaches_every_env(caplog):
    env_group = group(2)
    for hook in ("offload", "reload", "apply_evaluate_cfg", "restore_evaluate_cfg", "close"):
        for env in env_group.env_list:
            setattr(env, hook, lambda env=env, hook=hook: env.calls.append(hook))
        getattr(env_group, hook)()
        assert [env.calls[-1] for env in env_group.env_list] == [hook, hook]
    env_group.reset()
    with caplog.at_level("DEBUG", "rlightning"):
        env_group.print_timing_summary()
    told = [line for line in caplog.messages if "reset: count 1" in line]
    assert [line.split()[0] for line in told] == list(env_group.id_to_env)
    assert all("'p99':" in line for line in told)


def test_throughput_is_per_group_and_zero_when_idle(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlightning.env.throughput.time.monotonic", lambda: now[0])
    env_group, other = group(2), group(2)
    env_group.reset()
    assert env_group.get_stats() == {}
    for _ in range(6):
        env_group.step(responses(env_group))
        now[0] += 1.0
    stats = env_group.get_stats()
    assert stats.pop("env_throughput_sync") == pytest.approx(12 / 5)
    assert stats.pop("env_step_count") == 12
    assert list(stats) == [f"env_step_{name}_s" for name in ("mean", "p50", "p90", "p99", "max")]
    assert 0 < stats["env_step_p50_s"] <= stats["env_step_p99_s"] <= stats["env_step_max_s"] < 10
    assert other.get_stats() == {}
    now[0] += 20
    assert env_group.get_stats()["env_throughput_sync"] == 0.0
    tracker = ThroughputTracker(log_interval_s=1.0)
    tracker.record_async("x", 0)
    assert tracker.get_stats() == {}


def test_step_counter():
    counter = EnvStepCounter(["a", "b"], [1, 2])
    assert counter["a"] == -1
    counter.step_all()
    assert (counter.get_steps("a"), counter.get_max_steps("b")) == (0, 2)
    counter.step_all()
    assert counter.get_truncations(["b", "a"]) == [False, True]
    assert counter.get_truncations() == [True, False]
    with pytest.raises(ValueError, match="maximum of 1 steps"):
        counter.step("a")
    counter.reset("a")
    assert not counter.is_reached_max_steps("a")
    counter.reset_all()
    assert counter["b"] == -1
    with pytest.raises(KeyError, match="nobody"):
        counter.step("nobody")
    with pytest.raises(ValueError, match="2 env_ids, but 1"):
        EnvStepCounter(["a", "b"], [1])
    with pytest.raises(ValueError, match="lists"):
        EnvStepCounter("ab", [1, 2])
