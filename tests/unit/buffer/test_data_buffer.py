from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer import (
    BufferConfig,
    DataBuffer,
    ReplayBuffer,
    RolloutBuffer,
    SamplerConfig,
    StorageConfig,
    build_data_buffer,
)
from rlightning.buffer.utils import utils
from rlightning.buffer.utils.preprocessors import BoxFlattenPreprocessor
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.errors import (
    BufferEmptyError,
    ConfigError,
    InvalidRowError,
    ReplayError,
    StorageFullError,
)
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.registry import BUFFERS
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions, meta


def replay(metas: Any = None, **config: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(BufferConfig(**{"type": "ReplayBuffer", "capacity": 100, **config}))
    buffer.init(metas)
    return buffer


def step(t: int, *, done: bool = False, env_id: str = "env") -> tuple[EnvRet, PolicyResponse]:
    """Step t of a lone env: observation t, reward t, action 10 t."""
    env_ret = EnvRet(env_id, np.full(3, t, np.float32), float(t), done, False)
    return env_ret, PolicyResponse(env_id, action=np.int64(10 * t), value=np.float32(t))


def add(buffer: DataBuffer, steps: int, *, ends: bool = False, env_id: str = "env") -> None:
    for t in range(steps):
        buffer.add_transition(env_id, *step(t, done=ends and t == steps - 1, env_id=env_id))


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


def test_get_takes_ints_sequences_arrays_and_dicts() -> None:
    buffer = replay()
    add(buffer, 6)
    buffer.truncate_one_episode("env")
    assert buffer.get(-1)["reward"] == 5
    assert buffer[1]["reward"] == 2
    for item in ([0, -1], (0, 4), np.array([0, 4]), {"storage_idx": 0, "indices": [0, 4]}):
        np.testing.assert_array_equal(buffer.get(item)["reward"], [1, 5])
    np.testing.assert_array_equal(buffer[0, [2]]["reward"], [3])
    assert len(buffer.get([])["reward"]) == 0
    for bad in (None, 1.0, "x", [0.5], object()):
        with pytest.raises(TypeError):
            buffer.get(bad)
    with pytest.raises(IndexError, match="index 5 of 5"):
        buffer.get(5)
    with pytest.raises(IndexError, match="storage 3"):
        buffer.get({"storage_idx": 3, "indices": 0})
    buffer.get([0])["reward"][:] = 99
    assert buffer.get(0)["reward"] == 1


def test_get_takes_tensors() -> None:
    buffer = replay()
    for t in range(3):
        env_ret, response = step(t)
        buffer.add_transition("env", env_ret.cpu(), response.cpu())
    buffer.truncate_one_episode("env")
    np.testing.assert_array_equal(buffer.get(torch.tensor([1, 0]))["reward"], [2, 1])


def test_sample_returns_one_entry_per_train_worker() -> None:
    buffer = replay(sampler=SamplerConfig(type="all"))
    add(buffer, 6)
    buffer.truncate_one_episode("env")
    (batch,) = buffer.sample(shuffle=False)
    np.testing.assert_array_equal(batch["reward"], [1, 2, 3, 4, 5])
    buffer.init_storage_table(train_worker_num=2)
    parts = [part["reward"].tolist() for part in buffer.sample(shuffle=False)]
    assert parts == [[1, 3], [2, 4]]
    parts = [part["reward"].tolist() for part in buffer.sample(shuffle=False, drop_last=False)]
    assert parts == [[1, 3, 5], [2, 4, 1]]
    with pytest.raises(ValueError, match="at least one train worker"):
        buffer.init_storage_table(train_worker_num=0)


def test_init_says_how_many_train_workers_there_are() -> None:
    buffer = replay(sampler=SamplerConfig(type="all"))
    buffer.init(train_worker_num=2)
    add(buffer, 5)
    buffer.truncate_one_episode("env")
    parts = [part["reward"].tolist() for part in buffer.sample(shuffle=False)]
    assert parts == [[1, 3], [2, 4]]
    table = buffer.table
    with pytest.raises(ValueError, match="at least one train worker, got 0"):
        buffer.init(train_worker_num=0)
    assert (buffer.table, buffer.size()) == (table, 4)  # it goes on as it was


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


def test_a_replay_buffer_keeps_what_it_samples() -> None:
    buffer = replay(sampler=SamplerConfig(type="uniform", seed=3))
    add(buffer, 11)
    buffer.truncate_one_episode("env")
    first = buffer.sample(8)[0]["reward"]
    buffer.seed(3)
    np.testing.assert_array_equal(buffer.sample(8)[0]["reward"], first)
    assert buffer.size() == 10
    with pytest.raises(ValueError, match="a batch of 11 from 10"):
        buffer.sample(11)


def test_a_buffer_of_a_users_own_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(ReplayBuffer):
        pass

    monkeypatch.setattr(BUFFERS, "_entries", {"ours": Ours})
    assert type(build_data_buffer("ours", BufferConfig(type="ReplayBuffer", capacity=1))) is Ours
    with pytest.raises(KeyError, match="no buffer 'our' is registered; did you mean ours"):
        build_data_buffer("our", BufferConfig(type="ReplayBuffer", capacity=1))


def test_a_rollout_buffer_gives_everything_once(caplog: pytest.LogCaptureFixture) -> None:
    config = BufferConfig(type="RolloutBuffer", capacity=100)
    buffer = build_data_buffer("RolloutBuffer", config)
    assert isinstance(buffer, RolloutBuffer)
    buffer.init()
    add(buffer, 11)
    buffer.truncate_one_episode("env")
    assert sorted(buffer.sample()[0]["reward"]) == list(range(1, 11))
    assert buffer.size() == 0
    with pytest.raises(BufferEmptyError):
        buffer.sample()

    config.sampler = SamplerConfig(type="batch")
    buffer = RolloutBuffer(config)
    buffer.init()
    add(buffer, 11)
    buffer.truncate_one_episode("env")
    with pytest.raises(ValueError, match="a batch of 11"):
        buffer.sample(11)
    with caplog.at_level(logging.WARNING):
        assert len(buffer.sample(4)[0]["reward"]) == 4
    assert "6 of 10 stored transitions are dropped unseen" in caplog.text
    assert buffer.size() == 0
    add(buffer, 4)
    buffer.truncate_one_episode("env")
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="needs a batch_size"):
        buffer.sample()
    assert not caplog.text


