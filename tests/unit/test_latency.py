from __future__ import annotations

import math
import random
import statistics

import pytest

from rlightning.latency import ClockOffset, Histogram, LatencyStats, boot_id

SECOND = 10**9


class Peer:
    """A simulated peer: its clock is offset and drifts; the way there and back take their time."""

    def __init__(self, offset_s: float, drift_ppm: float, seed: int = 0) -> None:
        self.offset_ns = int(offset_s * SECOND)
        self.drift_ppm = drift_ppm
        self.random = random.Random(seed)

    def clock(self, local_ns: int) -> int:
        return local_ns + self.offset_ns + int(local_ns * self.drift_ppm / 10**6)

    def way(self, base_s: float) -> int:
        return int((base_s + self.random.expovariate(1 / 0.001)) * SECOND)

    def exchange(self, now: int, up_s: float, down_s: float) -> tuple[int, int, int, int]:
        received = now + self.way(up_s)
        answered = received + self.way(0.0005)
        back = answered + self.way(down_s)
        return now, self.clock(received), self.clock(answered), back


@pytest.mark.parametrize("offset_s", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize("drift_ppm", [-100, 0, 100])
@pytest.mark.parametrize(("up_s", "down_s"), [(0.001, 0.001), (0.02, 0.001), (0.0001, 0.05)])
def test_the_true_offset_and_one_way_times_lie_within_the_uncertainty(
    offset_s, drift_ppm, up_s, down_s
):
    peer, offset = Peer(offset_s, drift_ppm), ClockOffset()
    offset.set_peer("peer")
    now, shown, right = SECOND, 0, 0
    for _ in range(400):
        t1, t2, t3, t4 = peer.exchange(now, up_s, down_s)
        offset.update(t1, t2, t3, t4)
        estimate = offset.estimate(t4)
        assert estimate is not None
        assert abs(estimate[0] - (peer.clock(t4) - t4)) <= estimate[1]
        one_way = offset.downlink(t3, t4)
        if one_way is not None:
            shown += 1
            truth = (peer.clock(t4) - t3) / SECOND
            right += abs(one_way[0] - truth) <= one_way[1]
            assert one_way[0] > 0
        now = t4 + int(0.1 * SECOND)
    assert right == shown


def test_one_way_times_are_unknown_where_their_sign_is():
    offset = ClockOffset()
    offset.set_peer("peer")
    offset.update(0, 10_000, 10_000, 20_000)  # symmetric: 10 us each way, known to 10 us
    assert offset.estimate(20_000) == (0, 10_000)
    assert offset.downlink(0, 9_999) is None
    assert offset.downlink(0, 30_000) == (30e-6, pytest.approx(10e-6, rel=0.01))


def test_the_best_exchange_of_the_window_counts_and_ages():
    offset = ClockOffset(window_s=5)
    offset.set_peer("peer")
    offset.update(0, 1_000, 1_000, 2_000)
    for second in range(1, 4):
        offset.update(second * SECOND, second * SECOND, second * SECOND, second * SECOND + 10**7)
    assert offset.estimate(3 * SECOND)[1] == 1_000 + (3 * SECOND - 2_000) * 200 // 10**6
    assert offset.estimate(6 * SECOND)[1] > 10**6  # the best one is too old now
    assert offset.estimate(60 * SECOND) is None


def test_the_best_of_a_second_is_kept_and_memory_is_bounded():
    offset = ClockOffset(window_s=5)
    offset.set_peer("peer")
    for step in range(10_000):
        at = step * SECOND // 100
        offset.update(at, at + 1_000, at + 1_000, at + 2_000 + 10 * (step % 100))
    assert len(offset._buckets) <= 6
    assert offset.estimate(100 * SECOND)[1] < 250_000


def test_a_clock_that_jumped_and_another_process_forget_the_past():
    offset = ClockOffset()
    offset.set_peer("one")
    offset.update(0, 1_000, 1_000, 2_000)
    offset.update(10_000, 5 * SECOND, 5 * SECOND, 12_000)
    assert offset.estimate(12_000)[0] == 5 * SECOND - 11_000
    offset.set_peer("one")
    assert offset.offset_ns is not None or offset.estimate(12_000) is not None
    offset.set_peer("two")
    assert offset.estimate(12_000) is None


def test_stamps_that_contradict_themselves_are_not_believed():
    offset = ClockOffset()
    offset.set_peer("peer")
    offset.update(0, 0, 5_000, 1_000)
    offset.update(1_000, 0, 0, 500)
    assert offset.estimate(0) is None
    assert offset.offset_ns is None
    assert offset.uncertainty_ns is None


def test_an_offset_that_is_too_vague_is_unknown():
    offset = ClockOffset(limit_s=0.01)
    offset.set_peer("peer")
    offset.update(0, 0, 0, SECOND)
    assert offset.estimate(SECOND) is None
    assert offset.uplink(0, 1) is None


def test_one_clock_has_offset_zero_and_every_time_is_known():
    offset = ClockOffset()
    offset.set_peer("peer", same_clock=True)
    assert (offset.same_clock, offset.clock_id) == (True, "peer")
    assert (offset.offset_ns, offset.uncertainty_ns) == (0, 0)
    assert offset.uplink(1_000, 3_000) == (2e-6, 0)
    assert offset.downlink(3_000, 1_000) is None


def test_the_boot_id_is_stable():
    assert boot_id() == boot_id()


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
    other.record("inference", 0.1)
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
