from __future__ import annotations

import math
import random
import statistics

import pytest

from rlightning.latency import Histogram, LatencyStats, SlidingHistogram
from rlightning.latency.histogram import EDGES_S, Counts


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rlightning.latency.histogram.time.monotonic", lambda: now[0])
    return now


def test_quantiles_are_right_to_a_thirtysecond():
    source = random.Random(1)
    values = [source.lognormvariate(-7, 1.5) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    cuts = statistics.quantiles(values, n=100)
    for share, truth in ((50, cuts[49]), (90, cuts[89]), (99, cuts[98])):
        assert histogram.quantile(share / 100) == pytest.approx(truth, rel=1 / 30)
    assert histogram.summary() == {
        "count": 20_000,
        "mean": pytest.approx(statistics.fmean(values)),
        "p50": histogram.p50,
        "p90": histogram.p90,
        "p99": histogram.p99,
        "max": max(values),
    }


@pytest.mark.parametrize("value", [0.0, 1e-12, 1e-9, 0.5, 1.0, 3.7, 1e4, 1e9])
def test_one_record_is_every_quantile(value):
    histogram = Histogram()
    histogram.record(value)
    assert histogram.quantile(0.0) == histogram.p50 == histogram.quantile(1.0) == value


@pytest.mark.parametrize("value", [-1e-9, math.nan])
def test_a_negative_duration_is_refused(value):
    with pytest.raises(ValueError, match="duration"):
        Histogram().record(value)


def test_an_empty_histogram_has_no_quantiles():
    assert math.isnan(Histogram().p50)
    assert math.isnan(Histogram().mean)
    assert Histogram().summary() == {"count": 0}


def test_histograms_merge():
    one, two, both = Histogram(), Histogram(), Histogram()
    for value in (0.001, 0.002, 0.3):
        one.record(value)
        both.record(value)
    for value in (0.0005, 2.0):
        two.record(value)
        both.record(value)
    one.merge(two)
    assert one.summary() == both.summary()
    assert one.min == 0.0005


def test_stats_keep_a_histogram_per_name():
    stats, other = LatencyStats(), LatencyStats()
    stats.record("queue", 0.001)
    other.record("queue", 0.002)
    other.record("inference", 0.1, 0.02)
    stats.merge(other)
    assert {name: summary["count"] for name, summary in stats.summary().items()} == {
        "queue": 2,
        "inference": 1,
    }


def test_durations_of_zero_count_as_the_shortest() -> None:
    histogram = Histogram()
    for _ in range(9):
        histogram.record(0.0)
    histogram.record(1.0)
    assert histogram.p50 < 1e-8
    assert histogram.p99 == 1.0


def test_a_sliding_histogram_forgets_what_is_older_than_its_window(now):
    histogram = SlidingHistogram()
    for value in range(1, 11):
        histogram.record(float(value))
        now[0] += 6.0
    assert histogram.summary()["count"] == 8  # the ten seconds of the first two are over
    assert histogram.summary()["max"] == 10.0
    now[0] += 30.0
    assert histogram.summary()["count"] == 3
    now[0] += 1000.0
    assert histogram.summary() == {"count": 0}
    assert (histogram.count, histogram.total) == (10, 55.0)
    histogram.record(0.5)
    assert histogram.summary()["p50"] == 0.5


def test_what_is_gathered_is_in_every_figure_at_once(now):
    histogram = SlidingHistogram()
    for value in range(1, 1001):
        histogram.record(value / 1000)
        assert histogram.count == value
    assert histogram.summary() == {
        "count": 1000,
        "mean": pytest.approx(0.5005),
        "p50": pytest.approx(0.5, rel=1 / 30),
        "p90": pytest.approx(0.9, rel=1 / 30),
        "p99": pytest.approx(0.99, rel=1 / 30),
        "max": 1.0,
    }


def test_uncertainties_are_shown_beside_what_has_them(now):
    histogram = SlidingHistogram()
    histogram.record(0.1, 0.02)
    histogram.record(0.1, 0.01)
    assert histogram.summary()["uncertainty"] == 0.02
    now[0] += 61.0
    histogram.record(0.1, 0.01)
    assert histogram.summary()["uncertainty"] == 0.01


def test_metrics_count_exactly_up_to_their_edges():
    histogram = SlidingHistogram()
    values = [*EDGES_S, 1e-5 + 1e-12, 1000.0]
    for value in values:
        histogram.record(value)
    cumulative, count, total = histogram.classic()
    assert cumulative == [sum(value <= edge for value in values) for edge in EDGES_S]
    assert count == len(values)
    assert total == pytest.approx(sum(values))
    rows = Counts((1, 2, 4))
    for value in (1, 1, 3, 9):
        rows.record(value)
    assert rows.classic() == ([2, 2, 3], 4, 14.0)


def test_what_is_off_records_nothing():
    stats = LatencyStats("queue", enabled=False)
    stats.record("queue", 1.0)
    stats.record("other", 1.0)
    assert [histogram.count for histogram in stats.values()] == [0, 0]
