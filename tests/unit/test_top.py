"""What `rlightning top` looks at, and how it shows it."""

import gc
import io
import threading

import pytest
from rich.console import Console

from rlightning.buffer.remote_buffer import BufferStatus, TableStatus
from rlightning.cluster.overview import overview
from rlightning.cluster.runs import Run
from rlightning.cluster.sight import find_sight
from rlightning.cluster.snapshot import (
    EpisodeView,
    ServiceView,
    Snapshot,
    TableView,
    _buffer_view,
)
from rlightning.cluster.top import _is_over, top
from rlightning.errors import ConfigError
from rlightning.testing import wait_until
from rlightning.utils.config import ClientAuthConfig, MainConfig

SUMMARY = {"count": 3, "mean": 0.002, "p50": 0.001, "p90": 0.002, "p99": 0.003, "max": 0.004}
ADDRESSES = {"policy": "h:1", "buffer": "h:2", "env": "h:3"}


def make_run(tmp_path, **listen):
    config = MainConfig.from_dict(
        {
            "env": {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1"},
            "log": {"log_dir": str(tmp_path / "runs")},
            "services": {name: {"listen": address} for name, address in listen.items()},
        }
    )
    run = Run.create(config, command=[])
    run.begin()
    return config, run


def write(tmp_path, config):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    return str(file)


def test_addresses_are_looked_at_as_they_are():
    auth = ClientAuthConfig(token="t")
    sight = find_sight(["env-1:1", "[::1]:2", "unix:/s"], auth)
    assert [(t.name, t.address, t.auth) for t in sight.targets] == [
        (address, address, auth) for address in ("env-1:1", "[::1]:2", "unix:/s")
    ]
    assert [t.section for t in sight.targets] == [None] * 3  # whatever their names look like
    assert sight.run is None


def test_what_is_none_of_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="runs/99: expected HOST:PORT, the folder of a run or a"):
        find_sight([str(tmp_path / "runs" / "99")])


def test_a_config_whose_ports_the_system_chooses_is_found_by_its_last_run(tmp_path):
    config, run = make_run(tmp_path, policy="127.0.0.1:5", buffer="127.0.0.1:6", env="127.0.0.1:7")
    for service in (config.services.policy, config.services.buffer, config.services.env):
        service.listen[0].address = "127.0.0.1:0"
    for names in ([write(tmp_path, config)], [str(run.path)]):
        sight = find_sight(names)
        assert [t.address for t in sight.targets] == ["127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"]
        assert sight.run == run.path.resolve()
    assert [t.name for t in sight.targets] == ["policy", "buffer", "env"]


def test_a_config_with_addresses_has_the_learner_of_its_last_run_only_if_that_had_the_same(
    tmp_path,
):
    config, run = make_run(tmp_path, policy="h:1", buffer="h:2", env="h:3")
    assert find_sight([write(tmp_path, config)]).run == run.path.resolve()
    config.services.env.listen[0].address = "h:4"
    sight = find_sight([write(tmp_path, config)])
    assert [t.address for t in sight.targets] == ["h:1", "h:2", "h:4"]
    assert sight.run is None


def test_each_replica_of_the_policy_server_is_looked_at(tmp_path):
    config, _ = make_run(tmp_path, buffer="h:2", env="h:3")
    config.services.policy.addresses = ["h:1", "h:4"]
    sight = find_sight([write(tmp_path, config)])
    assert [(t.name, t.address) for t in sight.targets] == [
        ("policy-0", "h:1"),
        ("policy-1", "h:4"),
        ("buffer", "h:2"),
        ("env", "h:3"),
    ]


def test_a_run_that_is_starting_is_waited_for(tmp_path, monkeypatch):
    """Before, the one before it was shown, whose services are all gone."""
    config, old = make_run(tmp_path, policy="h:1", buffer="h:2", env="h:3")
    old.finish("finished")
    for service in (config.services.policy, config.services.buffer, config.services.env):
        service.listen[0].address = "127.0.0.1:0"
    file = write(tmp_path, config)
    monkeypatch.chdir(tmp_path)
    for names in ([], ["latest"], [file], None):
        new = Run.create(config, command=[])
        said = []

        def begin(new=new, said=said):
            wait_until(lambda: said)
            for name in ADDRESSES:
                getattr(config.services, name).listen[0].address = "127.0.0.1:5"
            new.save_config(config)
            new.begin()

        beginner = threading.Thread(target=begin)
        beginner.start()
        sight = find_sight([str(new.path)] if names is None else names, report=said.append)
        beginner.join()
        assert sight.run == new.path.resolve()
        assert {target.address for target in sight.targets} == {"127.0.0.1:5"}
        (line,) = said
        assert "waits for the start of" in line
        for name in ADDRESSES:
            getattr(config.services, name).listen[0].address = "127.0.0.1:0"