def test_an_empty_buffer() -> None:
    buffer = replay()
    assert buffer.get_all() == {}
    buffer.clear()
    with pytest.raises(BufferEmptyError):
        buffer.sample(1)
    fresh = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=1))
    assert (fresh.size(), fresh.storages, fresh.sampler) == (0, {}, None)
    fresh.init_storage_table()
    for kind in (ReplayBuffer, RolloutBuffer):
        with pytest.raises(ValueError, match="before init"):
            kind(BufferConfig(type=kind.__name__, capacity=1)).sample(1)
    with pytest.raises(ReplayError, match="init"):
        fresh.add_transition("env", *step(0))


def test_clear_keeps_open_episodes() -> None:
    buffer = replay()
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    add(buffer, 3)
    buffer.clear()
    assert buffer.size() == 0
    buffer.truncate_one_episode("env")
    assert buffer.size() == 2


def test_clear_keeps_what_came_of_a_half_received_transition() -> None:
    buffer = replay()
    buffer.add_data_async("env", step(0)[0])
    buffer.clear()
    buffer.add_data_async("env", step(0)[1])
    for half in step(1):
        buffer.add_data_async("env", half)
    buffer.truncate_one_episode("env")
    columns = buffer.get_all()
    assert (columns["observation"][:, 0].tolist(), columns["action"].tolist()) == ([0], [0])
    assert columns["reward"].tolist() == [1]


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


