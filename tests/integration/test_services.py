"""What all three services promise as processes: health, quick readiness, a clean end, what they import."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlightning.testing import ServerProcess, wait_until

SERVICES = ("policy_server", "buffer_server", "env_server")
NAMES = {
    "policy_server": "PolicyService",
    "buffer_server": "BufferService",
    "env_server": "EnvService",
}
BUF = Path(sys.executable).parent / "buf"

CONFIG = """
env: {name: cartpole, backend: gymnasium, task: CartPole-v1, num_envs: 4}
policy: {model_cfg: {hidden: [16]}}
buffer: {type: RolloutBuffer, capacity: 1024, rollout_length: 8}
services: {reflection: true, grace_s: 5}
"""


class Cluster:
    """The three services as processes, each with its own log."""

    def __init__(
        self, folder: Path, stack: ExitStack, python_options: tuple[str, ...] = ()
    ) -> None:
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        self.started = time.monotonic()
        self.processes: dict[str, ServerProcess] = {}
        self.addresses: dict[str, str] = {}
        for name in SERVICES:
            own = folder / name
            own.mkdir()
            command = [
                *python_options,
                "-m",
                f"rlightning.services.{name}",
                "--config",
                str(config),
            ]
            for upstream in ("policy", "buffer") if name == "env_server" else ():
                command += [
                    "--set",
                    f"services.{upstream}.address={self.addresses[f'{upstream}_server']}",
                ]
            self.processes[name] = stack.enter_context(ServerProcess(command, own))
            if name == "buffer_server":
                self.addresses = {
                    one: self.processes[one].address() for one in ("policy_server", "buffer_server")
                }
        self.addresses["env_server"] = self.processes["env_server"].address()

    def status(self, name: str, service: str = "") -> str:
        """What a stock health client is told; `down` when it cannot connect."""
        with grpc.insecure_channel(self.addresses[name]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            except grpc.RpcError as error:
                return error.code().name if error.code() != grpc.StatusCode.UNAVAILABLE else "down"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def wait_serving(self, timeout_s: float = 30.0) -> float:
        """Waits until all are SERVING; returns the seconds since they were started."""
        for name in SERVICES:
            wait_until(
                lambda name=name: self.status(name) == "SERVING",
                timeout_s,
                f"{name} is not SERVING",
            )
        return time.monotonic() - self.started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def test_health_answers_stock_clients(cluster: Cluster) -> None:
    cluster.wait_serving()
    for name in SERVICES:
        for service in ("", f"rlightning.v1.{NAMES[name]}", "liveness", "readiness"):
            assert cluster.status(name, service) == "SERVING", (name, service)
        assert cluster.status(name, "no.such.Service") == "NOT_FOUND"
        url = f"http://{cluster.addresses[name]}/grpc.health.v1.Health/Check"
        curl = [str(BUF), "curl", "--http2-prior-knowledge", url]
        out = subprocess.run(curl, capture_output=True, text=True, timeout=30, check=False)
        assert '"SERVING"' in out.stdout, out.stderr
        listed = subprocess.run(
            [
                str(BUF),
                "curl",
                "--http2-prior-knowledge",
                "--list-services",
                f"http://{cluster.addresses[name]}",
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert f"rlightning.v1.{NAMES[name]}" in listed.stdout, listed.stderr


def test_the_probe_follows_readiness(cluster: Cluster) -> None:
    """It exits 1 before a service is ready and 0 after, never the other way round."""
    probe = [sys.executable, "-m", "rlightning.cli", "health", cluster.addresses["policy_server"]]
    probe += ["--check", "readiness", "--timeout", "2"]
    codes = []
    deadline = time.monotonic() + 30
    while 0 not in codes and time.monotonic() < deadline:
        codes.append(subprocess.run(probe, capture_output=True, check=False, timeout=10).returncode)
    assert codes[-1] == 0
    assert set(codes[:-1]) <= {1}
    cluster.processes["policy_server"].kill()
    assert subprocess.run(probe, capture_output=True, check=False, timeout=10).returncode == 1


def test_sigterm_says_not_serving_and_exits_0_within_the_grace(cluster: Cluster) -> None:
    """The actors' streams are open and idle or busy, and a client watches the health."""
    cluster.wait_serving()
    for name in ("env_server", "policy_server", "buffer_server"):
        with grpc.insecure_channel(cluster.addresses[name]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=30
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            start = time.monotonic()
            cluster.processes[name].child.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert cluster.processes[name].wait(6) == 0, cluster.processes[name].log
            assert time.monotonic() - start < 5


def test_services_import_no_more_than_they_may(tmp_path: Path) -> None:
    """Only the policy server loads torch; none loads TensorDict or TorchRL."""
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, ("-X", "importtime"))
        cluster.wait_serving()
        # The first answer of the policy and the first rows in the buffer have loaded what comes late.
        time_out = time.monotonic() + 20
        while "down" in map(cluster.status, SERVICES) and time.monotonic() < time_out:
            pass
        for name in SERVICES:
            imported = set(re.findall(r"\|\s+([\w.]+)$", cluster.processes[name].log, re.MULTILINE))
            assert "grpc" in imported
            heavy = {"torch", "tensordict", "torchrl"} & imported
            assert heavy == ({"torch"} if name == "policy_server" else set()), name
