"""The dashboard of a run: what it tells of services that come and go, and of its own end."""

import json
import urllib.request

import pytest

from rlightning.cluster import snapshot, targets
from rlightning.cluster.dashboard import Dashboard
from rlightning.cluster.dashboard.watch import watch
from rlightning.cluster.runs import PROGRESS_FILE, write_atomically
from rlightning.cluster.targets import Target
from rlightning.errors import ClusterError, ConfigError
from rlightning.testing import ServerProcess, free_address
from rlightning.utils.config import MainConfig
from tests.e2e.command import Command

STAGE = {"count": 1, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
CONFIG = """
buffer: {type: ReplayBuffer, capacity: 1000}
"""


def tell(run, **told):
    """Writes what a learner tells of itself."""
    record = {"time": "2126-01-02T03:04:05+00:00", "latencies_s": {}, **told}
    write_atomically(run / PROGRESS_FILE, json.dumps(record))


class Page:
    """Reads the events of a dashboard."""

    def __init__(self, url):
        self._answer = urllib.request.urlopen(f"{url}events", timeout=30)

    def until(self, condition):
        """Reads states until one fulfils a condition; returns it."""
        for line in self._answer:
            if line.startswith(b"data: "):
                state = json.loads(line[6:])["state"]
                if condition(state):
                    return state
        raise AssertionError("the stream ended before")


def health(state):
    return {service["role"]: service["state"] for service in state["services"]}


def test_a_service_that_dies_and_comes_back_and_the_end_of_the_run(tmp_path):
    lines = []
    (tmp_path / "config.yaml").write_text(CONFIG)
    address = free_address()
    process = ServerProcess(
        [
            *("-m", "rlightning.services.buffer_server"),
            *("--config", str(tmp_path / "config.yaml"), "--listen", address),
        ],
        tmp_path,
    )
    with process as server:
        server.address()
        dashboard = Dashboard("127.0.0.1:0", run=tmp_path, name="r/1", report=lines.append)
        with pytest.raises(ClusterError), dashboard:  # noqa: PT012 - what happens before matters, too
            (line,) = lines
            page = Page(line.removeprefix("dashboard at "))
            dashboard.watch([Target("buffer", address)])
            state = page.until(lambda state: health(state) == {"buffer": "SERVING"})
            assert state["run"] == "r/1"
            assert state["notice"] is None
            server.kill()
            state = page.until(lambda state: health(state) == {"buffer": "DOWN"})
            assert f"The buffer server at {address} does not answer" in state["notice"]["text"]
            server.start()
            page.until(lambda state: state["notice"] is None)
            tell(tmp_path, outcome="running")
            page.until(lambda state: "learner" in health(state))
            raise ClusterError("the env server was killed by SIGKILL")
        state = page.until(lambda state: "ended" in state["notice"]["text"])
        assert state["notice"] == {
            "kind": "bad",
            "text": "This has ended: the env server was killed by SIGKILL",
        }


def test_how_a_run_ended(tmp_path):
    lines = []
    with Dashboard("127.0.0.1:0", run=tmp_path, name="r/1", report=lines.append) as dashboard:
        page = Page(lines[0].removeprefix("dashboard at "))
        tell(tmp_path, outcome="running", latencies_s={"env.step": STAGE, "learner.update": STAGE})
        dashboard.watch([])
        state = page.until(lambda state: health(state) == {"learner": "running"})
        assert [stage["name"] for stage in state["latency"]] == ["env.step", "learner.update"]
        dashboard.outcome = "solved"
    state = page.until(lambda state: state["notice"])
    assert state["notice"] == {"kind": "info", "text": "The run has ended: solved."}
    assert health(state) == {"learner": "solved"}


def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path):
    lines = []
    with Dashboard("127.0.0.1:0", run=tmp_path, name="r/1", report=lines.append):
        address = lines[0].removeprefix("dashboard at http://").rstrip("/")
        with pytest.raises(ConfigError, match=address):
            Dashboard(address, run=tmp_path, name="r/2", report=lines.append).__enter__()


def test_without_an_address_nothing_is_done(tmp_path):
    with Dashboard(None, run=tmp_path, name="r/1", report=pytest.fail) as dashboard:
        dashboard.watch([Target("buffer", "127.0.0.1:1")])


def test_the_command_shows_services_that_are_not_there_yet_and_their_latest_run(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "log: {name: mine}\nservices: {policy: {listen: '127.0.0.1:1'}}\n"
    )
    latest = tmp_path / "runs" / "mine" / "latest"
    latest.mkdir(parents=True)
    tell(latest, outcome="solved")
    with Command("dashboard", "config.yaml", "--listen", "127.0.0.1:0", cwd=tmp_path) as command:
        page = Page(command.wait_for(r"^dashboard at (\S+)$", 60)[1])
        state = page.until(lambda state: health(state) == {"policy": "DOWN", "learner": "solved"})
        assert state["run"] == "mine"
        command.process.terminate()
        assert page.until(lambda state: state["notice"]["text"] == "This was stopped.")
        assert command.wait() == 0
        assert command.stdout.endswith("stopped\n")
        assert command.stderr == ""


def test_a_config_without_ports_names_no_services():
    with pytest.raises(ConfigError, match="no service to look at"):
        watch(MainConfig(), "127.0.0.1:0")


def test_servers_that_come_and_go_behind_one_name(tmp_path, monkeypatch):
    behind, lines = ["127.0.0.1:1", "127.0.0.2:1"], []

    async def find(address, timeout_s):
        return list(behind) if address == "env_server:50051" else [address]

    monkeypatch.setattr(targets, "find_replicas", find)
    monkeypatch.setattr(snapshot, "_FIND_EVERY_S", 0.0)
    with Dashboard("127.0.0.1:0", run=tmp_path, name="r/1", report=lines.append) as dashboard:
        page = Page(lines[0].removeprefix("dashboard at "))
        dashboard.watch([Target("env", "env_server:50051"), Target("policy-1", "127.0.0.1:1")])

        def shows(*addresses):
            state = page.until(
                lambda state: [one["address"] for one in state["services"][:-1]] == list(addresses)
            )
            labels = [one["label"] for one in state["services"]]
            assert labels == ["env server"] * len(addresses) + ["policy server 1"]

        shows("127.0.0.1:1", "127.0.0.2:1")
        behind.append("127.0.0.3:1")
        shows("127.0.0.1:1", "127.0.0.2:1", "127.0.0.3:1")
