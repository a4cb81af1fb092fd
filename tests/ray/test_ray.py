"""`--launcher ray` on two real nodes; `make prove-ray` does the same for a whole run, and removes one."""

import os
import re
import signal
import subprocess
from functools import partial

import pytest

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.rpc.loop import shared_loop
from rlightning.testing import wait_until
from tests.e2e.command import ROOT, Command, run, settings
from tests.ray.nodes import bundles_of_services, nodes_of_services, two_nodes

# Nothing here is fast where the machine is busy: a worker of Ray imports for a second or more.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

MINIMAL = ROOT / "configs" / "minimal.yaml"


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as (cluster, _):
        yield ("--launcher", "ray", "--set", f"cluster.ray_address={cluster.address}")


def services():
    """Returns the command lines of the services that actors have started."""
    found = subprocess.run(
        ["pgrep", "-af", "rlightning.services.*rlightning-(env|policy|buffer)"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.splitlines()


def writers(address):
    """Returns the envs whose rows a buffer server keeps."""

    async def ask():
        async with BufferClient(address) as client:
            tables = (await client.describe()).stats["tables"]
            return set(tables["default"]["producers"])

    return shared_loop().run(ask())


def has_writers(address, count):
    return len(writers(address)) >= count


def is_serving(address, folder):
    return run("health", address, "--check", "readiness", cwd=folder)[1] == "SERVING\n"


def test_services_are_placed_on_both_nodes_and_stopped_in_order(cluster, tmp_path):
    two_of_each = settings(
        *("services.env.replicas=2", "buffer.storage.type=sharded", "buffer.storage.num_shards=2"),
        "buffer.node_affinity_env=true",
    )
    with Command("serve", MINIMAL, *cluster, *two_of_each, cwd=tmp_path) as command:
        command.wait_for("Ctrl-C stops", 300)
        assert command.stdout.count("SERVING  127.0.0.1:") == 5
        assert len(nodes_of_services()) == 2
        assert bundles_of_services() == [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}]
        assert len(services()) == 5
        # What an env server stores goes to the shard in its bundle, and so on its node.
        shards = re.findall(r"^buffer server . +SERVING +(\S+)$", command.stdout, re.MULTILINE)
        for number, shard in enumerate(shards):
            expected = {f"minimal-env{number}-0-{group}" for group in (0, 1)}
            wait_until(partial(has_writers, shard, 2), 120, f"too few write to shard {number}")
            assert writers(shard) == expected
        (killed,) = (line.split()[0] for line in services() if "rlightning-policy" in line)
        os.kill(int(killed), signal.SIGKILL)
        command.wait_for("it is started again$", 60)
        address = command.wait_for(r"^policy server +SERVING +(\S+)$")[1]
        wait_until(partial(is_serving, address, tmp_path), 180, "the policy server is not back")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(180) == 0, command.stdout + command.stderr
    assert services() == []
    assert nodes_of_services() == set()
    # Their logs came back from their nodes; each had drained.
    logs = tmp_path / "runs" / "minimal" / "1" / "logs"
    for name in ("env_server-0", "env_server-1", "policy_server", "buffer_server-0"):
        service = name.partition("-")[0]
        assert f"{service} stops" in (logs / f"{name}.log").read_text()


def test_a_service_that_does_not_start_is_told_and_nothing_is_left(cluster, tmp_path):
    wrong = ("--set", "env.task=NoSuchTask-v0")
    code, _, err = run("serve", MINIMAL, *cluster, *wrong, cwd=tmp_path, timeout_s=400)
    assert code == 1
    assert "NoSuchTask" in err
    assert services() == []
    assert nodes_of_services() == set()


def test_a_cluster_without_room_is_told(cluster, tmp_path):
    much = ("--set", "env.num_cpus=64", "--set", "services.start_timeout_s=3")
    code, _, err = run("serve", MINIMAL, *cluster, *much, cwd=tmp_path, timeout_s=400)
    assert code == 1
    assert "no room" in err
    assert "64" in err
