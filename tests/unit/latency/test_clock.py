from __future__ import annotations

import statistics

import pytest

from rlightning.latency import ClockOffset, Offset, boot_id, clock, clock_id
from rlightning.latency.ways import left_at
from tests.unit.latency.peers import SECOND, Peer

MS = 10**6


def shares(peer, offset, steps, up_s, down_s, every_s=0.1, events=()):
    """Which shares of exchanges were known, and right; and the median uncertainty in seconds.

    `events` says before which exchanges the clock of the peer jumps, and by how many seconds.
    """
    events = dict(events)
    now, known, right, widths = 17 * SECOND, 0, 0, []
    for step in range(steps):
        peer.offset_ns += int(events.get(step, 0) * SECOND)
        *stamps, up, down = peer.exchange(now, up_s, down_s)
        offset.update(*stamps)
        found = offset.one_way(*stamps)
        if found is not None:
            known += 1
            widths.append(found.uncertainty_s)
            # 2 ns for the rounding of stamps.
            off = max(abs(found.uplink_s - up / SECOND), abs(found.downlink_s - down / SECOND))
            right += off <= found.uncertainty_s + 2e-9
            assert min(found.uplink_s, found.downlink_s) >= 0
        now = stamps[3] + int(peer.random.expovariate(1 / every_s) * SECOND)
    return known / steps, right / max(1, known), statistics.median(widths)


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
@pytest.mark.parametrize("drift_ppm", [-100, 0, 100])
@pytest.mark.parametrize("jitter_s", [0.00002, 0.001, 0.02])
@pytest.mark.parametrize(("up_s", "down_s"), [(0.001, 0.001), (0.04, 0.0001), (0.0001, 0.04)])
def test_true_one_way_times_lie_within_the_uncertainty(offset_s, drift_ppm, jitter_s, up_s, down_s):
    offset = ClockOffset()
    offset.set_peer("peer")
    peer = Peer(offset_s, drift_ppm, jitter_s)
    known, right, uncertainty = shares(peer, offset, 500, up_s, down_s)
    assert known == 1.0
    assert right >= 0.99
    # Honest, and of use: half of what the fastest two ways took, and what drifted since.
    assert (up_s + down_s) / 2 < uncertainty < (up_s + down_s) / 2 + jitter_s / 2 + 0.0003


@pytest.mark.parametrize("jump_s", [-7200.0, -30.0, -0.5, 0.5, 30.0, 7200.0])
@pytest.mark.parametrize(("up_s", "down_s"), [(0.001, 0.001), (0.04, 0.0001)])
def test_a_clock_that_is_set_or_stands_still_begins_a_new_epoch(jump_s, up_s, down_s):
    offset = ClockOffset()
    offset.set_peer("peer")
    events = {100: jump_s, 300: -jump_s, 301: jump_s}
    known, right, _ = shares(Peer(1.0, 100), offset, 500, up_s, down_s, events=events.items())
    assert known == 1.0
    assert right >= 0.99
    assert offset.epoch == len(events)


def test_a_clock_that_is_set_by_less_than_the_round_trip_is_noticed_by_the_middle_that_moves():
    offset = ClockOffset()
    offset.set_peer("peer")
    peer = Peer(0.0, 0, jitter_s=0.0005)
    known, right, _ = shares(peer, offset, 500, 0.02, 0.02, events=[(250, 0.015)])
    assert known == 1.0
    assert right >= 0.99
    assert offset.epoch == 1
    assert abs(offset.estimate(peer.clock(0)).offset_ns - 15 * MS) < 21 * MS


def test_jitter_alone_begins_no_epoch():
    for seed in range(5):
        offset = ClockOffset()
        offset.set_peer("peer")
        shares(Peer(1.0, 50, jitter_s=0.005, seed=seed), offset, 1000, 0.001, 0.001)
        assert offset.epoch == 0


def test_asymmetry_is_within_the_uncertainty_and_symmetry_in_the_middle():
    offset = ClockOffset()
    offset.set_peer("peer")
    shares(Peer(5.0, 0, jitter_s=0.0001), offset, 100, 0.04, 0.04)
    stamps = offset._newest_ns + SECOND // 10, 0, 0, 0
    t1 = stamps[0]
    t2 = t1 + 5 * SECOND + 40 * MS
    offset.update(t1, t2, t2, t1 + 80 * MS)
    found = offset.one_way(t1, t2, t2, t1 + 80 * MS)
    assert found.uplink_s == pytest.approx(0.04, abs=0.001)
    assert found.downlink_s == pytest.approx(0.04, abs=0.001)
    assert 0.04 <= found.uncertainty_s < 0.042


def test_drift_is_measured_and_bounds_are_kept_by_it():
    offset = ClockOffset()
    offset.set_peer("peer")
    shares(Peer(0.0, 100, jitter_s=0.00005), offset, 400, 0.0001, 0.0001)
    drift, uncertainty = offset.drift_ppm
    assert abs(drift - 100) <= uncertainty < 100
    assert offset.summary()["drift_ppm"] == drift


def test_a_long_wait_at_the_peer_whose_clock_is_slow_is_no_contradiction():
    offset = ClockOffset()
    offset.set_peer("peer")
    peer = Peer(0.0, -100)
    t1, up, down = 0, 100_000, 100_000
    t2, t3 = peer.clock(up), peer.clock(up + 10 * SECOND)
    offset.update(t1, t2, t3, up + 10 * SECOND + down)
    assert offset.estimate(up + 10 * SECOND + down) is not None


