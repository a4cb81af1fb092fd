"""The rows of DataBuffer and of episode assembly that the tests beside this folder do not have."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer, RolloutBuffer, StorageConfig
from rlightning.buffer.utils.postprocess import n_step_postprocess_fn
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.errors import InvalidRowError
from rlightning.types import (
    BatchedData,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions


def make(kind: str = "ReplayBuffer", functions: Any = None, **config: Any) -> Any:
    config = {"type": kind, "capacity": 200, **config}
    if "unit" in config:
        config["storage"] = StorageConfig(unit=config.pop("unit"))
    types = {"ReplayBuffer": ReplayBuffer, "RolloutBuffer": RolloutBuffer}
    buffer = types[kind](BufferConfig(**config), **(functions or {}))
    buffer.init()
    return buffer


def step(t: int, *, done: bool = False, env_id: str = "env") -> tuple[EnvRet, PolicyResponse]:
    env_ret = EnvRet(env_id, np.full(3, t, np.float32), float(t), done, False)
    return env_ret, PolicyResponse(env_id, action=np.int64(10 * t))


def add(buffer: DataBuffer, count: int, env_id: str = "env", *, ends: bool = True) -> None:
    for t in range(count):
        last = t == count - 1
        buffer.add_transition(env_id, *step(t, done=last and ends, env_id=env_id), truncated=last)


# Lifecycle.


def test_before_init_there_is_nothing() -> None:
    buffer = DataBuffer(BufferConfig(type="ReplayBuffer", capacity=3))
    assert (buffer.storages, buffer.table, buffer.sampler, buffer.size()) == ({}, None, None, 0)
    buffer.init_storage_table(["env"])
    assert buffer.table is None


def test_init_makes_sampler_storage_and_table() -> None:
    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=3))
    buffer.init([EnvMeta("a"), {"env_id": "b", "num_envs": 2}], ["a", "b"])
    assert list(buffer.storages) == [0]
    assert buffer.table is not None
    assert buffer.table.get_env_to_storage() == {"a": 0, "b": 0}
    assert buffer.sampler is not None


def test_size_counts_units_and_not_what_is_open() -> None:
    for unit, expected in (("transition", 5), ("episode", 2)):
        buffer = make(unit=unit)
        add(buffer, 3)
        add(buffer, 4)
        buffer.add_transition("env", *step(0))
        size = buffer.size()
        assert type(size) is int
        assert size == len(buffer) == expected
        assert buffer.num_transitions() == 5


def test_episodes_are_got_and_sampled_whole() -> None:
    buffer = make(unit="episode", sampler={"type": "all"})
    for count in (4, 4, 3):
        add(buffer, count)
    assert buffer.get(0)["reward"].tolist() == [1, 2, 3]
    assert buffer.get([0, 1])["reward"].shape == (2, 3)
    assert buffer[0, np.array([2])]["reward"].shape == (1, 2)
    (batch,) = buffer.sample(shuffle=False)
    assert [len(episode["reward"]) for episode in batch] == [3, 3, 2]
    assert buffer.get_all()["reward"].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    with pytest.raises(IndexError, match="3 stored episodes"):
        buffer.get(3)


def test_a_rollout_buffer_of_episodes_gives_each_once() -> None:
    buffer = make("RolloutBuffer", unit="episode")
    add(buffer, 4)
    add(buffer, 4)
    assert buffer.sample()[0]["reward"].shape == (2, 3)
    assert buffer.size() == 0


def test_an_episode_of_vector_envs_is_split() -> None:
    buffer = make(unit="episode")
    buffer.add_episode({"x": np.arange(6).reshape(3, 2)}, num_envs=2)
    assert buffer.size() == 2
    assert buffer.get([0, 1])["x"].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_an_episode_of_one_step_is_not_stored() -> None:
    for unit in ("transition", "episode"):
        buffer = make(unit=unit, auto_truncate_episode=True)
        buffer.add_transition("env", *step(0, done=True))
        add(buffer, 1, ends=False)
        assert buffer.size() == 0


# Assembly.


def test_the_flag_and_auto_truncation_on_one_step_end_it_once() -> None:
    buffer = make(auto_truncate_episode=True)
    add(buffer, 4)
    buffer.truncate_episodes(["env"])
    assert buffer.size() == 3
    assert buffer.get_all()["terminated"].tolist() == [False, False, True]


def test_halves_are_paired_by_env() -> None:
    buffer = make()
    for t in range(3):
        rets = BatchedData(["a", "b"], [step(t, env_id=i)[0] for i in "ab"])
        responses = BatchedData(["b", "a"], [step(t, env_id=i)[1] for i in "ba"])
        buffer.add_batched_data_async(rets)
        buffer.add_batched_data_async(responses, [t == 2, t == 2])
    columns = buffer.get_all()
    assert columns["action"].tolist() == [0, 10, 0, 10]


def test_a_lone_env_ret_that_ends_an_episode_closes_it() -> None:
    buffer = make(auto_truncate_episode=True)
    for t in range(2):
        buffer.add_transition("env", *step(t))
    buffer.add_data_async("env", step(2, done=True)[0])
    assert buffer.get_all()["reward"].tolist() == [1, 2]
    cut = make()
    for t in range(2):
        cut.add_transition("env", *step(t))
    cut.add_data_async("env", step(2)[0], truncated=True)
    assert cut.get_all()["cut"].tolist() == [False, True]


def test_a_second_env_ret_begins_a_new_segment() -> None:
    buffer = make()
    buffer.add_transition("env", *step(0))
    buffer.add_data_async("env", step(1)[0])
    buffer.add_transition("env", *step(5))
    buffer.add_transition("env", *step(6), truncated=True)
    columns = buffer.get_all()
    assert columns["observation"][:, 0].tolist() == [0, 5]
    assert columns["next_observation"][:, 0].tolist() == [1, 6]
    assert columns["cut"].all()
    assert buffer.counters.segments == 1


@pytest.mark.parametrize("name", ["reward", "terminated", "truncated", "next_observation", "cut"])
def test_outputs_with_the_name_of_a_column_are_refused(name: str) -> None:
    buffer = make()
    with pytest.raises(ValueError, match=name):
        buffer.add_transition("env", step(0)[0], PolicyResponse("env", action=1, **{name: 2.0}))


def test_nested_observations_keep_their_structure() -> None:
    buffer = make(auto_truncate_episode=True)
    for t in range(4):
        image = np.full((2, 2), t, np.uint8)
        observation = {"camera": image, "state": (np.float32(t), {"joint": np.full(3, -t)})}
        env_ret = EnvRet("env", observation, float(t), t == 3)
        buffer.add_transition("env", env_ret, PolicyResponse("env", action={"arm": np.int8(t)}))
    (batch,) = buffer.sample(2)
    assert batch["observation"]["camera"].shape == (2, 2, 2)
    assert batch["observation"]["camera"].dtype == np.uint8
    assert batch["action"]["arm"].dtype == np.int8
    everything = buffer.get_all()
    assert everything["next_observation"]["state"][1]["joint"][:, 0].tolist() == [-1, -2, -3]


def test_agents_have_rewards_and_flags_of_their_own() -> None:
    buffer = make(auto_truncate_episode=True)
    agents = ("left", "right")
    for t in range(4):
        over = dict.fromkeys(agents, t == 3) | {"left": t >= 2}
        env_ret = MultiAgentEnvRet(
            "env",
            {agent: np.full(2, t, np.float32) for agent in agents},
            {"left": float(t), "right": -float(t)},
            over,
            dict.fromkeys(agents, False),
        )
        response = MultiAgentPolicyResponse("env", action={a: np.int64(t) for a in agents})
        buffer.add_transition("env", env_ret, response)
    columns = buffer.get_all()
    assert columns["reward"]["right"].tolist() == [-1, -2, -3]
    assert columns["terminated"]["left"].tolist() == [False, True, True]
    assert columns["action"]["left"].tolist() == [0, 1, 2]
    assert buffer.size() == 3


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_ragged_sub_episodes(unit: str) -> None:
    env = ScriptedEnv(4, lambda row, episode: (2 + row, row != 1))
    buffer = make(unit=unit, auto_truncate_episode=True, capacity=1000)
    env_ret = env.reset()
    for _ in range(30):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    check_transitions(buffer.get_all())
    if unit == "episode":
        lengths = [len(buffer.get(i)["reward"]) for i in range(buffer.size())]
        assert set(lengths) == {2, 3, 4, 5}


def test_rows_that_are_ended_together_lie_one_after_the_other() -> None:
    env = ScriptedEnv(3)
    buffer = make(unit="episode")
    env_ret = env.reset()
    for _ in range(5):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    buffer.truncate_one_episode("env")
    assert buffer.size() == 3
    rows = buffer.get(np.arange(3))["observation"][..., 0]
    np.testing.assert_array_equal(rows, np.arange(3)[:, np.newaxis] * np.ones(4))


@pytest.mark.parametrize("auto", [True, False])
def test_all_rows_of_a_vector_env_are_stored_in_one_go(
    auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 500
    env = ScriptedEnv(rows, lambda row, episode: (3 + row % 2, True))
    buffer = make(auto_truncate_episode=auto, capacity=100_000)
    pushes = []
    container = buffer.storages[0].container
    push_flat = container.push_flat
    monkeypatch.setattr(
        container,
        "push_flat",
        lambda *args, **how: pushes.append(len(args[2])) or push_flat(*args, **how),
    )
    env_ret = env.reset()
    for _ in range(5):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    buffer.truncate_one_episode("env")
    assert pushes == ([rows // 2, rows // 2, rows // 2] if auto else [rows])
    assert check_transitions(buffer.get_all()) == 4 * rows


def test_nothing_of_the_callers_is_changed_or_kept() -> None:
    buffer = make()
    kept = []
    for t in range(3):
        env_ret, response = step(t)
        env_ret.info["note"] = [t]
        before = copy.deepcopy((env_ret.__dict__, response.__dict__))
        buffer.add_transition("env", env_ret, response, truncated=t == 2)
        for now, then in zip((env_ret.__dict__, response.__dict__), before, strict=True):
            assert list(now) == list(then)
            for name, value in now.items():
                np.testing.assert_array_equal(value, then[name])
        kept.append(env_ret)
    for env_ret in kept:
        env_ret.observation[:] = 99
    assert buffer.get_all()["observation"].max() == 1
    episode = {"x": np.arange(3)}
    other = make()
    other.add_episode(episode)
    other.get_all()["x"][:] = 7
    other.sample(2)[0]["x"][:] = 7
    assert other.get_all()["x"].tolist() == [0, 1, 2]


# Extra fields of an EnvRet.


def extra_step(t: int, count: int) -> tuple[EnvRet, PolicyResponse]:
    env_ret, response = step(t, done=t == count - 1)
    env_ret._extra = {
        "last_cost": np.float32(t),
        "last_contact": {"left": np.full(2, t), "right": np.full(2, -t)},
        "last_action": np.int64(7 * t),  # of which there is another one
        "goal": np.int64(t),
    }
    return env_ret, response


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "RolloutBuffer"])
def test_an_extra_field_of_the_step_before_is_stored_twice(kind: str, *, own: bool) -> None:
    def postprocess(episode: Any) -> Any:
        return default_postprocess_fn(episode)

    functions = {"postprocess_fn": postprocess} if own else {}
    buffer = make(kind, functions=functions, auto_truncate_episode=True)
    for count in (4, 3):
        for t in range(count):
            buffer.add_transition("env", *extra_step(t, count))
    columns = buffer.get_all()
    steps = np.array([0, 1, 2, 0, 1])
    np.testing.assert_array_equal(columns["last_cost"], steps)
    np.testing.assert_array_equal(columns["cost"], steps + 1)
    for side, sign in (("left", 1), ("right", -1)):
        np.testing.assert_array_equal(columns["last_contact"][side][:, 0], sign * steps)
        np.testing.assert_array_equal(columns["contact"][side][:, 0], sign * (steps + 1))
    np.testing.assert_array_equal(columns["goal"], steps)
    np.testing.assert_array_equal(columns["last_action"], 7 * steps)
    np.testing.assert_array_equal(columns["action"], 10 * steps)


# Postprocess functions.


def test_own_postprocess_functions_make_the_columns() -> None:
    seen: list[Any] = []

    def postprocess(episode: Any) -> Any:
        seen.append(episode)
        columns = default_postprocess_fn(episode)
        columns["total"] = np.full(len(columns["reward"]), columns["reward"].sum())
        return columns

    buffer = make(functions={"postprocess_fn": postprocess}, auto_truncate_episode=True)
    add(buffer, 4)
    (episode,) = seen
    assert [len(values) for values in episode.values()] == [4] * len(episode)
    assert np.asarray(episode["last_reward"]).tolist() == [0, 1, 2, 3]
    assert buffer.get_all()["total"].tolist() == [6, 6, 6]
    plain = make(auto_truncate_episode=True)
    add(plain, 4)
    for name, column in plain.get_all().items():
        np.testing.assert_array_equal(buffer.get_all()[name], column)
        assert buffer.get_all()[name].dtype == column.dtype


def test_rows_that_are_ended_together_are_postprocessed_together() -> None:
    env = ScriptedEnv(3)
    shapes = []

    def postprocess(episode: Any) -> Any:
        shapes.append(episode["observation"].shape)
        return default_postprocess_fn(episode)

    buffer = make(functions={"postprocess_fn": postprocess}, unit="episode")
    env_ret = env.reset()
    for _ in range(5):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    buffer.truncate_one_episode("env")
    assert shapes == [(5, 3, 3)]
    assert buffer.size() == 3
    check_transitions(buffer.get_all())


@pytest.mark.parametrize("auto", [True, False])
def test_no_n_step_return_crosses_an_episode(auto: bool) -> None:
    env = ScriptedEnv(3, lambda row, episode: (2 + row, row != 1))
    function = n_step_postprocess_fn(3, gamma=0.9)
    buffer = make(functions={"postprocess_fn": function}, auto_truncate_episode=auto)
    env_ret = env.reset()
    for _ in range(20):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    buffer.truncate_one_episode("env")
    columns = buffer.get_all()
    before, after = columns["observation"], columns["next_observation"]
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    ahead = after[:, 2] - before[:, 2]
    assert set(ahead) == {1, 2, 3}
    np.testing.assert_allclose(columns["discount"], 0.9**ahead, rtol=1e-6)


def test_nested_observations_reach_the_postprocess_function() -> None:
    buffer = make(functions={"postprocess_fn": n_step_postprocess_fn(2)})
    for t in range(4):
        observation = {"a": np.full(2, t), "b": np.float32(t)}
        buffer.add_transition(
            "env", EnvRet("env", observation, 1.0), PolicyResponse("env", action=t), t == 3
        )
    assert buffer.get_all()["next_observation"]["a"][:, 0].tolist() == [2, 3, 3]


def test_what_a_postprocess_function_raises_reaches_the_caller_and_harms_nothing() -> None:
    fails = [True]

    def postprocess(episode: Any) -> Any:
        if fails.pop():
            raise ZeroDivisionError("mine")
        return default_postprocess_fn(episode)

    buffer = make(functions={"postprocess_fn": postprocess}, auto_truncate_episode=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        add(buffer, 4)
    fails.append(False)
    add(buffer, 4)
    assert buffer.size() == 3


def test_columns_that_a_postprocess_function_leaves_out_are_named() -> None:
    functions = [default_postprocess_fn, lambda episode: {"reward": np.zeros(2)}]
    buffer = make(functions={"postprocess_fn": lambda episode: functions.pop(0)(episode)})
    add(buffer, 4)
    with pytest.raises(InvalidRowError, match="columns: action"):
        add(buffer, 4)
    assert buffer.size() == 3
