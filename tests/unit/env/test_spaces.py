"""What differs between a value and its space."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.utils.spaces import (
    as_declared,
    mismatch,
    row_of,
    same_structure,
    stack,
    structure,
    take,
    zeros,
)

VECTOR = gym.spaces.Box(-1, 1, (2,), np.float32)
NESTED = gym.spaces.Dict(a=VECTOR, b=gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Text(9))))


@pytest.mark.parametrize(
    ("space", "value", "rows", "expected"),
    [
        (VECTOR, np.zeros(2), None, None),  # float64 fits
        (VECTOR, np.full(2, 9), None, None),  # bounds are not looked at
        (VECTOR, np.zeros(3, np.float32), None, "x: expected float32[2], got float32[3]"),
        (VECTOR, np.zeros((3, 2)), 3, None),
        (VECTOR, np.zeros((3, 2)), 4, "x: expected float32[4, 2], got float64[3, 2]"),
        (
            gym.spaces.Box(0, 255, (1,), np.uint8),
            np.zeros(1),
            None,
            "x: expected uint8[1], got float64[1]",
        ),
        (NESTED, {"a": [0.0, 1.0], "b": (2, "two words")}, None, None),
        (NESTED, {"a": [0.0, 1.0], "b": (2, 3)}, None, "x.b[1]: expected Text"),
        (
            NESTED,
            {"a": [0.0, 1.0], "b": ([1], "x")},
            None,
            "x.b[0]: expected int64[], got list [1]",
        ),
        (NESTED, {"a": [0.0, 1.0], "b": (2,)}, None, "x.b: expected 2 parts, got tuple (2,)"),
        (NESTED, {"a": [0.0, 1.0]}, None, "x: expected keys ['a', 'b'], got ['a']"),
        (NESTED, 7, None, "x: expected a dict, got int 7"),
        (NESTED, {"a": np.zeros((2, 2)), "b": (np.zeros(2, int), ("p", "q"))}, 2, None),
        (gym.spaces.Text(3), ("p",), 2, "x: expected a list of 2 values, got tuple ('p',)"),
        (gym.spaces.MultiBinary(2), np.array([0, 1], np.int8), None, None),
    ],
)
def test_mismatch(space, value, rows, expected):
    got = mismatch(space, value, rows=rows, name="x")
    assert got is None if expected is None else got.startswith(expected)


def test_values_as_they_were_declared():
    given = np.zeros(2)
    value = as_declared(NESTED, {"a": given, "b": [1, "t"]})
    assert value["a"].dtype == np.float32
    assert value["b"] == (1, "t")
    given[:] = 1
    assert value["a"].tolist() == [0, 0]


def test_stack_and_take():
    items = [{"a": np.full(2, i), "b": (i, f"t{i}")} for i in range(2)]
    stacked = stack(NESTED, items)
    assert stacked["a"].dtype == np.float32
    assert stacked["b"][0].tolist() == [0, 1]
    assert stacked["b"][1] == ("t0", "t1")
    assert stack(VECTOR, [[1.0, 2.0]]).shape == (1, 2)
    rows = {"a": np.arange(6).reshape(3, 2), "b": (np.arange(3), ("x", "y", "z"))}
    taken = take(NESTED, rows, np.array([2, 0]))
    assert taken["a"].tolist() == [[4, 5], [0, 1]]
    assert taken["b"][0].tolist() == [2, 0]
    assert taken["b"][1] == ("z", "x")


def test_zeros():
    value = zeros(NESTED)
    assert NESTED.contains(value)
    assert (value["a"].tolist(), value["b"][0]) == ([0, 0], 0)


def test_structures():
    assert structure(NESTED) == {"a": (2,), "b": [(), "Text"]}
    assert structure({"agent": VECTOR}) == {"agent": (2,)}
    assert structure(None) == "NoneType"
    assert same_structure((2, 5), (5,), rows=(2, 1))
    assert not same_structure((1, 5), (5,), rows=(1, 1))
    assert not same_structure({"a": (2,)}, {"b": (2,)}, rows=(1, 1))
    assert not same_structure([(2,)], [(2,), ()], rows=(1, 1))
    assert not same_structure({"a": ()}, (), rows=(1, 1))


def test_an_exact_match_wants_the_dtype():
    space = gym.spaces.Dict({"a": gym.spaces.Box(0, 1, (2,), np.float32)})
    value = {"a": np.zeros((3, 2))}
    assert mismatch(space, value, rows=3) is None
    said = mismatch(space, value, rows=3, exact=True)
    assert said == "observation.a: expected float32[3, 2], got float64[3, 2]"
    assert mismatch(space, {"a": value["a"].astype(np.float32)}, rows=3, exact=True) is None


def test_a_row_of_a_stack_is_what_went_in():
    space = gym.spaces.Dict(
        {
            "box": gym.spaces.Box(-1, 1, (2,), np.float64),
            "parts": gym.spaces.Tuple((gym.spaces.Discrete(4), gym.spaces.Text(5))),
            "bits": gym.spaces.MultiBinary(3),
        }
    )
    space.seed(2)
    items = [space.sample() for _ in range(3)]
    batch = stack(space, items)
    for row, item in enumerate(items):
        got = row_of(space, batch, row)
        np.testing.assert_array_equal(got["box"], item["box"])
        np.testing.assert_array_equal(got["bits"], item["bits"])
        assert got["parts"] == item["parts"]
        assert isinstance(got["parts"][0], np.int64)
        got["box"][:] = 9
        assert batch["box"][row, 0] != 9
