import dataclasses
import json
from math import inf, nan

import pytest

from rlightning.cluster.dashboard.view import COLUMNS, View
from rlightning.cluster.snapshot import EpisodeView, ServiceView, Snapshot, TableView

NOW = "2026-01-02T03:04:05.000+00:00"
STAGE = {"count": 9, "mean": 1.0, "p50": 0.001, "p90": 0.002, "p99": 0.004, "max": 0.1}


def env(**changes):
    values = {
        "role": "env",
        "state": "SERVING",
        "rates": {"env_steps": 100.0},
        "gauges": {"rows": 8, "env_errors": 1, "policy_errors": 1, "actor_running": 1},
        "latency": {"round_trip": STAGE, "encode": STAGE, "act": STAGE, "uplink": STAGE},
    }
    return ServiceView("env", "127.0.0.1:1", **{**values, **changes})


def policy(**changes):
    values = {
        "role": "policy",
        "state": "SERVING",
        "rates": {"rows": 101.0, "requests": 12.0},
        "gauges": {"policy_version": 7, "queue_rows": 3},
        "latency": {"first_use": STAGE},
    }
    return ServiceView("policy", "127.0.0.1:2", **{**values, **changes})


def buffer(name="buffer", **changes):
    table = TableView(
        size=1,
        transitions=25,
        capacity=100,
        fill=0.25,
        writers=2,
        readers=1,
        inserted_total=9,
        sampled_total=9,
    )
    values = {
        "role": "buffer",
        "state": "SERVING",
        "rates": {"inserted": 50.0, "sampled": 60.0},
        "gauges": {"inserts_waiting": 4},
        "tables": {"default": table},
        "sessions": {"Insert": {"a": {"connected": True}, "b": {"connected": False}}},
    }
    return ServiceView(name, "127.0.0.1:3", **{**values, **changes})


LEARNER = {
    "outcome": "running",
    "elapsed_s": 12.5,
    "env_steps": 1000,
    "episodes": 50,
    "mean_return": 20.5,
    "updates": 4,
    "policy_version": 7,
    "staleness": 1.5,
    "staleness_versions": {"count": 90, "mean": 1.5, "p50": 1, "p90": 3, "p99": 4, "max": 5},
    "rows_learned": 900,
    "rows_skipped": 0,
    "age_s": 0.4,
    "latencies_s": {"learner.update": STAGE, "env.round_trip": STAGE},
}


def snapshot(*services, learner=LEARNER, **changes):
    values = {
        "env_steps": 1100,
        "env_steps_per_s": 100.0,
        "policy_version": 7,
        "episodes": EpisodeView(finished=60, recent=60, mean_return=21.0, mean_length=21.0),
    }
    time = changes.pop("time", NOW)
    return Snapshot(time, services, learner=learner, **{**values, **changes})


def figures(state, role):
    (service,) = [service for service in state["services"] if service["role"] == role]
    return {name: (value, unit) for name, value, unit in service["figures"]}


def test_what_a_run_shows():
    state, point = View("run/1").show(snapshot(env(), policy(), buffer()))
    shown = dict(zip(COLUMNS, point, strict=True))
    assert shown.pop("time") == state["time"] == 1767323045.0
    assert shown == {
        "steps_per_s": 100.0,
        "mean_return": 20.5,
        "round_trip_p50": 0.001,
        "round_trip_p90": 0.002,
        "round_trip_p99": 0.004,
        "buffer_fill": 0.25,
        "staleness": 1.5,
        "staleness_p50": 1,
        "staleness_p99": 4,
        "queue_rows": 3,
        "inserts_waiting": 4,
    }
    assert state["notice"] is None
    assert ("env steps", 1000, "") in state["facts"]
    assert figures(state, "env") == {"rows": (8, ""), "steps": (100.0, "/s"), "errors": (2, "")}
    assert figures(state, "policy")["version"] == (7, "")
    assert figures(state, "buffer")["fill"] == (25.0, "%")
    assert figures(state, "buffer")["writers"] == ("1 of 2", "")
    assert figures(state, "learner")["staleness"] == (1.5, "versions")
    assert figures(state, "learner")["p50 / p90 / p99 of it"] == ("1 / 3 / 4", "")
    assert ("act", "Act", 101.0, "rows/s") in state["links"]
    assert ("publish", "PublishWeights", "version 7", "") in state["links"]
    json.dumps(state, allow_nan=False)


def test_stages_stand_in_the_order_of_a_step():
    state, _ = View(None).show(snapshot(buffer(latency={"store": STAGE}), policy(), env()))
    assert [stage["name"] for stage in state["latency"]] == [
        "env.encode",
        "env.uplink",
        "env.round_trip",
        "policy.first_use",
        "buffer.store",
        "learner.update",
    ]


def test_how_far_a_one_way_time_may_be_off_is_shown_beside_it():
    asymmetric = {**STAGE, "p50": 0.02, "uncertainty": 0.021}
    state, _ = View(None).show(snapshot(env(latency={"uplink": asymmetric, "encode": STAGE})))
    shown = {stage["name"]: stage.get("uncertainty") for stage in state["latency"]}
    assert shown["env.uplink"] == 0.021
    assert shown["env.encode"] is None


def test_several_buffer_servers_are_one_buffer():
    one, two = buffer("buffer-0"), buffer("buffer-1")
    state, point = View(None).show(snapshot(env(), policy(), one, two))
    assert [s["label"] for s in state["services"]][2:4] == ["buffer server 0", "buffer server 1"]
    assert point[COLUMNS.index("inserts_waiting")] == 8
    assert ("insert", "Insert", 100.0, "rows/s") in state["links"]


