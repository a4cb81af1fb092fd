"""Data comes into a buffer, and episodes end."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import (
    BufferConfig,
    DataBuffer,
    ReplayBuffer,
    StorageConfig,
    build_data_buffer,
)
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.errors import ConfigError, InvalidRowError, ReplayError, StorageFullError
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.registry import BUFFERS
from tests.unit.buffer.lone_env import add, replay, step
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions


def test_t_pairs_give_t_minus_1_transitions_once_the_episode_is_truncated() -> None:
    buffer = replay()
    add(buffer, 4)
    assert (buffer.size(), len(buffer)) == (0, 0)
    buffer.truncate_one_episode("env")
    columns = buffer.get_all()
    assert buffer.size() == 3
    np.testing.assert_array_equal(columns["observation"][:, 0], [0, 1, 2])
    np.testing.assert_array_equal(columns["next_observation"][:, 0], [1, 2, 3])
    np.testing.assert_array_equal(columns["reward"], [1, 2, 3])
    np.testing.assert_array_equal(columns["action"], [0, 10, 20])
    np.testing.assert_array_equal(columns["cut"], [0, 0, 1])
    assert not columns["truncated"].any()


def test_truncation_is_idempotent_and_unknown_envs_are_key_errors() -> None:
    buffer = replay()
    buffer.add_transition("env", *step(0))
    buffer.add_transition("env", *step(1), truncated=True)
    buffer.truncate_one_episode("env")
    buffer.truncate_episodes(["env", step(0)[0]])
    assert buffer.size() == 1
    with pytest.raises(KeyError, match="other"):
        buffer.truncate_episodes(["env", "other"])
    for nothing in (None, 3, object(), EnvRet(None, 0)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="env id"):
            buffer.truncate_one_episode(nothing)
    add(buffer, 3)
    for nothing in (None, object()):
        with pytest.raises(TypeError, match="env id"):
            buffer.truncate_episodes(["env", nothing])
    assert buffer.size() == 1  # nothing was ended


def test_auto_truncation_stores_an_episode_when_the_env_ends_it() -> None:
    buffer = replay(auto_truncate_episode=True)
    add(buffer, 4, ends=True)
    assert buffer.size() == 3
    buffer.truncate_one_episode("env")  # the flag and the call end it once
    assert buffer.size() == 3
    np.testing.assert_array_equal(buffer.get_all()["terminated"], [0, 0, 1])
    assert not buffer.get_all()["cut"].any()
    add(buffer, 3, ends=True)
    assert buffer.size() == 5


def test_sub_episodes_of_a_vector_env_end_on_their_own() -> None:
    env = ScriptedEnv(3, lambda row, episode: (2 + row, row != 1))
    buffer = replay([env.meta], auto_truncate_episode=True)
    env_ret = env.reset()
    for _ in range(7):
        buffer.add_transition("env", env_ret, answer(env_ret))
        env_ret = env.step()
    columns = buffer.get_all()
    assert check_transitions(columns) == 3 * 2 + 2 * 3 + 4
    np.testing.assert_array_equal(columns["observation"][:5, 0], [0, 0, 1, 1, 1])
    assert columns["truncated"].sum() == 2
    buffer.truncate_one_episode("env")
    assert check_transitions(buffer.get_all()) == 18
    np.testing.assert_array_equal(buffer.get_all()["cut"][-2:], [0, 1])


def test_async_halves_make_the_same_transitions() -> None:
    sync, halves = replay(), replay()
    add(sync, 5)
    sync.truncate_one_episode("env")
    for t in range(5):
        env_ret, response = step(t)
        halves.add_data_async("env", env_ret)
        halves.add_data_async("env", response, truncated=t == 4)
    for name, column in sync.get_all().items():
        np.testing.assert_array_equal(column, halves.get_all()[name])


def test_an_answer_without_an_observation_is_refused() -> None:
    buffer = replay()
    env_ret, response = step(0)
    with pytest.raises(ValueError, match="no observation that waits"):
        buffer.add_data_async("env", response)
    buffer.add_data_async("env", env_ret)
    buffer.add_data_async("env", response)
    with pytest.raises(ValueError, match="no observation that waits"):
        buffer.add_data_async("env", response)
    with pytest.raises(TypeError, match="EnvRet or a PolicyResponse"):
        buffer.add_data_async("env", {"observation": 1})  # type: ignore[arg-type]


def test_batched_adds_check_ids_lengths_and_truncations() -> None:
    buffer = replay()
    pairs = [step(0, env_id=env_id) for env_id in "ab"]
    rets = BatchedData(["a", "b"], [pair[0] for pair in pairs])
    responses = BatchedData(["a", "b"], [pair[1] for pair in pairs])
    assert buffer.add_batched_transition(rets, responses) is buffer
    with pytest.raises(ValueError, match="ids differ"):
        buffer.add_batched_transition(rets, BatchedData(["b", "a"], responses.values()))
    with pytest.raises(ValueError, match="2 env_rets, but 1"):
        buffer.add_batched_transition(rets, BatchedData(["a"], [pairs[0][1]]))
    with pytest.raises(ValueError, match="1 truncations for 2"):
        buffer.add_batched_transition(rets, responses, [True])
    with pytest.raises(TypeError, match="list"):
        buffer.add_batched_transition(rets, responses, (True, False))  # type: ignore[arg-type]
    pairs = [step(1, env_id=env_id) for env_id in "ab"]
    rets = BatchedData(["a", "b"], [pair[0] for pair in pairs])
    for wrong in ([True], [True] * 3, []):
        with pytest.raises(ValueError, match=f"{len(wrong)} truncations for 2"):
            buffer.add_batched_data_async(rets, wrong)
    assert buffer.add_batched_data_async(rets, [False, False]) is None  # type: ignore[func-returns-value]
    buffer.add_batched_data_async(
        BatchedData(["a", "b"], [pair[1] for pair in pairs]), truncations=True
    )
    assert buffer.size() == 2
    with pytest.raises(TypeError, match="list"):
        buffer.add_batched_data_async(rets, 3)  # type: ignore[arg-type]


def test_futures_are_waited_for() -> None:
    buffer = replay()
    for t in range(2):
        env_ret, response = Future[EnvRet](), Future[PolicyResponse]()
        env_ret.set_result(step(t)[0])
        response.set_result(step(t)[1])
        buffer.add_transition("env", env_ret, response, truncated=t == 1)
    assert buffer.size() == 1


def test_pairs_of_different_envs_are_refused() -> None:
    buffer = replay()
    with pytest.raises(ValueError, match="Mismatched env_id"):
        buffer.add_transition("env", step(0)[0], PolicyResponse("else", action=1))


def test_only_declared_envs_may_come() -> None:
    buffer = replay([{"env_id": "env", "num_envs": 1}])
    buffer.add_transition("env", *step(0))
    buffer.add_transition("env/0", *step(0, env_id="env/0"))
    with pytest.raises(KeyError, match="none of"):
        buffer.add_transition("other", *step(0, env_id="other"))


def test_a_row_of_a_declared_vector_env_is_taken_as_a_lone_env() -> None:
    buffer = replay([EnvMeta("env", num_envs=2)])
    add(buffer, 3, env_id="env/0")
    buffer.truncate_one_episode("env/0")
    assert buffer.get_all()["reward"].tolist() == [1, 2]
    assert buffer.get_all()["observation"].shape == (2, 3)
    with pytest.raises(InvalidRowError):  # the env itself has two
        buffer.add_transition("env", *step(0))


def test_an_open_episode_is_bounded_by_the_capacity() -> None:
    buffer = replay(capacity=10)
    with pytest.raises(ReplayError, match="auto_truncate_episode"):
        add(buffer, 20)
    buffer.truncate_one_episode("env")
    assert buffer.size() == 10


def test_long_episodes_grow_their_staging() -> None:
    buffer = replay(capacity=1000)
    add(buffer, 500)
    buffer.truncate_one_episode("env")
    np.testing.assert_array_equal(buffer.get_all()["reward"], np.arange(1, 500))


def test_a_fixed_storage_refuses_what_does_not_fit_and_keeps_the_episode() -> None:
    buffer = replay(capacity=5, storage=StorageConfig(mode="fixed"), auto_truncate_episode=True)
    add(buffer, 4, ends=True)
    for t in range(3):
        buffer.add_transition("env", *step(t))
    with pytest.raises(StorageFullError, match="room for 2 of 5"):
        buffer.add_transition("env", *step(3, done=True))
    assert buffer.size() == 3
    buffer.truncate_one_episode("env")
    assert buffer.size() == 5
    assert issubclass(StorageFullError, RuntimeError)


def test_nothing_of_an_evaluation_is_stored() -> None:
    buffer = replay(auto_truncate_episode=True)
    add(buffer, 3)
    for t in range(9):
        buffer.add_transition("env", *step(t, done=t == 8), truncated=t == 4, is_eval=True)
    env_rets = BatchedData(["env", "other"], [step(0)[0], step(0, env_id="other")[0]])
    answers = BatchedData(["env", "other"], [step(0)[1], step(0, env_id="other")[1]])
    assert buffer.add_batched_transition(env_rets, answers, [True, True], is_eval=True) is buffer
    assert (buffer.size(), buffer.env_ids) == (0, ("env",))
    with pytest.raises(ValueError, match="1 truncations for 2"):
        buffer.add_batched_transition(env_rets, answers, [True], is_eval=True)
    buffer.add_transition("env", *step(3, done=True), is_eval=False)  # the open episode goes on
    assert buffer.get_all()["reward"].tolist() == [1, 2, 3]
    buffer.add_batched_transition(env_rets, answers, is_eval=None)
    assert buffer.env_ids == ("env", "other")


def test_a_buffer_of_a_users_own_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(ReplayBuffer):
        pass

    monkeypatch.setattr(BUFFERS, "_entries", {"ours": Ours})
    assert type(build_data_buffer("ours", BufferConfig(type="ReplayBuffer", capacity=1))) is Ours
    with pytest.raises(KeyError, match="no buffer 'our' is registered; did you mean ours"):
        build_data_buffer("our", BufferConfig(type="ReplayBuffer", capacity=1))


def test_episodes_made_elsewhere_are_stored_as_they_are() -> None:
    buffer = replay()
    episode = default_postprocess_fn(
        {
            "observation": [np.full(3, t, np.float32) for t in range(4)],
            "last_reward": [0.0, 1.0, 2.0, 3.0],
            "last_terminated": [False, False, False, True],
            "action": [np.int64(t) for t in range(4)],
            "info": [{}] * 4,
        }
    )
    buffer.add_episode(episode)
    assert sorted(buffer.get_all()) == [
        "action",
        "next_observation",
        "observation",
        "reward",
        "terminated",
    ]
    buffer.add_episode({name: np.stack([v, v], 1) for name, v in episode.items()}, num_envs=2)
    np.testing.assert_array_equal(buffer.get_all()["reward"], [1, 2, 3] * 3)
    with pytest.raises(InvalidRowError, match="columns: action"):
        buffer.add_episode({"reward": np.ones(2)})


def test_an_env_without_an_id_lets_no_other_env_in() -> None:
    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=10))
    buffer.init([EnvMeta("")])
    with pytest.raises(KeyError, match=r"env 'env' is none of \[''\]"):
        add(buffer, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"storage": StorageConfig(type="sharded")}, "buffer.storage.type: 'sharded'"),
        ({"storage": StorageConfig(device="cuda")}, "buffer.storage.device: 'cuda'"),
        ({"node_affinity_env": True}, "buffer.node_affinity_env: needs storage"),
        ({"node_affinity_train": True}, "buffer.node_affinity_train: needs storage"),
        ({"capacity": 0}, "buffer.capacity: expected at least 1"),
    ],
)
def test_what_is_not_offered_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(**config)


def test_the_config_is_copied() -> None:
    config = BufferConfig(type="ReplayBuffer", capacity=10)
    buffer = DataBuffer(config)
    config.capacity = 3
    assert buffer.config.capacity == 10


def test_durations_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    buffer = replay()
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    buffer.sample(1)
    with caplog.at_level(logging.DEBUG):
        buffer.print_timing_summary(reset=True)
    assert "buffer add" in caplog.text
    assert "buffer sample" in caplog.text
    assert not buffer.timing_raw


def test_executed_actions_may_begin_in_a_later_episode() -> None:
    buffer = replay(auto_truncate_episode=True)
    add(buffer, 3, ends=True)
    for t in range(3):
        env_ret, response = step(t, done=t == 2)
        env_ret.executed_action = np.int64(5) if t else None
        buffer.add_transition("env", env_ret, response)
    add(buffer, 3, ends=True, env_id="other")
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["action"], [0, 10, 5, 5, 0, 10])
    np.testing.assert_array_equal(columns["policy_action"], [0, 10, 0, 10, 0, 10])
