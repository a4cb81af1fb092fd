"""Figures of an evaluation."""

import pytest

from rlightning.cluster.evaluate import (
    EvaluatedEpisode,
    Evaluation,
    show_evaluation,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Of Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_the_published_one(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_a_summary_counts_only_what_is_known():
    episodes = [EvaluatedEpisode(1.0, 10, True), EvaluatedEpisode(3.0, 20, None)]
    summary = Evaluation("c", 1, 0, episodes).summary()
    assert (summary["mean_return"], summary["mean_length"]) == (2.0, 15.0)
    assert summary["success_rate"] == 1.0
    none = Evaluation("c", 1, 0, episodes[1:]).summary()
    assert (none["success_rate"], none["success_interval"], none["std_return"]) == (None,) * 3


def test_the_table_has_no_blanks_at_the_ends_of_its_lines(capsys):
    episodes = [EvaluatedEpisode(-1.25, 10, True), EvaluatedEpisode(5.0, 20, False)]
    show_evaluation(Evaluation("c", 3, 0, episodes), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "c: version 3, 2 episodes"
    assert "min return     -1.25" in lines
    assert lines == [line.rstrip() for line in lines]
