"""Staleness of rows in versions: what metrics count, and percentiles of the last minute."""

from __future__ import annotations

import numpy as np
import pytest

from rlightning.learner.staleness import Staleness


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rlightning.latency.histogram.time.monotonic", lambda: now[0])
    return now


def test_percentiles_are_whole_versions(now):
    staleness, rows = Staleness(), np.random.default_rng(0).integers(0, 32, 5000)
    for batch in np.split(rows, 10):
        staleness.record(batch)
    assert staleness.summary() == {
        "count": 5000,
        "mean": pytest.approx(rows.mean()),
        **{
            f"p{share}": int(np.quantile(rows, share / 100, method="inverted_cdf"))
            for share in (50, 90, 99)
        },
        "max": 31,
    }
    assert staleness.counts.classic()[1:] == (5000, rows.sum())


def test_a_minute_later_they_are_forgotten_and_metrics_still_count_them(now):
    staleness = Staleness()
    staleness.record(np.array([7, 7, 300]))
    now[0] += 30
    staleness.record(np.array([2]))
    old = pytest.approx(300, rel=1 / 32)
    assert staleness.summary() == {
        "count": 4,
        "mean": 79,
        "p50": 7,
        "p90": old,
        "p99": old,
        "max": 300,
    }
    now[0] += 40
    assert staleness.summary() == {"count": 1, "mean": 2, "p50": 2, "p90": 2, "p99": 2, "max": 2}
    now[0] += 60
    staleness.record(np.array([], np.int64))
    assert staleness.summary() == {"count": 0}
    assert staleness.counts.classic()[1] == 4
