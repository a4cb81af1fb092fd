"""What is recorded by stamps, many at a time, is what each set of stamps says."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest

from rlightning.latency import STAGES, ActTimes, LatencyStats
from rlightning.latency.stages import ACT, BATCH, INSERT, STEP, STORE, WAIT, ActStamps

SECOND = 10**9
US = 1000


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rlightning.latency.histogram.time.monotonic", lambda: now[0])
    return now


def act(number=0, at_s=1000.0, lower=0.0, upper=0.0, ahead_ns=0):
    """5 us of encoding, 3 up, 2 + 4 + 10 + 4 at the server, 6 down, 7 of decoding; each some more."""
    begun, more = int(at_s * SECOND), number * US
    encoded = begun + 5 * US + more
    received = encoded + 3 * US + more + ahead_ns
    sent = received + 20 * US + 4 * more
    heard = sent + 6 * US + more - ahead_ns
    done = heard + 7 * US + more
    stamps = (done, begun, encoded, received, sent, heard)
    return ActStamps(*stamps, 2 + number, 4 + number, 10 + number, lower, upper)


def test_the_stages_of_many_answers_are_those_of_each(now):
    stats = LatencyStats()
    for number in range(1000):
        stats.record_stamps(ACT, act(number))
    assert list(stats) == [*list(STAGES)[:8], "act"]
    for stage, least in zip(STAGES, (5, 3, 2, 4, 10, 4, 6, 7), strict=False):
        shown = stats[stage].summary()
        assert shown["count"] == 1000
        assert shown["max"] == pytest.approx((least + 999) * 1e-6, rel=1e-6)
        assert shown["mean"] == pytest.approx((least + 499.5) * 1e-6, rel=1e-6)
        assert shown["p50"] == pytest.approx((least + 500) * 1e-6, rel=1 / 30)
        assert "uncertainty" not in shown
    assert stats["act"].window().min == pytest.approx(41e-6)
    assert stats["uplink"].classic()[0][1:4] == [8, 48, 98]  # at most 10, 50 and 100 us


def test_ways_between_two_clocks_are_those_of_a_single_trace(now):
    hour = 3600 * SECOND
    for slack in (1 * US, 2 * US, 8 * US):
        stamps = act(ahead_ns=hour, lower=hour - slack, upper=hour + 2 * US)
        ways = ActTimes.of(1, stamps).ways
        stats = LatencyStats()
        stats.record_stamps(ACT, stamps)
        for stage, seconds in (("uplink", ways.uplink_s), ("downlink", ways.downlink_s)):
            shown = stats[stage].summary()
            assert shown["max"] == pytest.approx(seconds, abs=2e-9)
            assert shown["uncertainty"] == pytest.approx(ways.uncertainty_s, abs=2e-9)
    # The truth, 3 us up and 6 down, is within what is shown.
    assert abs(ways.uplink_s - 3e-6) <= ways.uncertainty_s
    assert abs(ways.downlink_s - 6e-6) <= ways.uncertainty_s


@pytest.mark.parametrize("bounds", [(math.nan, math.nan), (5.0 * US, 9.0 * US)])
def test_ways_that_are_not_known_are_left_out_and_nothing_else(now, bounds):
    stats = LatencyStats()
    for number in range(3):
        stats.record_stamps(ACT, act(number, lower=bounds[0], upper=bounds[1]))
    stats.record_stamps(ACT, act())
    counts = {name: summary["count"] for name, summary in stats.summary().items()}
    assert counts.pop("uplink") == counts.pop("downlink") == (1 if math.isnan(bounds[0]) else 2)
    assert set(counts.values()) == {4}


def test_steps_waits_and_inserts(now):
    stats, base = LatencyStats(), 1000 * SECOND
    stats.record_stamps(STEP, (base + 90, base, base + 38, base + 50))
    stats.record_stamps(WAIT, (base + 9, base + 7, base))
    stats.record_stamps(WAIT, (base + 9, base - 7, base))
    stats.record_stamps(BATCH, (base + 20, base + 9, base + 7, base))
    stats.record_stamps(STORE, (base + 20, base + 9))
    stats.record_stamps(INSERT, (base + 60, base + 20, base, base + 32, 0.0, 4.0))
    stats.record_stamps(INSERT, (base + 50, base + 20, base, math.nan, math.nan, math.nan))
    assert {name: [s["count"], round(s["mean"] * 1e9)] for name, s in stats.summary().items()} == {
        "round_trip": [1, 38],
        "insert": [1, 12],
        "action_age": [1, 50],
        "env_step": [1, 40],
        "step": [1, 90],
        "queue": [3, 5],
        "batch_wait": [3, 4],
        "inference": [1, 11],
        "store": [1, 11],
        "insert_ack": [2, 35],
        "env_to_buffer": [1, 30],
    }
    assert stats["env_to_buffer"].summary()["uncertainty"] == pytest.approx(2e-9)


def test_each_is_in_the_ten_seconds_in_which_it_was_recorded(now):
    stats = LatencyStats()
    for second in range(60):
        now[0] = 1000.0 + second
        stats.record_stamps(ACT, act(second, now[0], lower=-US * second, upper=0.0))
        stats.record("queue", 1.0)
    assert stats["act"].summary()["count"] == 60
    assert stats["queue"].summary()["count"] == 120
    now[0] = 1069.0
    assert stats["act"].summary()["count"] == 50
    assert stats["queue"].summary()["count"] == 100
    now[0] = 1119.0
    assert [stats[name].summary()["count"] for name in ("act", "queue")] == [0, 0]
    assert [stats[name].count for name in ("act", "queue")] == [60, 120]
    stats.record_stamps(ACT, act(0, now[0]))
    assert stats["uplink"].summary() == {
        "count": 1,
        **dict.fromkeys(("mean", "p50", "p90", "p99", "max"), pytest.approx(3e-6)),
    }


def test_those_of_several_merge(now):
    one, two = LatencyStats(), LatencyStats()
    one.record_stamps(STEP, (1000 * SECOND, *[999 * SECOND] * 3))
    two.record_stamps(STEP, (1000 * SECOND, *[998 * SECOND] * 3))
    one.merge(two)
    assert (one["step"].count, one["step"].total) == (2, 3.0)


def test_what_is_off_records_nothing_and_what_is_cleared_is_gone(now):
    off, on = LatencyStats(enabled=False), LatencyStats()
    for stats in (off, on):
        stats.record_stamps(STEP, (4, 1, 2, 3))
    assert off.summary() == {}
    on.clear()
    on.record_stamps(STEP, (1000 * SECOND, *[999 * SECOND] * 3))
    assert on["step"].count == 1


def test_memory_is_flat_over_a_million_recorded_steps():
    stats, at_s, steps = LatencyStats(), 10.0, 0

    def record(count):
        nonlocal at_s, steps
        stamps = act(lower=-3.0 * US, upper=2.0 * US)
        for _ in range(count):
            at_s += 0.001
            stats.record_stamps(ACT, (at_s * 1e9, *stamps[1:]))
        steps += count

    record(50_000)
    gc.collect()
    before = resident_bytes()
    record(1_000_000)
    gc.collect()
    assert resident_bytes() - before < 2**20
    assert stats["encode"].count == steps


def resident_bytes():
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        * 1024
    )
