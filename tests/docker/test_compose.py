"""`docker compose up` as a user runs it, on a real engine: from nothing to CartPole solved, and through crashes."""

import json
import os
import re
import signal
import urllib.request

import pytest

from tests.docker.stack import BASE_IMAGE, HERE, RLIGHTNING, SERVICES, Stack, run, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

PORTS = {"env_server": 50051, "policy_server": 50052, "buffer_server": 50053}
MIB = 2**20


@pytest.fixture
def stack(request):
    """A running stack, nothing of which is left afterwards."""
    stack = Stack(*getattr(request, "param", ()))
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def size(image):
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", image))


def test_images_hold_only_what_their_service_needs():
    base = size(BASE_IMAGE)
    sizes = {name: (size(f"rlightning/{name}") - base) / MIB for name in SERVICES}
    print("MiB beyond the base:", {name: round(mib) for name, mib in sizes.items()})
    assert sizes["env_server"] < 350
    assert sizes["buffer_server"] < 350
    for name in SERVICES:
        code = "import importlib.util as u; print(u.find_spec('torch') is not None)"
        image = f"rlightning/{name}"
        has_torch = run("docker", "run", "--rm", "--network=none", image, "python", "-c", code)
        assert has_torch.strip() == str(name == "policy_server")
        run("docker", "run", "--rm", "--network=none", image, "python", "-m", "pip", "check")


def test_up_solves_cartpole_serves_on_and_stops(stack):
    stack.wait_for_log(lambda log: "serving on" in log, 120, "solved")
    log = stack.learner_log()
    print(log)
    assert re.search(r"^solved: mean return (4[789]\d|500)\.\d after ", log, re.MULTILINE)

    containers = stack.containers()
    assert set(containers) == {*SERVICES, "learner", "dashboard"}
    assert {c["State"] for c in containers.values()} == {"running"}
    assert {name: containers[name]["Health"] for name in SERVICES} == dict.fromkeys(
        SERVICES, "healthy"
    )
    page = f"http://{stack('port', 'dashboard', 50050).strip()}/events"
    with urllib.request.urlopen(page, timeout=30) as events:
        told = next(line for line in events if line.startswith(b"data: "))
    shown = {one["role"]: one["state"] for one in json.loads(told[6:])["state"]["services"]}
    assert shown == {**dict.fromkeys(("env", "policy", "buffer"), "SERVING"), "learner": "solved"}
    for name, port in PORTS.items():
        address = stack("port", name, port).strip()
        assert address.startswith("127.0.0.1:")
        assert run(RLIGHTNING, "health", address, "--check", "readiness") == "SERVING\n"
        # Said for what listens beyond loopback, once.
        assert stack("logs", name).count("in plaintext") == 1

    for name in containers:
        inspected = stack.inspect(name)
        assert inspected["HostConfig"]["ReadonlyRootfs"]
        assert not inspected["HostConfig"]["CapAdd"]
        assert not inspected["HostConfig"]["Privileged"]
        assert all(not mount["RW"] for mount in inspected["Mounts"] if mount["Type"] == "bind")
        status = stack("exec", "-T", name, "cat", "/proc/1/status")
        assert re.search(r"^Uid:(\t10001){4}$", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)

    manifest = stack("exec", "-T", "learner", "cat", "/runs/cartpole/latest/manifest.json")
    assert '"outcome": "solved"' in manifest
    assert stack("exec", "-T", "policy_server", "ls", "/weights")

    stack("stop")
    assert {name: c["ExitCode"] for name, c in stack.containers().items()} == dict.fromkeys(
        containers, 0
    )


@pytest.mark.parametrize("stack", [(HERE / "longer.yml",)], indirect=True)
def test_a_killed_service_comes_back_and_the_run_goes_on(stack):
    def progress():
        """The run folder that the learner writes to, and the env steps and the version it shows last."""
        folder, _, log = stack.learner_log().rpartition("run folder ")[2].partition("\n")
        lines = re.findall(r"steps ([\d,]+) .* version (\d+)", log)
        steps, version = lines[-1] if lines else ("0", "0")
        return folder, int(steps.replace(",", "")), int(version)

    wait_until(lambda: progress()[1] > 10_000, 60, "the run begins")
    for name in (*SERVICES, "learner"):
        folder, steps, version = progress()
        # Not `docker kill`, which the engine takes for a person's wish and does not restart.
        os.kill(stack.inspect(name)["State"]["Pid"], signal.SIGKILL)
        wait_until(lambda name=name: stack.inspect(name)["RestartCount"] == 1, 30, "restarted")
        if name == "learner":
            wait_until(lambda folder=folder: progress()[0] != folder, 60, "a new run")
            steps = 0
        else:
            wait_until(
                lambda name=name: stack.containers()[name]["Health"] == "healthy", 60, "healthy"
            )
        wait_until(
            lambda steps=steps, version=version: (
                progress()[1] > steps + 20_000 and progress()[2] > version + 10
            ),
            90,
            f"the run goes on after the {name} was killed",
        )
    # The learner alone began anew; what the others lost, it made up for.
    assert [stack.inspect(name)["RestartCount"] for name in (*SERVICES, "learner")] == [1] * 4