def test_a_run_whose_start_failed_or_was_killed_is_not_waited_for(tmp_path, monkeypatch):
    config, old = make_run(tmp_path, policy="h:1", buffer="h:2", env="h:3")
    killed = Run.create(config, command=[])
    killed.manifest["pid"] = 2**22 + 1  # above the highest
    killed._save_manifest()
    monkeypatch.chdir(tmp_path)
    assert find_sight([]).run == old.path.resolve()
    long_ago = Run.create(config, command=[])
    long_ago.manifest["start"] = "2020-01-01T00:00:00.000+00:00"
    long_ago._save_manifest()
    assert find_sight([]).run == old.path.resolve()
    failed = Run.create(config, command=[])
    (failed.logs / "env_server.log").write_text("no luck\n")
    failed.finish("failed")
    assert find_sight([]).run == old.path.resolve()


def test_without_a_terminal_the_end_of_a_run_is_shown_once(tmp_path, capsys):
    _, run = make_run(tmp_path, **dict.fromkeys(ADDRESSES, "127.0.0.1:1"))
    run.finish("finished")
    assert not top(find_sight([str(run.path)]), once=False, as_json=False, interval_s=0.001)
    shown = capsys.readouterr().out
    assert shown.count("has ended: finished") == 1
    assert shown.count("DOWN") == 3
    assert not [line for line in shown.splitlines() if line != line.rstrip()]


def test_when_its_reader_has_gone_it_ends_and_leaves_nothing_behind(monkeypatch, caplog):
    def gone(*_, **__):
        raise SystemExit(1)  # as rich makes of a broken pipe

    monkeypatch.setattr("rlightning.cluster.top.print_table", gone)
    with pytest.raises(SystemExit):
        top(find_sight(["127.0.0.1:1"]), once=False, as_json=False, interval_s=0.1)
    gc.collect()
    assert "Task was destroyed" not in caplog.text


