"""Text in observations and outputs: stored once, given back as it was, bounded."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer, RolloutBuffer
from rlightning.buffer.pipeline import Item
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.texts import Texts
from rlightning.errors import InvalidRowError, StorageFullError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

SPACE = gym.spaces.Dict(
    task=gym.spaces.Text(40, charset="abcdefghijklmnopqrstuvwxyz 0123456789é"),
    arm=gym.spaces.Box(-1, 1, (2,), np.float32),
)


def replay(**given: Any) -> DataBuffer:
    settings: dict[str, Any] = {"type": "ReplayBuffer", "capacity": 100, **given}
    buffer = ReplayBuffer(BufferConfig(**{"auto_truncate_episode": True, **settings}))
    buffer.init()
    return buffer


def observe(tasks: Any, step: int) -> dict[str, Any]:
    rows = 1 if isinstance(tasks, str) else len(tasks)
    arm = np.full((rows, 2), step, np.float32)
    return {"task": tasks, "arm": arm[0] if isinstance(tasks, str) else arm}


def step_of(
    step: int, tasks: Any, env_id: str = "env", **more: Any
) -> tuple[EnvRet, PolicyResponse]:
    rows = len(tasks)
    env_ret = EnvRet(
        env_id,
        observe(tasks, step),
        np.full(rows, step, np.float32),
        more.pop("terminated", np.zeros(rows, bool)),
        np.zeros(rows, bool),
        **more,
    )
    response = PolicyResponse(
        env_id, action=np.full(rows, step), subtask=[f"{task} now" for task in tasks]
    )
    return env_ret, response


@pytest.mark.parametrize("rows", [1, 2])
def test_a_function_of_the_user_may_hand_texts_on(rows: int) -> None:
    config = BufferConfig(type="ReplayBuffer", capacity=100, auto_truncate_episode=True)
    buffer = ReplayBuffer(config, obs_preprocessor=lambda seen: {**seen, "arm": seen["arm"] / 2})
    buffer.init()
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, rows))
    for step in range(3):
        for tasks in (["lift", "wait"][:rows], ("lift", "wait")[:rows]):
            env_ret, response = step_of(step, tasks)
            buffer.commit(buffer.prepare("env", [Item(env_ret, response)]))
    buffer.truncate_group("env")
    assert set(buffer.get_all()["observation"]["task"]) == set(["lift", "wait"][:rows])
    env_ret, response = step_of(3, ["lift", "wait", "rest"][: rows + 1])
    env_ret.observation["arm"] = env_ret.observation["arm"][:rows]
    with pytest.raises(InvalidRowError, match="task"):
        buffer.commit(buffer.prepare("env", [Item(env_ret, response)]))


def test_rows_of_a_vector_env_keep_their_texts() -> None:
    buffer = replay()
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 2))
    for step in range(6):
        tasks = [f"lift {step}", "wait é"]
        env_ret, response = step_of(step, tasks)
        buffer.commit(buffer.prepare("env", [Item(env_ret, response)]))
    buffer.truncate_group("env")
    data = buffer.get_all()
    assert data["observation"]["task"].dtype == object
    assert data["observation"]["task"].tolist() == [f"lift {i}" for i in range(5)] + ["wait é"] * 5
    after = data["next_observation"]["task"].tolist()
    assert after == [f"lift {i}" for i in range(1, 6)] + ["wait é"] * 5
    assert data["subtask"].tolist() == [f"lift {i} now" for i in range(5)] + ["wait é now"] * 5
    (batch,) = buffer.sample(10)
    for task, arm in zip(batch["observation"]["task"], batch["observation"]["arm"], strict=True):
        assert task in (f"lift {int(arm[0])}", "wait é")
    assert type(batch["observation"]["task"][0]) is str
    one = buffer.get(0)
    assert one["observation"]["task"] == "lift 0"


def test_a_final_observation_has_its_own_text() -> None:
    buffer = replay()
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 1))
    buffer.commit(buffer.prepare("env", [Item(*step_of(0, ["begin"]))]))
    info = {"final_rows": np.array([0], np.int32), "final_observation": observe(["done"], 1)}
    ended = step_of(1, ["next task"], terminated=np.array([True]), info=info)
    buffer.commit(buffer.prepare("env", [Item(*ended)]))
    data = buffer.get_all()
    assert data["observation"]["task"].tolist() == ["begin"]
    assert data["next_observation"]["task"].tolist() == ["done"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_lone_env_sends_single_strings(declared: bool) -> None:
    buffer = replay()
    meta = EnvMeta("env", gym.spaces.Discrete(9), SPACE, 1) if declared else EnvMeta("env")
    buffer.open_group(meta)
    for step in range(3):
        env_ret = EnvRet("env", observe(f"go {step}", step), float(step))
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=np.int64(step)))
    buffer.truncate_one_episode("env")
    assert buffer.get_all()["observation"]["task"].tolist() == ["go 0", "go 1"]


def test_texts_in_rollouts() -> None:
    buffer = RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=1, rollout_length=4))
    buffer.init()
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 2))
    for step in range(5):
        item = Item(*step_of(step, [f"a{step}", f"b{step}"]))
        buffer.commit(buffer.prepare("env", [item]))
    rollout = buffer.rollouts.take()
    assert rollout is not None
    tasks = rollout.columns()["observation"]["task"]
    assert tasks.tolist() == [[f"a{i}", f"b{i}"] for i in range(4)]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("x" * 41, r"observation\.task: expected at most 40 characters.*got 41"),
        (5, r"observation\.task: expected text"),
        (None, r"observation\.task: expected text"),
    ],
)
def test_what_is_no_such_text_is_refused_by_name(task: Any, said: str) -> None:
    buffer = replay()
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 2))
    env_ret, response = step_of(0, ["fine", "fine"])
    env_ret.observation["task"] = ["fine", task]
    with pytest.raises(InvalidRowError, match=said):
        buffer.prepare("env", [Item(env_ret, response)])
    env_ret.observation["task"] = ["three", "are", "too many"]
    with pytest.raises(InvalidRowError, match=r"observation\.task: expected text of shape \[2\]"):
        buffer.prepare("env", [Item(env_ret, response)])


def test_columns_of_text_may_be_given_as_lists_and_arrays() -> None:
    container = DataContainer(10)
    container.push({"task": ["a", "b"], "reward": np.zeros(2, np.float32)})
    container.push({"task": np.array(["c", "a"]), "reward": np.ones(2, np.float32)})
    assert container.get_data()["task"].tolist() == ["a", "b", "c", "a"]
    with pytest.raises(InvalidRowError, match="task"):
        container.push({"task": np.zeros(1), "reward": np.ones(1, np.float32)})


def test_a_ring_forgets_the_texts_that_it_overwrites() -> None:
    container = DataContainer(50)
    for i in range(10_000):
        task = np.array([f"text number {i}"], object)
        after = np.array([f"text number {i + 1}"], object)
        container.push({"observation": task, "next_observation": after})
    data = container.get_data()
    assert sorted(data["observation"].tolist()) == [f"text number {i}" for i in range(9950, 10_000)]
    for before, after in zip(data["observation"], data["next_observation"], strict=True):
        assert int(after.split()[-1]) == int(before.split()[-1]) + 1
    assert len(container._texts) < 1500
    assert container.pooled_bytes < 300_000


def test_texts_are_counted_as_memory() -> None:
    buffer = replay(capacity=5000, max_bytes=1_000_000)
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 1))

    def insert(step: int) -> None:
        info = {"final_rows": np.array([0], np.int32), "final_observation": observe(["x"], 0)}
        ends = np.array([step % 10 == 9])
        given = step_of(step, [f"{step:040d}"], terminated=ends, info=info if ends[0] else {})
        buffer.commit(buffer.prepare("env", [Item(*given)]))

    for step in range(500):
        insert(step)
    with pytest.raises(StorageFullError, match=r"buffer\.max_bytes"):
        [insert(step) for step in range(500, 5000)]
    assert buffer.storages[0].container.nbytes < 1_100_000


def test_equal_texts_are_one() -> None:
    texts = Texts()
    ids = texts.put(np.array([["a", "b"], ["a", ""]], object))
    assert ids.dtype == np.int32
    assert ids[0, 0] == ids[1, 0] != ids[0, 1]
    assert ids[1, 1] == 0
    assert texts.get(ids).tolist() == [["a", "b"], ["a", ""]]
    texts.sweep([ids[:, :1], np.array([2**30, -5], np.int32)])  # the last two were never written
    assert texts.put(np.array(["a"], object))[0] == ids[0, 0]
    assert len(texts) == 2
