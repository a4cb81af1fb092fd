"""What the batches of one learner come from."""

from __future__ import annotations

import pytest

from rlightning.buffer.feeds import split_batch_size
from rlightning.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("fractions", "batch_size", "counts"),
    [
        ([0.75, 0.25], 32, [24, 8]),
        ([0.1, 0.9], 30, [3, 27]),
        ([0.29, 0.71], 100, [29, 71]),
        ([1 / 3, 2 / 3], 10, [3, 7]),
        ([1 / 3, 1 / 3, 1 / 3], 10, [4, 3, 3]),
        ([0.5, 0.5], 3, [2, 1]),
        ([1.0], 7, [7]),
    ],
)
def test_counts_are_exact_and_add_up(
    fractions: list[float], batch_size: int, counts: list[int]
) -> None:
    names = [str(i) for i in range(len(fractions))]
    assert split_batch_size(fractions, batch_size, names) == counts


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ([0.5, 0.4], "sum of 1, got 0.9"),
        ([1.5, -0.5], "at most 1, got 1.5 of table 'a'"),
        ([1.0, 0.0], "got 0 of table 'b'"),
        ([float("nan"), 0.5], "got nan of table 'a'"),
        ([0.99, 0.01], "0.01 of a batch_size of 8 is no row of table 'b'"),
    ],
)
def test_bad_fractions_are_named(fractions: list[float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        split_batch_size(fractions, 8, ["a", "b"])