@pytest.mark.parametrize(
    ("outcome", "state", "over"),
    [
        ("solved", "DOWN", True),
        ("solved", "SERVING", False),  # `after_target: serve`
        ("running", "DOWN", False),
        (None, "DOWN", False),
    ],
)
def test_a_run_is_over_when_it_has_ended_and_nothing_serves_on(outcome, state, over):
    assert _is_over(outcome, Snapshot("now", [ServiceView("env", "h:3", state=state)])) is over


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["h:1", "config.yaml"], "not both"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["."], "no folder of a run"),
    ],
)
def test_what_cannot_be_looked_at(tmp_path, monkeypatch, names, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        find_sight(names)


def test_a_config_without_ports_and_runs_says_what_to_do(tmp_path):
    config, _ = make_run(tmp_path)
    config.log.log_dir = str(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="give its folder, or addresses"):
        find_sight([write(tmp_path, config)])


def text_of(snapshot, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(overview(snapshot, title="cart/1", width=width))
    return console.file.getvalue()


def test_the_view_shows_what_is_known_and_what_is_wrong():
    table = TableView(10, 10, 40, 0.25, 2, 1, 1234, 5)
    services = [
        ServiceView(
            "buffer",
            "h:2",
            role="buffer",
            state="SERVING",
            rtt_s=0.001,
            rates={"inserted": 1000.4, "sampled": 0.0},
            gauges={"inserts_waiting": 7},
            counters={"refused_total": 3},
            sessions={
                "Insert": {"a": {"connected": True}, "b": {"connected": False}},
                "Sample": {},
            },
            tables={"default": table},
            latency={"store": SUMMARY},
        ),
        ServiceView("env", "h:3", role="env", state="DOWN", error="h:3: cannot connect"),
    ]
    ages = {"count": 9, "mean": 1.2, "p50": 1.0, "p90": 2.0, "p99": 1234.0, "max": 2000.0}
    learner = {
        "outcome": "running",
        "age_s": 60.0,
        "latencies_s": {"learner.update": SUMMARY},
        "staleness_versions": ages,
    }
    text = text_of(
        Snapshot("now", services, episodes=EpisodeView(4, 4, 12.5, 3.0), learner=learner)
    )
    for shown in (
        "cart/1",
        "1 of 2",
        "1,000 in/s  0 out/s",
        "7 inserts",
        "25%",
        "return 12.5",
        "learner running, told 60 s ago",
        "p50 / p90 / p99 1 / 2 / 1,234",
        "buffer.store",
        "learner.update",
        "env: h:3: cannot connect",
        "buffer: refused 3",
        "DOWN",
    ):
        assert shown in text
    assert "- steps/s" in text  # what was not measured


def wide_snapshot():
    work = {"rates": {"rows": 4043.0, "batches": 114.0}, "gauges": {"queue_rows": 12345}}
    there = {"role": "policy", "state": "SERVING", "library_version": "0.1.0", "rtt_s": 0.00567}
    ages = {"count": 9, "p50": 1.0, "p90": 2.0, "p99": 1234.0}
    return Snapshot(
        "now",
        [
            ServiceView("policy", "policy-server-0.example.internal:33667", **there, **work),
            ServiceView("env", "h:3", role="env", state="NOT_SERVING", error="no luck " * 150),
        ],
        learner={"outcome": "running", "age_s": 60.0, "staleness_versions": ages},
    )


@pytest.mark.parametrize("width", [80, 100])
def test_no_state_or_figure_is_cut_on_a_narrow_terminal(width):
    text = text_of(wide_snapshot(), width)
    for shown in (
        "SERVING",
        "NOT_SERVING",
        "5.67 ms",
        "4,043",
        "batches/s",
        "12,345 rows",
    ):
        assert shown in text
    assert ("0.1.0" in text) is (width == 100)
    assert "\u2026" not in text


def test_without_a_terminal_nothing_is_wrapped(tmp_path, monkeypatch, capsys):
    """Before, a word of the learner's line could stand alone on the next one."""

    async def looks(sight, **kwargs):
        yield wide_snapshot()

    monkeypatch.setattr("rlightning.cluster.top._looks", looks)
    monkeypatch.setenv("COLUMNS", "40")
    _, run = make_run(tmp_path, **dict.fromkeys(ADDRESSES, "127.0.0.1:1"))
    top(find_sight([str(run.path)]), once=True, as_json=False, interval_s=0.001)
    lines = capsys.readouterr().out.splitlines()
    _, _, policy, *_ = lines
    assert "policy-server-0.example.internal:33667" in policy
    assert "4,043 rows/s  114 batches/s  12,345 rows" in policy
    (learner,) = (line for line in lines if line.startswith("learner"))
    assert "told 60 s ago" in learner
    assert "p50 / p90 / p99 1 / 2 / 1,234" in learner
    (error,) = (line for line in lines if "no luck" in line)
    assert error.count("no luck") == 150


@pytest.mark.parametrize("count", [0, 3])
def test_ways_that_are_not_known_have_a_line_where_there_are_any(count):
    env = ServiceView("env", "h:3", role="env", gauges={"one_way_unknown": count})
    text = text_of(Snapshot("now", [env]))
    assert ("env: uplink and downlink unknown 3" in text) is bool(count)
    assert ("unknown" in text.replace("UNKNOWN", "")) is bool(count)


def test_nothing_known_is_no_error():
    assert "policy version -" in text_of(Snapshot("now", []))


def test_a_rollout_buffer_is_full_with_more_than_its_capacity():
    told = TableStatus("default", 4128, 4096, 2, 9000, 4096)
    stats = {"tables": {"default": {"transitions": 4128, "readers": 1}}}
    (table,) = _buffer_view(BufferStatus("1", "s", {"default": told}, stats))["tables"].values()
    assert (table.transitions, table.capacity, table.fill) == (4128, 4096, 1.0)


def test_stages_that_two_services_know_are_shown_once():
    services = [
        ServiceView("p", "p", role="policy", latency={"inference": SUMMARY, "first_use": SUMMARY}),
        ServiceView("a", "a", role="env", latency={"inference": SUMMARY}),
        ServiceView("b", "b", role="env", latency={"step": SUMMARY}),
    ]
    assert set(Snapshot("now", services).latencies()) == {
        "policy.first_use",
        "a.inference",
        "b.step",
    }


def test_json_has_no_number_that_is_none():
    snapshot = Snapshot("now", [], episodes=EpisodeView(1, 1, float("nan"), 3.0))
    assert snapshot.to_dict()["episodes"]["mean_return"] is None