def test_the_best_exchange_of_the_window_counts_and_ages():
    offset = ClockOffset(window_s=5)
    offset.set_peer("peer")
    offset.update(0, 1_000, 1_000, 2_000)
    for second in range(1, 4):
        offset.update(second * SECOND, second * SECOND, second * SECOND, second * SECOND + 10**7)
    # The fastest answer was that of the first one, three seconds ago; the fastest request the last.
    uncertainty = offset.estimate(3 * SECOND + 10**7).uncertainty_ns
    assert uncertainty == pytest.approx((1_000 + 3.02 * SECOND * 200e-6) / 2, rel=5e-3)
    assert offset.estimate(6 * SECOND).uncertainty_ns > 10**6  # the best one is too old now
    assert offset.estimate(60 * SECOND) is None


def test_memory_is_bounded():
    offset = ClockOffset(window_s=5)
    offset.set_peer("peer")
    for step in range(10_000):
        at = step * SECOND // 100
        offset.update(at, at + 1_000, at + 1_000, at + 2_000 + 10 * (step % 100))
    assert len(offset._seconds) <= 6
    assert offset.estimate(100 * SECOND).uncertainty_ns < 250_000


def test_another_process_forgets_the_past():
    offset = ClockOffset()
    offset.set_peer("one")
    offset.update(0, 1_000, 1_000, 2_000)
    offset.set_peer("one")
    assert offset.estimate(12_000) is not None
    offset.set_peer("two")
    assert offset.estimate(12_000) is None
    assert offset.epoch == 1


def test_a_machine_that_slept_names_its_clock_anew_and_forgets_the_offsets(monkeypatch):
    own = clock._OwnClock()
    monkeypatch.setattr(clock, "_OWN", own)
    offset = ClockOffset()
    offset.set_peer("peer")
    offset.update(0, 1_000, 1_000, 2_000)
    before = clock_id()
    assert clock_id() == before
    asleep = clock._asleep_ns()
    monkeypatch.setattr(clock, "_asleep_ns", lambda: asleep + SECOND)
    own._look_ns = 0
    assert clock_id() != before
    offset.update(3_000, 10_000, 10_000, 5_000)
    assert offset.epoch == 1
    assert offset.estimate(5_000).offset_ns == 6_000


def test_stamps_that_contradict_themselves_are_not_believed():
    offset = ClockOffset()
    offset.set_peer("peer")
    offset.update(0, 0, 5_000, 1_000)
    offset.update(1_000, 0, 0, 500)
    offset.update(0, 10, 5, 500)
    assert offset.estimate(0) is None
    assert offset.offset_ns is None
    assert offset.uncertainty_ns is None
    assert "offset_s" not in offset.summary()


def test_an_offset_that_is_too_vague_is_unknown():
    offset = ClockOffset(limit_s=0.01)
    offset.set_peer("peer")
    offset.update(0, 0, 0, SECOND)
    assert offset.estimate(SECOND) is None
    assert offset.uplink(0, 1) is None
    assert offset.one_way(0, 0, 0, SECOND) is None


def test_single_messages_are_known_as_far_as_they_cannot_be_negative():
    offset = ClockOffset()
    offset.set_peer("peer")
    offset.update(0, 10_000, 10_000, 20_000)  # symmetric: 10 us each way, known to 10 us
    assert offset.estimate(20_000) == pytest.approx((0, 10_000), abs=3)
    assert offset.downlink(0, 30_000) == pytest.approx((30e-6, 10e-6), rel=0.01)
    assert offset.downlink(5_000, 10_000) == pytest.approx((7.5e-6, 7.5e-6), rel=0.01)
    assert offset.downlink(30_000, 10_000) is None  # before it was sent, whatever the offset


def test_one_clock_has_offset_zero_and_every_time_is_known():
    offset = ClockOffset()
    offset.set_peer("peer", same_clock=True)
    assert (offset.same_clock, offset.clock_id) == (True, "peer")
    assert (offset.offset_ns, offset.uncertainty_ns) == (0, 0)
    assert offset.uplink(1_000, 3_000) == pytest.approx((2e-6, 0))
    assert offset.downlink(3_000, 1_000) is None
    assert offset.one_way(0, 1_000, 2_000, 5_000) == pytest.approx((1e-6, 3e-6, 0))


def test_offsets_compose_with_their_uncertainties_added():
    policy, buffer = Offset(5_000, 10), Offset(-3_000, 20)
    assert policy.then(buffer) == (2_000, 30)
    assert policy.inverse().then(buffer) == (-8_000, 30)


@pytest.mark.parametrize("drift_ppm", [-100, 100])
@pytest.mark.parametrize("jitter_s", [0.00002, 0.02])
@pytest.mark.parametrize(("up_s", "down_s"), [(0.0001, 0.0001), (0.04, 0.0001), (0.0001, 0.04)])
def test_heartbeats_that_come_seconds_after_what_they_echo_tell_a_server_of_a_clock(
    drift_ppm, jitter_s, up_s, down_s
):
    """What a client hears, it echoes with its next heartbeat; what it sends meanwhile is measured."""
    offset = ClockOffset()
    offset.set_peer("client")
    client, now, right = Peer(3600.0, drift_ppm, jitter_s), 17 * SECOND, 0
    for _ in range(100):
        heard = now + client.way(down_s)
        beat = heard + int(client.random.uniform(1.9, 2.1) * SECOND)
        over = beat + client.way(up_s)
        offset.update(now, client.clock(heard), client.clock(beat), over)
        sent = over + client.random.randrange(SECOND)
        received = sent + client.way(up_s)
        left_ns, within_ns = left_at(client.clock(sent), received, *offset.bounds(received))
        assert left_ns <= received
        right += abs(left_ns - sent) <= within_ns + 2
        now = received
    assert right >= 99
    assert offset.epoch == 0


def test_the_boot_id_is_stable():
    assert boot_id() == boot_id()
