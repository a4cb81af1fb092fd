from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer.sampler import PrioritisedSampler
from rlightning.buffer.utils.container import DataContainer
from rlightning.errors import InvalidRowError, StorageFullError
from rlightning.utils.conversions import BFloat16Array


def rows(*values: int) -> dict[str, np.ndarray]:
    return {"x": np.array(values)}


def test_the_oldest_are_overwritten_in_place() -> None:
    storage = DataContainer(5)
    storage.push(rows(0, 1, 2))
    storage.push(rows(3, 4, 5, 6))
    assert storage.get_data()["x"].tolist() == [5, 6, 2, 3, 4]
    assert (storage.pointer, len(storage), storage.size) == (2, 5, 5)
    assert storage.pushed_total == 7


def test_more_than_the_capacity_keeps_the_newest() -> None:
    storage = DataContainer(3)
    storage.push(rows(9))
    storage.push(rows(0, 1, 2, 3, 4))
    assert storage.get_data()["x"].tolist() == [2, 3, 4]
    assert storage.pointer == 0


def test_a_fixed_storage_refuses_and_writes_nothing() -> None:
    storage = DataContainer(3, "fixed")
    storage.push(rows(0, 1))
    with pytest.raises(StorageFullError, match="2 transitions for a storage that holds 2 of 3"):
        storage.push(rows(2, 3))
    assert storage.get_data()["x"].tolist() == [0, 1]


def test_reading_counts_and_copies() -> None:
    storage = DataContainer(4)
    storage.push(rows(0, 1, 2))
    assert storage.read(1)["x"] == 1
    assert storage.read(-1)["x"] == 2
    assert storage.read(slice(1, None))["x"].tolist() == [1, 2]
    read = storage.read(np.array([1, 1, 0]))["x"]
    assert read.tolist() == [1, 1, 0]
    assert storage.data_use_counter.tolist() == [1, 4, 2, -1]
    read[:] = 7
    assert storage.read(0)["x"] == 0
    for bad in (3, -4, [0, 3], np.array([-4])):
        with pytest.raises(IndexError):
            storage.read(bad)  # type: ignore[arg-type]


def test_nesting_and_dtypes_come_back() -> None:
    storage = DataContainer(2)
    bits = np.array([[1], [2]], np.uint16).view(BFloat16Array)
    storage.push({"a": {"b": (np.zeros((2, 3), np.uint8), bits)}})
    a, b = storage.get_data()["a"]["b"]
    assert (a.dtype, a.shape) == (np.uint8, (2, 3))
    assert isinstance(b, BFloat16Array)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": np.zeros(2)}, "x: expected int64"),
        ({"x": np.zeros((2, 2), int)}, "x: expected int64"),
        ({"y": np.zeros(2)}, "x missing and y not expected"),
        ({"x": np.zeros(2, int), "y": np.zeros(3)}, "y: expected shape"),
        ({"x": np.int64(3)}, "expected a leading axis"),
        ({}, "expected columns"),
    ],
)
def test_other_columns_than_before_are_refused(columns: dict, message: str) -> None:
    storage = DataContainer(3)
    storage.push(rows(1))
    with pytest.raises(InvalidRowError, match=message):
        storage.push(columns)
    assert len(storage) == 1


def test_clear_keeps_memory_and_lets_other_columns_in() -> None:
    storage = DataContainer(3)
    storage.push(rows(1, 2))
    storage.clear()
    assert len(storage) == 0
    assert storage.data_use_counter.tolist() == [-1, -1, -1]
    assert len(storage.get_data()["x"]) == 0
    storage.push({"y": np.ones(2)})
    assert sorted(storage.get_data()) == ["y"]


@pytest.mark.parametrize("removal", ["lifo", "priority"])
def test_what_was_discarded_makes_room_before_all_others(removal: Any) -> None:
    storage = DataContainer(4, removal=removal)
    if removal == "priority":
        storage.watcher = PrioritisedSampler(4)
    storage.push(rows(0, 1, 2, 3))
    assert storage.discard(1, 2) == 2
    storage.push(rows(4, 5))
    assert sorted(storage.get_data()["x"].tolist()) == [0, 3, 4, 5]
    assert storage.discard(3, 3) == 3
    storage.push(rows(6, 7, 8, 9))
    assert sorted(storage.get_data()["x"].tolist()) == [6, 7, 8, 9]


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_a_fixed_storage_has_room_again_for_what_was_discarded_last(unit: Any) -> None:
    storage = DataContainer(5, "fixed", unit)
    storage.push(rows(0, 1))
    storage.push(rows(2, 3, 4))
    assert (storage.room, storage.discard(2, 3), storage.room) == (0, 3, 3)
    storage.push(rows(5, 6, 7))
    assert storage.get_data()["x"].tolist() == [0, 1, 5, 6, 7]
