"""The rows of Storage, DataContainer, BufferView and EpisodeTable."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import tensordict
import torch

from rlightning.buffer.utils import BufferView, EpisodeTable, Storage
from rlightning.buffer.utils.container import DataContainer
from rlightning.errors import ConfigError, StorageFullError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse


def rows(start: int, count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(start, start + count)}


def episodes(capacity: int, *lengths: int, **options: Any) -> DataContainer:
    container = DataContainer(capacity, unit="episode", **options)
    start = 0
    for length in lengths:
        container.push(rows(start, length))
        start += length
    return container


def held(container: DataContainer) -> list[list[int]]:
    return [container.read(i)["x"].tolist() for i in range(len(container))]


def step(t: int, *, done: bool = False) -> tuple[EnvRet, PolicyResponse]:
    return (
        EnvRet("env", np.full(2, t, np.float32), float(t), done),
        PolicyResponse("env", action=np.int64(t)),
    )


# Storage.


def test_a_storage_puts_episodes_together() -> None:
    storage = Storage(10)
    for t in range(4):
        storage.add_transition(*step(t))
    assert (len(storage), storage.size, storage.get_size()) == (0, 0, 0)
    storage.truncate_one_episode("env")
    storage.truncate_episodes(["env", step(0)[0]])
    assert (len(storage), storage.size, storage.get_size()) == (3, 3, 3)
    assert storage[1]["reward"] == 2
    assert storage.get_data()["reward"].tolist() == [1, 2, 3]
    with pytest.raises(KeyError, match="else"):
        storage.truncate_episodes(["env", "else"])
    storage.clear()
    assert storage.size == 0


def test_a_storage_takes_halves() -> None:
    storage = Storage(10, auto_truncate_episode=True)
    for t in range(3):
        env_ret, response = step(t, done=t == 2)
        storage.add_data_async(env_ret)
        if t < 2:
            storage.add_data_async(response)
    assert storage.get_data()["terminated"].tolist() == [False, True]
    with pytest.raises(TypeError, match="dict"):
        storage.add_data_async({})


def test_a_storage_knows_its_envs() -> None:
    storage = Storage(10, env_meta_list=[EnvMeta("env"), {"env_id": "other"}])
    storage.add_transition(*step(0))
    with pytest.raises(KeyError, match="none of"):
        storage.add_transition(EnvRet("third", np.zeros(2)), PolicyResponse("third", action=1))
    with pytest.raises(ValueError, match="Mismatched env_id"):
        storage.add_transition(EnvRet("env", np.zeros(2)), PolicyResponse("other", action=1))


def test_a_storage_takes_whole_episodes() -> None:
    storage = Storage(20, unit="episode")
    storage.add_episode({"x": np.arange(3)})
    storage.add_episode({"x": np.arange(8).reshape(4, 2)}, num_envs=2)
    assert [storage[i]["x"].tolist() for i in range(3)] == [[0, 1, 2], [0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match=r"expected shape \[T, 3"):
        storage.add_episode({"x": np.zeros((4, 2))}, num_envs=3)


def test_a_storage_says_how_long_adding_took(caplog: pytest.LogCaptureFixture) -> None:
    storage = Storage(10)
    storage.add_transition(*step(0))
    with caplog.at_level(logging.DEBUG):
        storage.print_timing_summary()
    assert "storage add" in caplog.text
    assert storage.timing_raw
    storage.print_timing_summary(reset=True)
    assert not storage.timing_raw


def test_a_storage_is_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="'cuda' is not supported"):
        Storage(10, device="cuda")


# DataContainer.


def test_a_list_is_pushed_in_order() -> None:
    container = DataContainer(5)
    container.push([rows(0, 2), rows(2, 1)])
    assert container.get_data()["x"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="columns"):
        container.push(3)


def test_columns_of_several_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="expected shape"):
        DataContainer(5).push({"x": np.zeros(2), "y": np.zeros(3)})


def test_tensordicts_are_pushed() -> None:
    container = DataContainer(5)
    container.push(tensordict.TensorDict({"x": torch.arange(3)}, [3]))
    assert container.get_data()["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_what_fits_is_written_at_the_pointer(unit: Any) -> None:
    container = DataContainer(6, unit=unit)
    container.push(rows(0, 2))
    container.push(rows(2, 3))
    assert (container.pointer, container.size) == (5, 5)
    assert container.data_use_counter.tolist() == [0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_fixed_refuses_what_does_not_fit(unit: Any) -> None:
    container = DataContainer(4, "fixed", unit)
    container.push(rows(0, 3))
    with pytest.raises(RuntimeError, match="2 transitions"):
        container.push(rows(3, 2))
    assert container.get_data()["x"].tolist() == [0, 1, 2]
    assert issubclass(StorageFullError, RuntimeError)


def test_circular_transitions_are_split_at_the_end() -> None:
    container = DataContainer(5)
    container.push(rows(0, 3))
    container.push(rows(3, 4))
    assert container.get_data()["x"].tolist() == [5, 6, 2, 3, 4]
    assert container.pointer == 2


def test_too_many_transitions_keep_the_last(caplog: pytest.LogCaptureFixture) -> None:
    container = DataContainer(3)
    container.push(rows(9, 1))
    with caplog.at_level(logging.WARNING):
        container.push(rows(0, 5))
    assert "the oldest are dropped" in caplog.text
    assert container.get_data()["x"].tolist() == [2, 3, 4]
    assert container.pointer == 0


def test_too_long_an_episode_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    container = episodes(4, 2)
    with caplog.at_level(logging.WARNING):
        container.push(rows(10, 6))
    assert "the last 4 are kept" in caplog.text
    assert held(container) == [[12, 13, 14, 15]]
    assert container.pointer == 4


def test_of_too_many_episodes_whole_ones_from_the_end_are_kept() -> None:
    container = DataContainer(5, unit="episode")
    container.push(rows(0, 9), [3, 2, 2, 2])
    assert held(container) == [[5, 6], [7, 8]]


def test_episodes_are_never_split() -> None:
    container = episodes(6, 3, 2, 4)
    assert held(container) == [[5, 6, 7, 8]]
    assert container.data_use_counter[4:].tolist() == [-1, -1]
    assert (len(container), container.size, container.pointer) == (1, 4, 4)


def test_the_order_of_episodes_is_their_age() -> None:
    assert held(episodes(10, 2, 3, 4, 2)) == [[2, 3, 4], [5, 6, 7, 8], [9, 10]]


def test_a_block_of_episodes_may_overtake_itself() -> None:
    container = episodes(6, 3)
    container.push(rows(10, 6), [2, 4])
    assert held(container) == [[12, 13, 14, 15]]


def test_clear_empties_and_takes_another_schema() -> None:
    container = episodes(6, 3)
    container.clear()
    assert (len(container), container.size, container.pointer) == (0, 0, 0)
    assert container.data_use_counter.tolist() == [-1] * 6
    assert len(container.episode_registry) == 0
    container.push({"y": np.zeros((2, 3))})
    assert container.get_data()["y"].shape == (2, 3)


def test_transitions_are_read_by_int_slice_array_and_tensor() -> None:
    container = DataContainer(6)
    container.push(rows(0, 4))
    assert container.read(2)["x"] == 2
    assert container.read(-1)["x"] == 3
    assert container.read(slice(1, 3))["x"].tolist() == [1, 2]
    assert container.read(np.array([3, 0]))["x"].tolist() == [3, 0]
    assert container.read(torch.tensor([1, 1]))["x"].tolist() == [1, 1]
    for bad in (4, -5, np.array([4])):
        with pytest.raises(IndexError):
            container.read(bad)
    with pytest.raises(TypeError):
        container.read("x")  # type: ignore[arg-type]


def test_every_read_counts() -> None:
    container = DataContainer(4)
    container.push(rows(0, 3))
    container.read(np.array([1, 1, 0]))
    assert container.data_use_counter.tolist() == [1, 2, 0, -1]
    container.push(rows(3, 2))
    assert container.data_use_counter.tolist() == [0, 2, 0, 0]


def test_episodes_are_read_by_int_slice_and_array() -> None:
    container = episodes(20, 3, 3, 2)
    assert container.read(0)["x"].tolist() == [0, 1, 2]
    assert container.read(-1)["x"].tolist() == [6, 7]
    assert container.read(slice(2))["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert container.read(np.array([1, 0]))["x"].shape == (2, 3)
    ragged = container.read(np.array([0, 2]))
    assert [part["x"].tolist() for part in ragged] == [[0, 1, 2], [6, 7]]
    for bad in (3, -4, np.array([3])):
        with pytest.raises(IndexError, match="3 stored episodes"):
            container.read(bad)
    with pytest.raises(TypeError):
        container.read("x")  # type: ignore[arg-type]


def test_an_episode_without_transitions_is_not_stored() -> None:
    container = DataContainer(5, unit="episode")
    container.push(rows(0, 0))
    container.push(rows(0, 3), [0, 3, 0])
    assert held(container) == [[0, 1, 2]]


def test_an_empty_container_can_be_read() -> None:
    for unit in ("transition", "episode"):
        container = DataContainer(3, unit=unit)  # type: ignore[arg-type]
        assert container.get_data() == {}


# BufferView.


def test_a_view_only_reads() -> None:
    container = DataContainer(5)
    container.push(rows(0, 2))
    view = BufferView(container)
    assert (len(view), view.capacity) == (2, 5)
    assert view[1]["x"] == 1
    with pytest.raises(AttributeError):
        view.capacity = 3  # type: ignore[misc]


# EpisodeTable.


def test_envs_go_to_the_least_loaded_storage_in_turns() -> None:
    table = EpisodeTable(2, ["a", "b", "c"])
    assert table.get_env_to_storage() == {"a": 0, "b": 1, "c": 0}
    assert table.get_storage_idx_for_env("d") == 1
    assert table.get_storage_idx_for_env("a") == 0
    table.register_envs(["a", "e"])
    assert table.get_envs_for_storage(0) + table.get_envs_for_storage(1) == [
        "a",
        "c",
        "e",
        "b",
        "d",
    ]
    for bad in (2, -1):
        with pytest.raises(IndexError):
            table.get_envs_for_storage(bad)


def test_train_workers_are_dealt_out_in_blocks() -> None:
    table = EpisodeTable(2, num_train_workers=4)
    assert table.get_storage_to_train_workers() == {0: [0, 1], 1: [2, 3]}
    assert table.get_train_workers(1) == [2, 3]
    assert EpisodeTable(2).get_storage_to_train_workers() == {}
    assert EpisodeTable(2).get_train_workers(0) == []
    with pytest.raises(AssertionError):
        EpisodeTable(2, num_train_workers=3)


@pytest.mark.parametrize("counts", [(0, None), (1, 0)])
def test_counts_below_one(counts: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        EpisodeTable(counts[0], num_train_workers=counts[1])


NODES: dict[str, Any] = {
    "far": {"buffer": {"ids": [1]}, "train": {"ids": [0]}, "env": {"ids": [1, 3]}},
    "near": {"buffer": {"ids": [0]}, "train": {"ids": [1]}, "env": {"ids": [0, 2]}},
}


def test_affinity_keeps_workers_on_their_node() -> None:
    table = EpisodeTable(2, ["x-0", "x-1", "x-3", "plain"], 2, NODES, True, True)
    assert table.get_env_to_storage() == {"x-0": 0, "x-1": 1, "x-3": 1, "plain": 1}
    assert table.get_storage_to_train_workers() == {0: [1], 1: [0]}


def test_affinity_needs_a_distribution_that_fits() -> None:
    with pytest.raises(AssertionError, match="where the workers run"):
        EpisodeTable(2, node_affinity_env=True)
    uneven = {**NODES, "far": {**NODES["far"], "env": {"ids": [1]}}}
    with pytest.raises(RuntimeError, match="differ"):
        EpisodeTable(2, None, 2, uneven, True)
    double = {**NODES, "far": {**NODES["far"], "buffer": {"ids": [1, 2]}}}
    with pytest.raises(RuntimeError, match="one storage"):
        EpisodeTable(2, None, 2, double, True)
    with pytest.raises(RuntimeError, match="nodes of their own"):
        EpisodeTable(3, None, 3, NODES, True)


def test_many_episodes_are_kept_apart() -> None:
    rng = np.random.default_rng(0)
    container, start, lengths = DataContainer(500, unit="episode"), 0, []
    for _ in range(60):
        block = rng.integers(0, 5, 9)
        container.push(rows(start, int(block.sum())), block.tolist())
        lengths += [length for length in block.tolist() if length]
        start += int(block.sum())
        ends = np.cumsum(lengths).tolist()
        expected = [
            list(range(end - length, end))
            for end, length in zip(ends[-len(container) :], lengths[-len(container) :], strict=True)
        ]
        assert held(container) == expected
    assert len(container) > 64
    assert container.episode_registry.drop_at(499).tolist() == []
