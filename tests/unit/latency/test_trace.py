from __future__ import annotations

import json

from rlightning.latency import STAGES, ActTimes, Offset
from rlightning.latency.trace import TraceFile, TraceLog, trace_step
from rlightning.latency.ways import OneWay

WAYS = OneWay(3e-6, 4e-6, 1e-6)


def traced(seq: int, env_id: str = "a", ways: OneWay | None = WAYS):
    base = seq * 1_000_000
    # 5 us of encoding, 3 up, 2 + 4 + 10 + 4 at the server, 4 down, 6 of decoding.
    times = ActTimes(
        seq, base, base + 5_000, 2_000, 4_000, 10_000, 20_000, base + 32_000, base + 38_000, ways
    )
    return trace_step(
        env_id,
        times,
        asked_ns=base,
        answered_ns=base + 38_000,
        stored_ns=base + 50_000,
        stepped_ns=base + 90_000,
    )


def test_stages_lie_end_to_end_on_the_clock_of_the_env_server():
    trace = traced(7)
    assert [span.stage for span in trace.spans] == list(STAGES)
    at = trace.start_ns
    for span in trace.spans:
        assert span.start_ns == at
        at += span.duration_ns
    assert at == trace.start_ns + trace.duration_ns
    assert trace.uncertainty_ns == 1_000
    assert traced(7, ways=None) is None


def test_a_log_keeps_the_last_traces_and_tells_each_cursor_what_is_new():
    log = TraceLog(every=1)
    for seq in range(TraceLog.KEPT + 10):
        log.add(traced(seq))
    assert log.cursor == TraceLog.KEPT + 10
    assert [trace.seq for trace in log.since(log.cursor - 2)] == [1008, 1009]
    assert [trace.seq for trace in log.since(0)][:2] == [10, 11]
    assert log.since(log.cursor) == []


def test_the_file_is_whole_after_each_addition(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    names = [event["args"]["name"] for event in json.loads(path.read_text())]
    assert names == ["env server", "network", "policy server"]
    file.add([traced(1), traced(2, "b")])
    file.add([traced(3)])
    events = json.loads(path.read_text())
    steps = [event for event in events if event["name"] == "step"]
    assert [(event["ts"], event["dur"], event["tid"]) for event in steps] == [
        (0.0, 90.0, 0),
        (1000.0, 90.0, 1),
        (2000.0, 90.0, 0),
    ]
    inference = next(event for event in events if event["name"] == "inference")
    assert (inference["pid"], inference["dur"]) == (2, 10.0)
    assert inference["args"] == {"seq": 1, "uncertainty_us": 1.0, "clock_uncertainty_us": 0.0}


def test_a_trace_on_the_axis_of_another_clock_is_the_same_at_another_time(tmp_path):
    trace = traced(7)
    placed = trace.on_axis(Offset(3600 * 10**9, 2_000_000))
    assert placed.start_ns == trace.start_ns - 3600 * 10**9
    assert [span.start_ns - placed.start_ns for span in placed.spans] == [
        span.start_ns - trace.start_ns for span in trace.spans
    ]
    assert [span.duration_ns for span in placed.spans] == [span.duration_ns for span in trace.spans]
    assert (placed.uncertainty_ns, placed.clock_uncertainty_ns) == (1_000, 2_000_000)
    path = tmp_path / "trace.json"
    TraceFile(path).add([placed])
    assert json.loads(path.read_text())[-1]["args"]["clock_uncertainty_us"] == 2000.0
