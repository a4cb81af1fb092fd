"""Offsets of clocks that compose, over simulated clocks: the truth lies within the sum of the uncertainties."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.latency import ClockOffset, Offset
from rlightning.latency.axis import Axis
from tests.unit.latency.peers import SECOND, Peer

START_NS = 10_000 * SECOND
# Two clocks that drift apart move on while an exchange is under way, and stamps are whole numbers.
ROUNDING_NS = 3

ways = st.floats(0, 0.05)
peers = st.builds(
    Peer,
    offset_s=st.floats(-3600, 3600),
    drift_ppm=st.floats(-50, 50),  # any two of them: at most 100
    jitter_s=st.sampled_from([1e-6, 1e-4, 1e-2]),
    seed=st.integers(0, 2**32),
)


def exchanged(near: Peer, far: Peer, now: int, up_s: float, down_s: float) -> tuple[int, ...]:
    """The four stamps of an exchange that begins at a moment of true time, and when it is over."""
    received = now + near.way(up_s)
    answered = received + 500_000
    over = answered + near.way(down_s)
    return near.clock(now), far.clock(received), far.clock(answered), near.clock(over), over


def known(near: Peer, far: Peer, until: int, up_s: float, down_s: float, times: int) -> ClockOffset:
    """What one peer knows of the other's clock at that moment, after exchanges in the seconds before."""
    offset = ClockOffset()
    offset.set_peer(str(id(far)))
    for number in range(times):
        begun = until - (times - number) * SECOND // 2
        offset.update(*exchanged(near, far, begun, up_s, down_s)[:4])
    return offset


def true_offset(near: Peer, far: Peer, now: int) -> int:
    return far.clock(now) - near.clock(now)


def is_within(found: Offset, truth: int) -> bool:
    return abs(found.offset_ns - truth) <= found.uncertainty_ns + ROUNDING_NS


@settings(max_examples=60, deadline=None)
@given(st.lists(peers, min_size=2, max_size=5), ways, ways, st.integers(1, 12))
def test_along_a_chain_of_services(chain, up_s, down_s, times):
    """Env server to policy server to learner to buffer server: each knows only the next one."""
    steps = []
    for near, far in pairwise(chain):
        estimate = known(near, far, START_NS, up_s, down_s, times).estimate(near.clock(START_NS))
        assert estimate is not None
        assert is_within(estimate, true_offset(near, far, START_NS))
        assert is_within(estimate.inverse(), true_offset(far, near, START_NS))
        steps.append(estimate)
    whole = steps[0]
    for step in steps[1:]:
        whole = whole.then(step)
    assert is_within(whole, true_offset(chain[0], chain[-1], START_NS))
    assert is_within(whole.inverse(), true_offset(chain[-1], chain[0], START_NS))
    assert whole.uncertainty_ns == sum(step.uncertainty_ns for step in steps)
    # There and back again is where one was, and as uncertain as both ways.
    assert whole.then(whole.inverse()) == Offset(0, 2 * whole.uncertainty_ns)
    assert whole.inverse().inverse() == whole


@settings(max_examples=60, deadline=None)
@given(
    st.lists(peers, min_size=3, max_size=4),
    ways,
    ways,
    st.integers(1, 12),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
)
def test_on_one_axis(those, up_s, down_s, times, gaps_s):
    """Moments of env servers that only the learner knows, by the clock of the first of them."""
    learner, *servers = those
    axis, now = Axis(), START_NS
    for gap_s in gaps_s:
        now += gap_s * SECOND
        here = learner.clock(now)
        offsets = [known(learner, server, now, up_s, down_s, times) for server in servers]
        for offset in offsets:
            axis.learn(offset, here)
        assert axis.offset(offsets[0].clock_id, here) == Offset(0, 0)
        for server, offset in zip(servers[1:], offsets[1:], strict=True):
            found = axis.offset(offset.clock_id, here)
            assert found is not None
            assert is_within(found, true_offset(servers[0], server, now))
    # Long after nobody has answered any more, it is less certain, and still true.
    now += 600 * SECOND
    for server, offset in zip(servers[1:], offsets[1:], strict=True):
        found = axis.offset(offset.clock_id, learner.clock(now))
        assert found is not None
        assert found.uncertainty_ns > 0.2 * SECOND
        assert is_within(found, true_offset(servers[0], server, now))


def test_nothing_is_on_the_axis_of_which_nothing_was_known():
    axis, never = Axis(), ClockOffset()
    never.set_peer("never")
    axis.learn(never, START_NS)
    assert axis.offset("never", START_NS) is None
    assert axis.offset("another", START_NS) is None


def test_a_clock_that_leaps_is_believed_at_once():
    learner, first, second = (Peer(0, 0, 1e-4, seed) for seed in range(3))
    axis, now = Axis(), START_NS
    here = known(learner, first, now, 0.001, 0.001, 5)
    there = known(learner, second, now, 0.001, 0.001, 5)
    axis.learn(here, now)
    axis.learn(there, now)
    second.offset_ns += SECOND
    now += SECOND
    for number in range(5):
        exchange = exchanged(learner, second, now + number * SECOND // 4, 0.02, 0.02)
        there.update(*exchange[:4])
    now += 2 * SECOND
    axis.learn(there, now)
    found = axis.offset(there.clock_id, now)
    assert found is not None
    assert is_within(found, true_offset(first, second, now))


def test_a_summary_of_no_numbers_is_unknown():
    assert Offset.of_summary({"offset_s": 1.5, "uncertainty_s": 0.25}) == Offset(
        1_500_000_000, 250_000_000
    )
    for offset_s, uncertainty_s in [
        (float("nan"), 1.0),
        (1.0, float("inf")),
        (None, 1.0),
        (1.0, ""),
    ]:
        summary = {"offset_s": offset_s, "uncertainty_s": uncertainty_s}
        assert Offset.of_summary(summary) is None
    assert Offset.of_summary({}) is None
