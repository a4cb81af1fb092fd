"""A robot behind a link that is cut, in a cluster whose servers are restarted: a part of `make prove-robot`."""

from __future__ import annotations

import pytest

from tests.netns.robot import check, narrow, restarts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]


def test_a_cut_and_two_restarts_lose_invent_and_repeat_nothing(tmp_path):
    outcome = restarts(tmp_path, between_s=3, cut_s=2)
    check(outcome)
    assert outcome.control["uncertain"] == 0
    assert outcome.sources["HOLD"] > 10
    assert outcome.sources["POLICY"] > 10


def test_chunks_and_jpeg_on_a_narrow_link_outlast_cuts(tmp_path):
    outcome = narrow(tmp_path, between_s=5, cuts_s=(0.3, 3))
    check(outcome)
    assert outcome.lost == 0
    # A chunk lasts for two seconds.
    assert outcome.sources["POLICY"] > outcome.sources["HOLD"]
