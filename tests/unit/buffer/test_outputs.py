"""Batches that are written into the arrays of earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer, SamplerConfig, sampled_table
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.utils.layout import iter_arrays
from rlightning.errors import InvalidRowError


def episode(count: int) -> dict[str, Any]:
    rows = np.arange(count + 1, dtype=np.float32)
    stack = np.stack([rows - 1, rows], axis=1)
    return {
        "observation": {"frames": stack[:-1], "pair": (rows[:-1], rows[:-1])},
        "next_observation": {"frames": stack[1:], "pair": (rows[1:], rows[1:])},
        "reward": rows[:-1],
    }


def replay(sampler: str = "uniform", **given: Any) -> ReplayBuffer:
    options = {"length": 3} if sampler == "sequence" else {}
    config = BufferConfig(
        type="ReplayBuffer",
        capacity=40,
        sampler=SamplerConfig(type=sampler, seed=1, **options),  # type: ignore[arg-type]
        **given,
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    buffer.add_episode(episode(30))
    return buffer


def pointers(batch: Any) -> list[int]:
    names = ("observation", "next_observation", "reward")
    columns = {name: batch[name] for name in names}
    return [leaf.__array_interface__["data"][0] for leaf in iter_arrays(columns)]


def check(batch: Any) -> None:
    reward = batch["reward"]
    np.testing.assert_array_equal(batch["observation"]["frames"][..., 1], reward)
    np.testing.assert_array_equal(batch["observation"]["frames"][..., 0], reward - 1)
    np.testing.assert_array_equal(batch["next_observation"]["frames"][..., 1], reward + 1)
    np.testing.assert_array_equal(batch["next_observation"]["pair"][0], reward + 1)


@pytest.mark.parametrize("stack", [{}, {"observation.frames": {"axis": 0}}])
@pytest.mark.parametrize("sampler", ["uniform", "prioritised", "sequence"])
def test_the_same_arrays_hold_the_next_batch(sampler: str, stack: dict[str, Any]) -> None:
    buffer = replay(sampler, storage={"frame_stack": stack})
    first = buffer.sample(16)
    before, at = first[0]["reward"].copy(), pointers(first[0])
    second = buffer.sample(16, out=first)
    assert pointers(second[0]) == at
    check(second[0])
    assert not np.array_equal(before, second[0]["reward"])
    assert ("sample_index" in second[0]) == (sampler == "prioritised")


def test_without_out_a_batch_is_never_written_again() -> None:
    buffer = replay()
    first = buffer.sample(16)
    kept = first[0]["reward"].copy()
    for _ in range(5):
        buffer.sample(16)
    np.testing.assert_array_equal(first[0]["reward"], kept)


def test_what_does_not_fit_is_refused_by_name() -> None:
    buffer = replay()
    (batch,) = buffer.sample(8)
    with pytest.raises(InvalidRowError, match=r"out: observation\.frames: expected shape \[9, 2\]"):
        buffer.sample(9, out=[batch])
    with pytest.raises(ValueError, match="expected a batch for each of 1 workers, got 2"):
        buffer.sample(8, out=[batch, batch])
    wrong = {**batch, "reward": batch["reward"].astype(np.int64)}
    with pytest.raises(InvalidRowError, match="out: reward: expected float32"):
        buffer.sample(8, out=[wrong])
    with pytest.raises(InvalidRowError, match="out: reward missing"):
        buffer.sample(8, out=[{name: batch[name] for name in batch if name != "reward"}])
    fixed = batch["reward"].copy()
    fixed.flags.writeable = False
    with pytest.raises(InvalidRowError, match="out: reward: expected writable"):
        buffer.sample(8, out=[{**batch, "reward": fixed}])


def test_a_table_writes_into_what_was_encoded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_table, "LEAST_BYTES", 0)
    table = BufferTable("t", BufferConfig(type="ReplayBuffer", capacity=40))
    table.buffer.add_episode(episode(30))
    first = table.take(16)
    assert first is not None
    at = pointers(first.sample)
    second = table.take(16)  # the first is still in use
    assert second is not None
    assert pointers(second.sample) != at
    table.copied(first)
    assert not first.sample
    third = table.take(16)
    assert third is not None
    assert pointers(third.sample) == at
    check(third.sample)
    # Something else is stored now, in which an earlier batch has no place.
    table.copied(third)
    table.clear()
    table.buffer.add_episode({"reward": np.arange(20, dtype=np.float64)})
    other = table.take(16)
    assert other is not None
    assert other.sample["reward"].dtype == np.float64
