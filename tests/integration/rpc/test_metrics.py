"""Metrics over HTTP: what is there, when it is read, and what refuses to start."""

import asyncio
import json
import re
import socket
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlightning.errors import ConfigError
from rlightning.latency import LatencyStats
from rlightning.latency.histogram import EDGES_S, Counts
from rlightning.learner.loop import LearnerStats
from rlightning.rpc.metrics import Metrics, MetricsServer
from rlightning.testing import wait_until
from rlightning.utils.config import MainConfig
from tests.monitoring import expressions, unmatched
from tests.service_processes import Services

ROOT = Path(__file__).parents[3]


def fetch(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return answer.read().decode()


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family):
    return {tuple(sorted(s.labels.items())): s.value for s in family.samples}


async def test_a_scrape_reads_what_is_there_then_on_the_loop_that_owns_it():
    state, loops = {"steps": 1}, []
    latency, rows = LatencyStats(), Counts((1, 2))
    latency.record("round_trip", 0.0004)
    latency.record("act", 0.0004)
    latency.record("uplink", 0.0004, 0.0001)
    rows.record(2)

    def collect(metrics: Metrics):
        loops.append(asyncio.get_running_loop())
        metrics.counter("env_steps_total", "Steps.", state["steps"])
        metrics.stages(latency)
        metrics.counts("inference_batch_size", "Rows.", rows)
        metrics.clocks({"policy": {"offset_s": -2.5, "uncertainty_s": 0.1}, "buffer": {}})

    server = MetricsServer("127.0.0.1:0", collect, loop=asyncio.get_running_loop())
    try:
        for steps in (1, 7):
            state["steps"] = steps
            found = families(await asyncio.to_thread(fetch, server.address))
            assert [s.value for s in found["rlightning_env_steps"].samples] == [steps]
        assert loops == [asyncio.get_running_loop()] * 2
        buckets = found["rlightning_step_latency_seconds"].samples
        stages = {sample.labels["stage"] for sample in buckets}
        assert stages == {"total", "uplink"}
        edges = {
            float(s.labels["le"]): s.value
            for s in buckets
            if s.name.endswith("_bucket") and s.labels["stage"] == "uplink"
        }
        assert list(edges) == [*EDGES_S, float("inf")]
        assert next(edge for edge, count in edges.items() if count) == 6e-4
        assert values(found["rlightning_clock_offset_seconds"]) == {(("peer", "policy"),): -2.5}
        assert "rlightning_event_loop_lag_seconds" in found
        assert "process_resident_memory_bytes" in found
    finally:
        await asyncio.to_thread(server.close)


async def test_a_scrape_that_cannot_be_gathered_is_an_error_to_who_asks():
    def collect(metrics: Metrics):
        raise RuntimeError("no")

    server = MetricsServer("127.0.0.1:0", collect)
    try:
        with pytest.raises(HTTPError, match="500"):
            await asyncio.to_thread(fetch, server.address)
    finally:
        await asyncio.to_thread(server.close)


def test_a_port_that_is_taken_is_an_error_that_names_it():
    server = MetricsServer("127.0.0.1:0", lambda metrics: None)
    try:
        with pytest.raises(ConfigError, match=server.address):
            MetricsServer(server.address, lambda metrics: None)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("given", "address"),
    [(9464, "127.0.0.1:9464"), ("9464", "127.0.0.1:9464"), ("[::1]:0", "[::1]:0"), (None, None)],
)
def test_a_port_alone_is_one_of_this_machine(given, address):
    config = MainConfig(services={"policy": {"metrics": given}}, learner={"metrics": given})
    assert config.services.policy.metrics == config.learner.metrics == address


@pytest.mark.parametrize("given", ["here", "127.0.0.1", "unix:/tmp/x", 70000])
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ValueError, match="metrics"):
        MainConfig(services={"policy": {"metrics": given}})


CONFIG = """
env: {name: cart, backend: gymnasium, task: CartPole-v1, num_envs: 4}
buffer: {type: ReplayBuffer, capacity: 1000, durability: process, data_dir: DATA}
policy: {initial_weights: random, device: cpu}
services:
  env: {metrics: 0}
  policy: {metrics: 0}
  buffer: {metrics: 0}
"""

