"""When inserts and samples wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from rlightning.buffer.limiter import RateLimiter
from rlightning.utils.config import BufferConfig, RateLimiterConfig


def limiter(**settings: Any) -> RateLimiter:
    return RateLimiter(RateLimiterConfig(**settings))


def test_nothing_is_sampled_below_the_minimum_size() -> None:
    mine = limiter(min_size=5)
    assert not mine.may_sample(4, 1)
    assert mine.may_sample(5, 10**9)
    assert mine.may_insert(10**9)


@pytest.mark.parametrize(("ratio", "buffer"), [(1.0, 1.0), (4.0, 8.0), (0.5, 3.0), (2.5, 100.0)])
def test_the_ratio_stays_in_its_band_whoever_is_faster(ratio: float, buffer: float) -> None:
    mine = limiter(min_size=10, samples_per_insert=ratio, error_buffer=buffer)
    middle = ratio * 10
    for eager in ("insert", "sample") * 5:
        for _ in range(300):
            if eager == "insert" and mine.may_insert(mine.inserted):
                mine.inserted += 1
            elif eager == "sample" and mine.may_sample(mine.inserted, 1):
                mine.sampled += 1
            elif mine.may_insert(mine.inserted):  # the eager one waits for the other
                mine.inserted += 1
            elif mine.may_sample(mine.inserted, 1):
                mine.sampled += 1
            if mine.inserted >= 10:
                assert middle - buffer <= mine.surplus <= middle + buffer
    assert mine.sampled > 0
    assert abs(mine.sampled / mine.inserted - ratio) <= (middle + buffer) / mine.inserted


def test_one_side_can_always_go_on_with_batches_up_to_the_most_at_once() -> None:
    mine = limiter(min_size=3, samples_per_insert=2.0, error_buffer=8.0)
    batch = int(mine.most_at_once)
    assert batch == 14
    for _ in range(1000):
        if mine.may_sample(mine.inserted, batch):
            mine.sampled += batch
        else:
            assert mine.may_insert(mine.inserted)
            mine.inserted += 1
    larger = limiter(min_size=3, samples_per_insert=2.0, error_buffer=8.0)
    while larger.may_insert(larger.inserted):
        larger.inserted += 1
    assert larger.may_sample(larger.inserted, batch)
    larger.sampled += batch - 12
    while larger.may_insert(larger.inserted):
        larger.inserted += 1
    assert not larger.may_sample(larger.inserted, batch + 3)


def test_a_queue_bounds_what_is_in_it() -> None:
    mine = limiter(queue_size=4)
    assert mine.may_insert(3)
    assert not mine.may_insert(4)
    assert mine.may_sample(1, 1)
    assert not mine.may_sample(0, 0)
    assert mine.most_at_once == 4


def test_it_goes_on_from_a_saved_state() -> None:
    mine = limiter(samples_per_insert=2.0, error_buffer=4.0)
    mine.inserted, mine.sampled = 7, 11
    other = limiter(samples_per_insert=2.0, error_buffer=4.0)
    other.restore(mine.state())
    assert other.describe(7) == mine.describe(7)
    assert other.surplus == 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_insert": 2.0}, "expected both or neither"),
        ({"samples_per_insert": 8.0, "error_buffer": 7.0}, "error_buffer: expected at least 8"),
        ({"samples_per_insert": 0.0, "error_buffer": 7.0}, "greater than 0"),
        ({"queue_size": 5, "min_size": 2}, "a queue has neither"),
        ({"min_size": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_bounds_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateLimiterConfig(**settings)


def test_a_limiter_needs_a_buffer_that_samples_again() -> None:
    with pytest.raises(ValueError, match="rate_limiter: needs a ReplayBuffer"):
        BufferConfig(type="RolloutBuffer", capacity=5, rate_limiter=RateLimiterConfig(min_size=2))
    with pytest.raises(ValueError, match="leave sampler out, got 'uniform'"):
        BufferConfig.from_dict(
            {
                "type": "ReplayBuffer",
                "capacity": 5,
                "sampler": {"type": "uniform"},
                "rate_limiter": {"queue_size": 2},
            }
        )
