"""Services that people started by hand fail in mid-run and come back: the run goes on and solves."""

import csv
import json
import time
from collections import defaultdict

import pytest

from tests.e2e.command import CARTPOLE, Command, settings
from tests.service_processes import Services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def kill(services, name):
    """As a person would who sees it gone and starts it again."""
    services.kill(name)
    time.sleep(1.0)
    services.restart(name)


def freeze(services, name):
    services.processes[name].freeze()
    time.sleep(6.0)
    services.processes[name].thaw()


@pytest.mark.parametrize(
    ("harm", "name"),
    [(kill, "policy"), (kill, "buffer"), (kill, "env"), (freeze, "policy")],
    ids=["policy killed", "buffer killed", "env killed", "policy frozen"],
)
def test_the_run_goes_on_and_solves(tmp_path, harm, name):
    services = Services(tmp_path, CARTPOLE.read_text())
    addresses = settings(
        *(f"services.{one}.address={address}" for one, address in services.addresses.items())
    )
    with (
        services,
        Command("train", CARTPOLE, *addresses, "--json", cwd=tmp_path) as command,
    ):
        command.wait_for(r"version [3-9]")
        harm(services, name)
        services.wait_serving()
        assert command.wait(200) == 0, command.stderr
        end = json.loads(command.stdout)
        for process in services.processes.values():
            process.terminate()
        codes = {one: process.wait(15) for one, process in services.processes.items()}
        assert codes == {"policy": 0, "buffer": 0, "env": 0}
        for text in (command.stderr, *(process.log for process in services.processes.values())):
            assert "Traceback" not in text
    assert end["outcome"] == "solved"
    check_versions(tmp_path / end["run"] / "episodes.csv")


def check_versions(file):
    """Asserts that no env was answered by older weights than before."""
    newest = defaultdict(int)
    for row in csv.DictReader(file.read_text().splitlines()):
        key, version = (row["env"], row["row"]), int(row["version"])
        assert version >= newest[key], row
        newest[key] = version
    assert max(newest.values()) > 3