def test_the_default_postprocess_function_agrees_with_the_buffer() -> None:
    buffer = replay(auto_truncate_episode=True)
    add(buffer, 5, ends=True)
    rets, responses = zip(*(step(t, done=t == 4) for t in range(5)), strict=True)
    episode = {name: [ret.to_dict()[name] for ret in rets] for name in rets[0].to_dict()}
    episode |= {name: [r.to_dict()[name] for r in responses] for name in ("action", "value")}
    stored = buffer.get_all()
    for name, column in default_postprocess_fn(episode).items():
        np.testing.assert_array_equal(column, stored[name])
        assert column.dtype == stored[name].dtype


def test_preprocessors_see_every_observation_of_a_transition() -> None:
    space = gym.spaces.Box(-1, 1, (2, 2), np.float32)
    buffer = ReplayBuffer(
        BufferConfig(type="ReplayBuffer", capacity=10, auto_truncate_episode=True),
        obs_preprocessor=BoxFlattenPreprocessor(space),
        reward_preprocessor=lambda reward: reward * 10,
    )
    buffer.init([meta(2, observation=space)])
    for t in range(2):
        ends = np.array([t == 1, t == 1])
        env_ret = EnvRet(
            "env", np.full((2, 2, 2), t, np.float32), np.full(2, t), ends, ~ends & ends
        )
        if t:
            env_ret.info = {
                "final_rows": [0, 1],
                "final_observation": np.full((2, 2, 2), 7, np.float32),
            }
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=np.zeros(2)))
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["next_observation"], np.full((2, 4), 7))
    np.testing.assert_array_equal(columns["reward"], [10, 10])


def test_an_env_without_an_id_lets_no_other_env_in() -> None:
    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=10))
    buffer.init([EnvMeta("")])
    with pytest.raises(KeyError, match=r"env 'env' is none of \[''\]"):
        add(buffer, 1)


def test_own_preprocess_functions_decide_what_is_stored() -> None:
    def preprocess(data: dict, env_ret: Any, response: Any, *functions: Any) -> dict:
        assert len(functions) == 4
        return {
            "observation": env_ret.observation[:1],
            "last_reward": env_ret.last_reward,
            "last_terminated": False,
            "last_truncated": False,
            "doubled": 2 * response.action,
        }

    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=10), preprocess_fn=preprocess)
    buffer.init([EnvMeta("env")])
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    assert buffer.get_all()["observation"].shape == (2, 1)
    np.testing.assert_array_equal(buffer.get_all()["doubled"], [0, 20])


@pytest.mark.parametrize(
    "functions",
    [
        ("obs_preprocessor", "env_ret_preprocess_fn"),
        ("reward_preprocessor", "preprocess_fn"),
        ("env_ret_preprocess_fn", "preprocess_fn"),
        ("policy_resp_preprocess_fn", "preprocess_fn"),
    ],
)
def test_functions_that_exclude_each_other(functions: tuple[str, str]) -> None:
    config = BufferConfig(type="ReplayBuffer", capacity=10)
    for name in functions:
        ReplayBuffer(config, **{name: lambda *args: args[0]})
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBuffer(config, **{name: lambda *args: args[0] for name in functions})


@pytest.mark.parametrize(
    "names",
    [
        ("obs_preprocessor", "reward_preprocessor", "policy_resp_preprocess_fn", "postprocess_fn"),
        ("env_ret_preprocess_fn", "policy_resp_preprocess_fn", "postprocess_fn"),
        ("preprocess_fn", "postprocess_fn"),
    ],
)
def test_functions_that_go_together(names: tuple[str, ...]) -> None:
    config, called = BufferConfig(type="ReplayBuffer", capacity=10), []

    def noting(name: str) -> Any:
        function = getattr(utils, f"default_{name}")
        return lambda *args: called.append(name) or function(*args)

    buffer = ReplayBuffer(config, **{name: noting(name) for name in names})
    buffer.init()
    add(buffer, 3)
    buffer.truncate_one_episode("env")
    assert buffer.get_all()["reward"].tolist() == [1, 2]
    assert set(called) == set(names)


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
