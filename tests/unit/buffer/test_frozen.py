"""Rows that somebody wants as they were, while others write on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer.utils import frozen
from rlightning.buffer.utils.frozen import Frozen, before_write


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 64)


def collect(kept: Frozen) -> np.ndarray:
    chunks = {number: rows for some in kept.chunks(200) for number, rows in some}
    assert sorted(chunks) == list(range(kept.chunk_count))
    return np.concatenate([chunks[number] for number in sorted(chunks)])


@pytest.mark.parametrize("nbytes", [1, 200, 10**6])
@pytest.mark.parametrize(
    "index",
    [
        slice(3, 40),
        slice(None),
        (),
        7,
        np.int64(-0),
        np.array([1, 50, 99]),
        (slice(20, 30), 1),
        (np.array([5, 6]), np.array([0, 1])),
    ],
)
def test_rows_come_as_they_were(index: Any, nbytes: int) -> None:
    array = np.arange(300, dtype=np.int64).reshape(100, 3)
    before = array.copy()
    kept = Frozen(array, 100)
    assert kept.chunk_count > 10
    chunks = kept.chunks(nbytes)
    got = dict(next(chunks))
    np.testing.assert_array_equal(got[0], before[: len(got[0])])
    before_write([array], index)
    array[index] = -1
    got |= {number: rows for some in chunks for number, rows in some}
    np.testing.assert_array_equal(np.concatenate([got[n] for n in sorted(got)]), before)
    assert kept.kept_bytes == 0
    assert not frozen._frozen


def test_rows_that_nobody_wants_are_not_copied() -> None:
    array = np.zeros((100, 8))
    kept = Frozen(array, 10)
    before_write([array], slice(50, 100))
    assert kept.kept_bytes == 0
    before_write([array, np.zeros(5)], slice(9, 100))
    assert kept.kept_bytes == 64
    before_write([array], slice(9, 10))
    assert kept.kept_bytes == 64
    assert len(collect(kept)) == 10


def test_what_lies_before_a_writer_is_read_first() -> None:
    array = np.zeros(80)
    kept = Frozen(array, 80)
    chunks = kept.chunks(64)
    numbers = [number for number, _ in next(chunks)]
    before_write([array], slice(24, 33))  # chunks 3 and 4
    numbers += [number for some in chunks for number, _ in some]
    assert numbers[0] == 0
    assert sorted(numbers[1:3]) == [3, 4]
    assert numbers[3:] == [5, 6, 7, 8, 9, 1, 2]


def test_two_may_want_the_same_array() -> None:
    array = np.zeros(100)
    first = Frozen(array, 100)
    before_write([array], slice(0, 100))
    array[:] = 1
    second = Frozen(array, 100)
    before_write([array], slice(0, 100))
    array[:] = 2
    np.testing.assert_array_equal(collect(first), np.zeros(100))
    np.testing.assert_array_equal(collect(second), np.ones(100))


def test_nothing_is_copied_after_a_release() -> None:
    array = np.zeros(100)
    kept = Frozen(array, 100)
    before_write([array], 0)
    kept.release()
    assert not frozen._frozen
    before_write([array], slice(None))
    assert list(kept.chunks(64)) == []


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (5,)])
def test_small_and_empty_arrays(shape: tuple[int, ...]) -> None:
    array = np.ones(shape)
    kept = Frozen(array, 10)
    if kept.chunk_count:
        np.testing.assert_array_equal(collect(kept), array)
    assert not frozen._frozen


@pytest.mark.parametrize("sizes", [[], [3], [64], [63, 1, 1], [200, 5, 0, 128]])
def test_blobs_come_in_chunks_of_one_size(sizes: list[int]) -> None:
    blobs = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    found = frozen.FrozenBlobs(blobs)
    chunks = [chunk for some in found.chunks(64) for chunk in some]
    assert [number for number, _ in chunks] == list(range(found.chunk_count))
    assert all(len(chunk) == 64 for _, chunk in chunks[:-1])
    assert b"".join(chunk.tobytes() for _, chunk in chunks) == b"".join(blobs)
    assert found.shape == (sum(sizes),)
