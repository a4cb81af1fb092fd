"""`docker compose up` as a user runs it, on a real engine: from nothing to CartPole solved."""

import json
import re
import urllib.request

import pytest

from tests.docker.stack import BASE_IMAGE, RLIGHTNING, ROOT, SERVICES, Stack, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

PORTS = {"env_server": 50051, "policy_server": 50052, "buffer_server": 50053}
MIB = 2**20


@pytest.fixture
def stack():
    """A running stack, nothing of which is left afterwards."""
    stack = Stack()
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


def test_a_buffer_that_its_container_cannot_hold_is_refused_with_the_arithmetic():
    given = ["--memory=512m", "--env=RLIGHTNING__BUFFER__MAX_BYTES=400000000"]
    given.append(f"--volume={ROOT}/configs:/app/configs:ro")
    sums = "= 600,000,000 bytes are more than the 536,870,912 that this container may take"
    with pytest.raises(AssertionError, match=f"(?s)exit 2.*buffer.max_bytes: .*{sums}"):
        run("docker", "run", "--rm", "--network=none", *given, "rlightning/buffer_server")


def test_up_solves_cartpole_serves_on_and_stops(stack):
    stack.wait_for_log(lambda log: "serving on" in log, 120, "solved")
    log = stack.learner_log()
    print(log)
    assert re.search(r"^solved: mean return (4[789]\d|500)\.\d after ", log, re.MULTILINE)

    containers = stack.containers()
    assert set(containers) == {*SERVICES, "learner", "dashboard"}
    assert {c["State"] for c in containers.values()} == {"running"}
    assert {name: one["Health"] for name, one in containers.items()} == dict.fromkeys(
        containers, "healthy"
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
        assert inspected["Config"]["User"] == "10001:10001"
        assert inspected["HostConfig"]["Memory"]
        assert inspected["HostConfig"]["ReadonlyRootfs"]
        assert inspected["HostConfig"]["CapDrop"] == ["ALL"]
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
