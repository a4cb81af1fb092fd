"""`--launcher ray` on two real nodes; `make prove-ray` does the same for a whole run, and removes one."""

import signal
import subprocess

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import ROOT, Command, run
from tests.ray.nodes import nodes_of_services, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

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


def test_services_are_placed_on_both_nodes_and_stopped_in_order(cluster, tmp_path):
    with Command("serve", MINIMAL, *cluster, cwd=tmp_path) as command:
        wait_until(lambda: "Ctrl-C stops" in command.stdout, 240, "services are not SERVING")
        assert command.stdout.count("SERVING  127.0.0.1:") == 3
        assert len(nodes_of_services()) == 2
        assert len(services()) == 3
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(120) == 0, command.stdout + command.stderr
    assert services() == []
    assert nodes_of_services() == set()
    # Their logs came back from their nodes; each had drained.
    logs = tmp_path / "runs" / "minimal" / "1" / "logs"
    for name in ("env_server", "policy_server", "buffer_server"):
        assert f"{name} stops" in (logs / f"{name}.log").read_text()


def test_a_service_that_does_not_start_is_told_and_nothing_is_left(cluster, tmp_path):
    wrong = ("--set", "env.task=NoSuchTask-v0")
    code, _, err = run("serve", MINIMAL, *cluster, *wrong, cwd=tmp_path, timeout_s=240)
    assert code == 1
    assert "NoSuchTask" in err
    assert services() == []
    assert nodes_of_services() == set()


def test_a_cluster_without_room_is_told(cluster, tmp_path):
    much = ("--set", "env.num_cpus=64", "--set", "services.start_timeout_s=3")
    code, _, err = run("serve", MINIMAL, *cluster, *much, cwd=tmp_path, timeout_s=120)
    assert code == 1
    assert "no room" in err
    assert "64" in err