SERVICES = {
    "env": {
        *("rlightning_env_steps", "rlightning_episodes", "rlightning_groups"),
        *("rlightning_clock_offset_seconds", "rlightning_clock_uncertainty_seconds"),
    },
    "policy": {
        *("rlightning_inference_batch_size", "rlightning_queue_depth", "rlightning_policy_version"),
        *("rlightning_requests", "rlightning_expired"),
    },
    "buffer": {
        *("rlightning_buffer_items", "rlightning_buffer_capacity", "rlightning_insert"),
        *("rlightning_insert_duplicate", "rlightning_queue_depth", "rlightning_buffer_rows"),
        *("rlightning_buffer_bytes", "rlightning_journal_write_seconds"),
        "rlightning_wal_fsync_seconds",
    },
}
CALLS = {
    *("grpc_server_started", "grpc_server_handled", "grpc_server_handling_seconds"),
    *("grpc_server_msg_received", "grpc_server_msg_sent"),
}
STAGES = {
    "env": {"encode", "uplink", "queue", "inference", "downlink", "decode", "total", "insert_ack"},
    "policy": {"queue", "batch_wait", "inference"},
    "buffer": {"store"},
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_service_shows_its_metrics_while_it_works(tmp_path):
    with Services(tmp_path, CONFIG.replace("DATA", str(tmp_path / "data"))) as services:
        services.wait_serving(timeout_s=90)
        for name in services.processes:
            address = json.loads((tmp_path / name / "announced.json").read_text())["metrics"]

            def shown(address=address, name=name):
                found = families(fetch(address))
                latency = found.get("rlightning_step_latency_seconds")
                if latency is None:
                    return False
                counted = {s.labels["stage"] for s in latency.samples if s.value > 0}
                return SERVICES[name] <= found.keys() and STAGES[name] <= counted

            wait_until(shown, 30, f"{name} does not show its metrics")
            text = fetch(address)
            assert text.count("\n") < 1500
            assert families(text).keys() >= CALLS
            assert "cart" not in text  # no names of envs or clients: their number has no bound
            sessions = families(text)["rlightning_sessions"].samples
            assert {s.labels["state"] for s in sessions} == {"connected", "away"}
            assert not {label for s in sessions for label in s.labels} - {"method", "state"}
        check_monitoring(
            {
                f"{name}_server": json.loads((tmp_path / name / "announced.json").read_text())[
                    "metrics"
                ]
                for name in services.processes
            }
        )


def documented():
    """The table of metrics in docs/latency.md: the names of each row, and their labels."""
    table = (ROOT / "docs" / "latency.md").read_text().partition("| metric | labels | where |")[2]
    lines = table.partition("\n\n")[0].splitlines()[2:]
    for _, names, labels, *_ in (line.split("|") for line in lines):
        yield re.findall(r"`(\w+)`", names), set(re.findall(r"`(\w+)`", labels))


def check_documented(texts):
    """The list in the documentation is that of the metrics: names and labels, no more and no less."""
    labels = {
        name: set()
        for text in texts
        for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
        if not name.startswith("process_")  # those of prometheus-client
    }
    for text in texts:
        for name, found in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
            name = name if name in labels else re.sub("_(bucket|count|sum)$", "", name)
            if name in labels:
                labels[name] |= set(re.findall(r'(\w+)="', found)) - {"le"}
    rows = list(documented())
    assert sorted(name for names, _ in rows for name in names) == sorted(labels)
    for names, told in rows:
        assert set().union(*(labels[name] for name in names)) == told, names


def check_monitoring(addresses):
    """Whatever an alert or a panel of deploy/monitoring names is shown by a service or a learner."""
    learner = MetricsServer("127.0.0.1:0", LearnerStats().measure)
    try:
        texts = {job: fetch(at) for job, at in {**addresses, "learner": learner.address}.items()}
    finally:
        learner.close()
    series = [
        (sample.name, {**sample.labels, "job": job})
        for job, text in texts.items()
        for family in families(text).values()
        for sample in family.samples
    ]
    check_documented(texts.values())
    missing = {where: unmatched(expression, series) for where, expression in expressions()}
    assert {where: what for where, what in missing.items() if what} == {}


def test_a_client_that_says_nothing_holds_no_thread_for_ever(monkeypatch):
    monkeypatch.setattr("rlightning.rpc.metrics._REQUEST_TIMEOUT_S", 0.3)
    server = MetricsServer("127.0.0.1:0", lambda metrics: metrics.gauge("x", "X.", 1))
    try:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as silent:
            assert "rlightning_x 1.0" in fetch(server.address)
            silent.sendall(b"GET /metr")
            assert silent.recv(1) == b""  # the server has closed it
    finally:
        server.close()


def test_more_connections_than_there_are_places_are_closed(monkeypatch):
    monkeypatch.setattr("rlightning.rpc.metrics._MAX_CONNECTIONS", 2)
    server = MetricsServer("127.0.0.1:0", lambda metrics: metrics.gauge("x", "X.", 1))
    try:
        host, _, port = server.address.rpartition(":")
        address = (host, int(port))
        with socket.create_connection(address, timeout=30) as first:
            with socket.create_connection(address, timeout=30):
                with socket.create_connection(address, timeout=30) as third:
                    assert third.recv(1) == b""
            first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert first.recv(4) == b"HTTP"

        def served():
            try:
                return "rlightning_x 1.0" in fetch(server.address)
            except OSError:
                return False

        wait_until(served)  # as soon as the others have gone
    finally:
        server.close()
