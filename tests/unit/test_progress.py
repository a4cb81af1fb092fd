"""What a run shows of itself."""

import pytest
from rich.table import Table

from rlightning.cluster.display import Display, make_console, print_table
from rlightning.cluster.progress import Progress, describe_run, duration, find_latencies

SUMMARY = {"count": 3, "mean": 0.002, "p50": 0.001, "p90": 0.002, "p99": 0.003, "max": 0.004}


def test_line_shows_what_was_measured():
    progress = Progress(elapsed_s=3, env_steps=12345, steps_per_s=4115, policy_version=2)
    assert progress.line().split() == (
        [
            "3.0",
            "s",
            "steps",
            "12,345",
            "(4,115/s)",
            "episodes",
            "0",
            "return",
            "-",
            "version",
            "2",
            "staleness",
            "-",
        ]
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000_012_34, "12.3 us"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (0.0, "<0.1 us"),
        (-0.002, "-2 ms"),
        (0.9997, "1 s"),
        (0.000_999_7, "1 ms"),
        (999.7, "1,000 s"),
        (86_400.4, "86,400 s"),
    ],
)
def test_durations_have_units(seconds, text):
    assert duration(seconds) == text


def test_latencies_are_found_at_any_depth():
    stats = {
        "sessions": 1,
        "latency": {"store": SUMMARY},
        "act": {"queue": SUMMARY, "unused": {**SUMMARY, "count": 0}},
    }
    names = [name for name, _ in find_latencies(stats, "policy.")]
    assert names == ["policy.store", "policy.act.queue"]


def test_plain_lines_are_rare_and_the_last_state_is_shown(capsys):
    with Display(quiet=False, to_stderr=False, total_steps=10) as display:
        for steps in range(5):
            display.update(Progress(env_steps=steps))
        display.update(Progress(env_steps=5), final=True)
        display.update(Progress(env_steps=5), final=True)
        display.message("done")
        display.latency_table({"env.step": SUMMARY})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[:2]] == ["0", "5"]
    assert lines[2] == "done"
    assert lines[4].split() == ["env.step", "1", "ms", "2", "ms", "3", "ms", "4", "ms", "3"]


def test_the_latency_table_is_whole_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    summary = {**SUMMARY, "p99": 0.0125, "uncertainty": 0.00216, "count": 12_345}
    with Display(quiet=False, to_stderr=False, total_steps=10) as display:
        display.latency_table({"learner.sample_wait": summary, "policy.batch_wait": summary})
    text = capsys.readouterr().out
    assert "\u2026" not in text
    assert "learner.sample_wait" in text
    assert "12.5 ms" in text
    assert "\u00b12.16 ms" in text
    assert "12,345" in text


@pytest.mark.parametrize("stderr", [False, True])
def test_without_a_terminal_no_table_folds_a_word(capsys, monkeypatch, stderr):
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("service", "address", box=None)
    address = "policy-0.policy.reinforcement-learning.svc.cluster.local:50052"
    table.add_row("policy server of the second replica", address)
    print_table(make_console(stderr=stderr), table)
    captured = capsys.readouterr()
    written, nothing = (captured.err, captured.out) if stderr else (captured.out, captured.err)
    assert nothing == ""
    _, line = written.splitlines()
    assert line.split("  ")[:2] == [" policy server of the second replica", address]


def test_the_rate_of_a_resumed_run_is_its_own():
    progress = Progress(elapsed_s=2.0, env_steps=1100, steps_before=1000)
    end = describe_run(progress, "finished")
    assert end["env_steps"] == 1100
    assert end["steps_per_s"] == 50.0


def test_stdout_may_be_left_alone(capsys):
    with Display(quiet=False, to_stderr=True, total_steps=10) as display:
        display.message("hello")
    with Display(quiet=True, to_stderr=False, total_steps=10) as display:
        display.message("silence")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\n"


@pytest.mark.parametrize(
    ("reached", "returns"),
    [
        ({}, "-4.4 after 1,260 env steps"),
        (
            {"reached_return": -3.94, "reached_steps": 1200},
            "-3.9 after 1,200 env steps; at the end -4.4 after 1,260 env steps",
        ),
        ({"reached_return": -4.41, "reached_steps": 1200}, "-4.4 after 1,260 env steps"),
    ],
)
def test_the_last_line_tells_of_the_target_and_of_the_end(reached, returns):
    progress = Progress(elapsed_s=2, env_steps=1260, mean_return=-4.4, updates=7, **reached)
    assert progress.end_line("solved") == (
        f"solved: mean return {returns} and 2.0 s (630 steps/s), 7 updates"
    )


def test_the_json_line_holds_the_end():
    progress = Progress(elapsed_s=2, env_steps=100, mean_return=480.0, latencies={"a": SUMMARY})
    end = describe_run(progress, "solved")
    assert end["outcome"] == "solved"
    assert end["steps_per_s"] == 50
    assert end["latencies_s"]["a"]["p99"] == 0.003
