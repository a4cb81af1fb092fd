from __future__ import annotations

import warnings

import numpy as np
import pytest

from rlightning.buffer.sampler import build_sampler, deal
from rlightning.errors import BufferEmptyError
from rlightning.utils.config import SamplerConfig


def test_uniform_draws_with_replacement_and_by_seed() -> None:
    sampler = build_sampler(SamplerConfig(type="uniform", seed=1))
    drawn = sampler.sample(10, 1000)
    assert np.unique(drawn).tolist() == list(range(10))
    sampler.seed(1)
    np.testing.assert_array_equal(sampler.sample(10, 1000), drawn)
    with pytest.raises(ValueError, match="'uniform' needs a batch_size"):
        sampler.sample(10, None)


def test_batch_draws_without_replacement() -> None:
    sampler = build_sampler(SamplerConfig(type="batch", seed=1))
    drawn = sampler.sample(10, 10).tolist()
    assert sorted(drawn) == list(range(10))
    assert drawn != sorted(drawn)
    with pytest.raises(ValueError, match="a batch of 11 without replacement from 10"):
        sampler.sample(10, 11)
    with pytest.raises(ValueError, match="'batch' needs a batch_size"):
        sampler.sample(10, None)


def test_all_gives_everything_in_order_or_shuffled() -> None:
    sampler = build_sampler(SamplerConfig(type="all", seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampler.sample(5, None, shuffle=False).tolist() == [0, 1, 2, 3, 4]
        assert sorted(sampler.sample(5, 5)) == [0, 1, 2, 3, 4]
    with pytest.warns(UserWarning, match="designed to sample all data"):
        assert len(sampler.sample(5, 3)) == 5


def test_nothing_to_sample_from() -> None:
    for kind in ("all", "batch", "uniform"):
        with pytest.raises(BufferEmptyError):
            build_sampler(SamplerConfig(type=kind)).sample(0, 1)


def test_rows_are_dealt_out_in_turn() -> None:
    rows = np.arange(5)
    assert [part.tolist() for part in deal(rows, 2, drop_last=True)] == [[0, 2], [1, 3]]
    assert [part.tolist() for part in deal(rows, 2, drop_last=False)] == [[0, 2, 4], [1, 3, 0]]
    assert [part.tolist() for part in deal(rows[:1], 3, drop_last=False)] == [[0], [0], [0]]