def test_a_table_that_passes_its_capacity_is_full_and_another_is_no_fuller():
    table = buffer().tables["default"]
    tables = {"full": dataclasses.replace(table, transitions=110), "default": table}
    state, point = View(None).show(snapshot(buffer(tables=tables)))
    assert point[COLUMNS.index("buffer_fill")] == 0.625
    assert figures(state, "buffer")["fill"] == (62.5, "%")


def test_servers_behind_one_name_stand_together():
    one, two = (dataclasses.replace(env(), name=f"env@10.0.0.{i}") for i in (1, 2))
    state, point = View(None).show(snapshot(one, two, policy(), buffer()))
    assert [service["label"] for service in state["services"][:3]] == ["env server"] * 2 + [
        "policy server"
    ]
    assert [stage["name"] for stage in state["latency"]][::3][:2] == [
        "env@10.0.0.1.encode",
        "env@10.0.0.2.uplink",
    ]
    assert point[COLUMNS.index("round_trip_p90")] == 0.002


def test_a_service_that_is_down_is_told_with_how_long():
    view = View(None)
    down = policy(state="DOWN", role=None, rates={}, gauges={}, latency={}, error="refused " * 100)
    view.show(snapshot(env(), policy(), buffer()))
    first, _ = view.show(snapshot(env(), down, buffer(), time="2026-01-02T03:04:06.000+00:00"))
    state, point = view.show(snapshot(env(), down, buffer(), time="2026-01-02T03:04:16.000+00:00"))
    shown = state["services"][1]
    assert (shown["role"], shown["label"], shown["state"]) == ("policy", "policy server", "DOWN")
    assert (first["services"][1]["state_s"], shown["state_s"]) == (0.0, 10.0)
    assert len(shown["error"]) == 200
    assert state["notice"] == {
        "kind": "bad",
        "text": "The policy server at 127.0.0.1:2 does not answer.",
    }
    assert point[COLUMNS.index("queue_rows")] is None
    both, _ = view.show(snapshot(env(state="DOWN"), down, buffer()))
    assert "The env server at 127.0.0.1:1 and the policy server" in both["notice"]["text"]
    back, _ = view.show(snapshot(env(), policy(), buffer()))
    assert back["notice"] is None


@pytest.mark.parametrize(
    ("learner", "kind", "text"),
    [
        ({"outcome": "solved", "age_s": 99.0}, "info", "The run has ended: solved."),
        ({"outcome": "target_missed"}, "bad", "The run has ended: target missed."),
        ({"age_s": 31.2}, "bad", "The learner has told nothing for 31 s."),
    ],
)
def test_what_the_learner_makes_people_know(learner, kind, text):
    state, _ = View(None).show(snapshot(env(), policy(), buffer(), learner={**LEARNER, **learner}))
    assert state["notice"] == {"kind": kind, "text": text}


def test_a_learner_is_not_called_silent_while_a_service_is_away():
    told = {**LEARNER, "age_s": 60.0}
    state, _ = View(None).show(snapshot(env(state="DOWN"), policy(), buffer(), learner=told))
    assert state["services"][-1]["state"] == "running"


def test_a_learner_that_tells_nothing_is_seen_by_the_buffer_server():
    sessions = {"Sample": {"l": {"connected": True}}}
    state, point = View(None).show(
        snapshot(env(), policy(), buffer(sessions=sessions), learner=None)
    )
    assert state["services"][-1]["state"] == "connected"
    assert point[COLUMNS.index("mean_return")] == 21.0
    assert point[COLUMNS.index("staleness")] is None
    state, _ = View(None).show(snapshot(env(), policy(), buffer(), learner=None))
    assert [service["role"] for service in state["services"]] == ["env", "policy", "buffer"]


def test_a_run_in_one_process_has_what_its_learner_tells():
    view, nothing = View(None), {"env_steps": 0, "env_steps_per_s": None, "policy_version": None}
    rates = []
    for elapsed_s in (10.0, 11.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0):
        # 100 steps a second at first, then none.
        learner = {**LEARNER, "elapsed_s": elapsed_s, "env_steps": int(100 * min(elapsed_s, 12.0))}
        state, point = view.show(snapshot(learner=learner, **nothing))
        rates.append(point[COLUMNS.index("steps_per_s")])
    assert rates[:4] == [None, 100.0, 100.0, 100.0]
    assert rates[4:] == [200 / 3, 50.0, 40.0, 20.0, 0.0]
    assert point[COLUMNS.index("round_trip_p90")] == 0.002
    assert [service["role"] for service in state["services"]] == ["learner"]
    assert ("env steps", 1200, "") in state["facts"]


def test_what_is_not_finite_was_not_measured():
    broken = {**LEARNER, "mean_return": nan, "staleness": inf}
    state, point = View(None).show(snapshot(env(), policy(), buffer(), learner=broken))
    json.dumps([state, point], allow_nan=False)
    assert point[COLUMNS.index("mean_return")] is None
    assert "staleness" not in figures(state, "learner")


def test_nothing_is_known_at_first():
    unknown = [
        ServiceView(name, "127.0.0.1:9", state="DOWN") for name in ("env", "policy", "buffer")
    ]
    nothing = snapshot(
        *unknown,
        learner=None,
        env_steps=0,
        env_steps_per_s=None,
        policy_version=None,
        episodes=EpisodeView(),
    )
    state, point = View(None).show(nothing)
    assert point[1:] == (None,) * (len(COLUMNS) - 1)
    assert state["latency"] == []
    json.dumps(state, allow_nan=False)
