"""What all three services promise as processes: health, a quick start, a clean end, what they import."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.env.remote_client import EnvClient
from rlightning.policy import PolicyClient
from rlightning.policy.builder import build_policy
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.rpc.server import EXIT_NOW
from rlightning.testing import ServerProcess, wait_until
from rlightning.utils.config import load_config
from tests.service_processes import NAMES, Services

BIN = Path(sys.executable).parent
# Of a core, for each service. On a quiet machine all are there after less than 2 s (benchmarks/RESULTS.md).
STARTED_WITHIN_S = 8.0
GRACE_S = 10.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

CONFIG = """
env: {name: cartpole, backend: gymnasium, task: CartPole-v1, num_envs: 4}
policy: {model_cfg: {hidden: [16]}, device: cpu, initial_weights: random}
buffer: {type: %s, capacity: 1024, rollout_length: 8}
services: {reflection: true, grace_s: 10}
"""
# Without a learner, a rollout buffer is soon full, and all streams are idle; a replay buffer
# always takes more.
IDLE = CONFIG % "RolloutBuffer"
BUSY = CONFIG % "ReplayBuffer"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with Services(tmp_path, IDLE) as services:
        yield services


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, in user and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def buf_curl(*arguments: str) -> str:
    command = [str(BIN / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_health_answers_stock_clients(services: Services) -> None:
    services.wait_serving()
    for name, full_name in NAMES.items():
        for service in ("", full_name, "liveness", "readiness"):
            assert services.status(name, service) == "SERVING", (name, service)
        assert services.status(name, "no.such.Service") == "NOT_FOUND"
        url = f"http://{services.addresses[name]}"
        assert '"SERVING"' in buf_curl(f"{url}/grpc.health.v1.Health/Check")
        assert full_name in buf_curl("--list-services", url).split()
        assert '"libraryVersion"' in buf_curl(f"{url}/{full_name}/Describe")


def test_all_are_serving_soon_after_a_common_start(tmp_path: Path) -> None:
    """Seen by the time that they compute, as the tests beside this one take from the other."""
    with Services(tmp_path, IDLE) as services:
        services.wait_serving()
        for name, process in services.processes.items():
            assert cpu_seconds(process.child.pid) < STARTED_WITHIN_S, name


def test_the_probe_follows_readiness(tmp_path: Path) -> None:
    """It exits with 1 until the service is ready, with 0 from then on, and with 1 after its end."""

    def probe(address: str) -> int:
        command = [str(BIN / "rlightning"), "health", address, "--check", "readiness"]
        return subprocess.run(
            [*command, "--timeout", "2"], capture_output=True, check=False, timeout=60
        ).returncode

    services = Services(tmp_path, IDLE, names=["policy"])
    address = services.addresses["policy"]
    codes = [probe(address)]
    with services:
        deadline = time.monotonic() + 60
        while codes[-1] != 0 and time.monotonic() < deadline:
            codes.append(probe(address))
        assert codes == [1] * (len(codes) - 1) + [0]
        assert probe(address) == 0
    assert probe(address) == 1


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (IDLE, ("env", "policy", "buffer")),
        (IDLE, ("buffer", "policy", "env")),
        (BUSY, ("policy", "buffer", "env")),
    ],
    ids=["idle, env first", "idle, buffer first", "busy, policy first"],
)
def test_sigterm_says_not_serving_and_exits_with_0_within_the_grace(
    tmp_path: Path, config: str, order: tuple[str, ...]
) -> None:
    """Whatever goes first, with the actors' streams open, and a client that watches the health."""
    with Services(tmp_path, config) as services, ThreadPoolExecutor() as pool:
        services.wait_serving()
        wait_until(lambda: ": client " in services.processes["buffer"].log, 30)
        for name in order:
            process = services.processes[name]
            with grpc.insecure_channel(services.addresses[name]) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)
                assert next(watch).status == SERVING
                # Who watches is always reading: gRPC may drop what comes right before the end else.
                reading = pool.submit(next, watch)
                wait_until(reading.running)
                time.sleep(0.1)
                start = time.monotonic()
                process.child.send_signal(signal.SIGTERM)
                assert reading.result(30).status == NOT_SERVING  # so the port was open until then
                assert process.wait(GRACE_S + 2) == 0, process.log
                assert time.monotonic() - start < GRACE_S
                with contextlib.suppress(grpc.RpcError):
                    assert next(watch, None) is None
            assert "Traceback" not in process.log
            assert " ERROR " not in process.log


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_while_a_service_still_imports_is_one_line(tmp_path: Path, name: str) -> None:
    """A container whose first process it is would not stop if nothing handled it by then."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-m", f"rlightning.services.{name}_server"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_service_whose_terminal_closes_stops_in_order(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(IDLE)
    config = str(tmp_path / "config.yaml")
    arguments = ["-m", "rlightning.services.buffer_server", "--config", config]
    # Who runs these tests may have it ignored.
    heard = ("env", "--default-signal=HUP")
    with ServerProcess([*arguments, "--listen=127.0.0.1:0"], tmp_path, prefix=heard) as process:
        process.address()
        process.child.send_signal(signal.SIGHUP)
        assert process.wait(GRACE_S + 2) == 0, process.log


def test_a_service_that_has_stopped_is_not_killed_by_a_second_hangup(tmp_path: Path) -> None:
    """A shell tells its jobs, and the system tells them once the shell has gone."""
    (tmp_path / "config.yaml").write_text(IDLE)
    again = (
        "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGHUP); "
        "from rlightning.services.buffer_server.__main__ import main; main()"
    )
    arguments = ["-c", again, "--config", str(tmp_path / "config.yaml"), "--listen=127.0.0.1:0"]
    heard = ("env", "--default-signal=HUP")
    with ServerProcess(arguments, tmp_path, prefix=heard) as process:
        process.address()
        process.child.send_signal(signal.SIGHUP)
        assert process.wait(GRACE_S + 2) in (0, EXIT_NOW), process.log


async def test_services_import_no_more_than_they_may(tmp_path: Path) -> None:
    """Only the policy server loads torch, none loads TensorDict or TorchRL; seen after real traffic."""
    with Services(tmp_path, IDLE, python_options=("-X", "importtime")) as services:
        services.wait_serving()
        await use(services, tmp_path)
        for name, process in services.processes.items():
            imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", process.log, re.MULTILINE))
            assert {"grpc", "rlightning.wire"} <= imported
            heavy = {"torch", "tensordict", "torchrl"} & imported
            assert heavy == ({"torch"} if name == "policy" else set()), name


async def use(services: Services, tmp_path: Path) -> None:
    """Lets data take every way through the services, since imports may come late."""
    config = load_config([tmp_path / "config.yaml"])
    async with (
        EnvClient(services.addresses["env"]) as env,
        PolicyClient(services.addresses["policy"]) as policy,
        SampleClient(services.addresses["buffer"]) as samples,
    ):
        meta = (await env.describe()).envs[0]
        network = build_policy(config.policy, "eval")
        network.init_eval(env_meta=meta)
        await policy.publish_weights(1, dump_weights(policy_weights(network)))
        assert (await policy.pull_weights(1))[0] == 1
        versions = set()
        while versions != {1}:
            batch = await samples.next_batch(30)
            versions = set(batch.columns["policy_version"].flat)
        assert (await policy.describe()).policy_version == 1


@pytest.mark.parametrize(
    ("name", "setting", "code", "line"),
    [
        ("policy", "policy.typo=1", 2, "unknown key 'policy.typo'; did you mean 'policy.type'?"),
        ("buffer", "buffer.capacity=many", 2, "'buffer.capacity': expected a valid integer"),
        ("env", "env.task=CartPoel-v1", 1, "gymnasium has no env 'CartPoel-v1'; did you mean"),
        ("env", "services.policy.address=null", 1, "services.policy: no address to dial"),
        ("policy", "policy.type=nowhere:X", 1, "policy.type 'nowhere:X' cannot be loaded"),
        ("buffer", "services.buffer.listen=127.0.0.1:99999", 2, "a port of at most 65535"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, name: str, setting: str, code: int, line: str
) -> None:
    upstream = "services: {policy: {address: '127.0.0.1:1'}, buffer: {address: '127.0.0.1:1'}}"
    (tmp_path / "config.yaml").write_text(
        CONFIG.partition("services:")[0] % "RolloutBuffer" + upstream
    )
    command = [sys.executable, "-m", f"rlightning.services.{name}_server"]
    options = ["--config", str(tmp_path / "config.yaml"), "--set", setting]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    # Into a pipe, lines of logs are JSON.
    errors = [each for each in done.stderr.splitlines() if '"level": "INFO"' not in each]
    assert len(errors) == 1, done.stderr
    assert line in errors[0]
