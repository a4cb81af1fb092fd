"""What is stored is read and sampled, and leaves again."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rlightning.buffer import (
    BufferConfig,
    ReplayBuffer,
    RolloutBuffer,
    SamplerConfig,
    build_data_buffer,
)
from rlightning.errors import BufferEmptyError, ReplayError
from tests.unit.buffer.lone_env import add, replay, step


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
