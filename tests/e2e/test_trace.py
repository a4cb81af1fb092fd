"""Latency of a run as a user has it: figures by stage at its end, and traces of single steps."""

import json

import pytest

from rlightning.latency import STAGES
from tests.e2e.command import CARTPOLE, SMALL, run, settings

pytestmark = pytest.mark.slow


@pytest.mark.timeout(180)
def test_the_stages_of_traced_steps_add_up_and_every_stage_is_shown(tmp_path):
    options = settings(*SMALL, "train.max_env_steps=600", "log.trace_every=1")
    code, out, err = run("train", CARTPOLE, *options, "--json", cwd=tmp_path, timeout_s=150)
    assert code == 0, err
    end = json.loads(out.splitlines()[-1])
    shown = end["latencies_s"]
    for name in (
        *(f"env.{stage}" for stage in ("encode", "uplink", "answer", "downlink", "decode")),
        *(f"env.{stage}" for stage in ("insert", "env_step", "action_age", "insert_ack", "step")),
        *("env.env_to_buffer", "policy.queue", "policy.batch_wait", "policy.inference"),
        *("policy.first_use", "buffer.store", "learner.sample_wait", "learner.update"),
        *("learner.publish", "learner.first_use", "learner.staleness"),
    ):
        figures = shown[name]
        assert figures["count"] > 0, name
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
    events = json.loads((tmp_path / end["run"] / "trace.json").read_text())
    steps = {}
    for event in events:
        if event["ph"] == "X":
            steps.setdefault((event["tid"], event["args"]["seq"]), {})[event["name"]] = event
    assert len(steps) > 50
    close = 0
    for spans in steps.values():
        whole = spans.pop("step")
        assert list(spans) == list(STAGES)
        assert all(span["dur"] >= 0 for span in spans.values())
        begin = whole["ts"] - 1e-3
        for span in spans.values():  # in order, and inside of their step
            assert span["ts"] >= begin
            begin = span["ts"]
        assert begin + span["dur"] <= whole["ts"] + whole["dur"] + 1e-3
        total = sum(span["dur"] for span in spans.values())
        close += abs(total - whole["dur"]) <= 0.05 * whole["dur"]
    assert close >= 0.95 * len(steps)
