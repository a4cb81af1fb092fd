from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from types import ModuleType

import pytest

from rlightning.errors import RLightningError
from rlightning.types import BatchedData, EnvRet, PolicyResponse, UnknownIdError


def test_keeps_the_order_of_its_pairs():
    batch = BatchedData(["b", "a"], [1, 2])
    assert batch.ids() == ("b", "a")
    assert batch.values() == (1, 2)
    assert list(batch.items()) == list(batch) == [("b", 1), ("a", 2)]
    assert len(batch) == 2


def test_ids_and_values_are_the_same_objects_at_each_call():
    batch = BatchedData(["a"], [1])
    assert batch.ids() is batch.ids()
    assert batch.values() is batch.values()


def test_does_not_see_later_changes_of_its_input():
    ids, data = ["a"], [1]
    batch = BatchedData(ids, data)
    ids.append("b")
    data[0] = 5
    assert list(batch) == [("a", 1)]


def test_an_iterator_is_used_once_and_each_is_fresh():
    batch = BatchedData(["a"], [1])
    items = batch.items()
    assert list(items) == [("a", 1)]
    assert list(items) == []
    assert list(batch.items()) == [("a", 1)]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"Length of ids and data must be the same"):
        BatchedData(["a"], [])


def test_first_of_a_repeated_id_is_found():
    assert BatchedData(["a", "b", "a"], [1, 2, 3])["a"] == 1


@pytest.mark.parametrize("kind", [KeyError, ValueError, RLightningError, UnknownIdError])
def test_unknown_id_is_an_error_of_each_promised_kind(kind):
    with pytest.raises(kind, match=r"^no data under id 'x'; ids are \('a',\)$"):
        BatchedData(["a"], [1])["x"]


def test_from_dict_takes_its_items_in_order():
    assert list(BatchedData.from_dict({"b": 1, "a": 2})) == [("b", 1), ("a", 2)]
    assert len(BatchedData.from_dict({})) == 0


def test_plain_data_is_no_future():
    data = [1, None, EnvRet("a", 0), PolicyResponse("a", done=True, result=3)]
    assert not BatchedData(list(range(4)), data).is_future
    assert not BatchedData([], []).is_future


def test_one_future_among_the_data_is_enough():
    assert BatchedData(["a", "b"], [1, Future()]).is_future


def test_an_asyncio_future_is_a_future():
    loop = asyncio.new_event_loop()
    try:
        assert BatchedData(["a"], [loop.create_future()]).is_future
    finally:
        loop.close()


def test_an_object_ref_is_a_future_once_ray_is_loaded(monkeypatch):
    ray = ModuleType("ray")
    ray.ObjectRef = type("ObjectRef", (), {})
    reference = ray.ObjectRef()
    assert not BatchedData(["a"], [reference]).is_future
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert BatchedData(["a"], [reference]).is_future


def test_is_future_is_an_attribute_that_can_be_set():
    batch = BatchedData(["a"], [1])
    batch.is_future = True
    assert batch.is_future
