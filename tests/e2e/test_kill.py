"""Services that people started by hand fail in mid-run and come back: the run goes on and solves."""

import asyncio
import csv
import json
import time
from collections import defaultdict

import pytest

from rlightning.policy import PolicyClient
from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, Command, settings
from tests.service_processes import Services

pytestmark = [pytest.mark.crash, pytest.mark.timeout(240)]


def kill(services, name):
    """As people see it go, and start it again."""
    services.kill(name)
    time.sleep(1.0)
    services.restart(name)


def freeze(services, name):
    services.processes[name].freeze()
    time.sleep(4.0)  # `train` has missed it by then
    services.processes[name].thaw()


HARMS = ((kill, "policy"), (kill, "buffer"), (freeze, "policy"), (kill, "env"))


def test_the_run_goes_on_and_solves(tmp_path):
    services = Services(tmp_path, CARTPOLE.read_text())
    addresses = settings(
        *(f"services.{name}.address={address}" for name, address in services.addresses.items())
    )
    with services, Command("train", CARTPOLE, *addresses, "--json", cwd=tmp_path) as command:
        services.wait_serving()
        version = 0
        for harm, name in HARMS:
            goal = version + 2
            wait_until(lambda goal=goal: newest_version(services) >= goal, 60, "no progress")
            version = newest_version(services)
            harm(services, name)
            services.wait_serving()
        assert command.process.poll() is None, "the harms came too late"
        assert command.wait(200) == 0, command.stderr
        end = json.loads(command.stdout)
        for process in services.processes.values():
            process.terminate()
        codes = {name: process.wait(15) for name, process in services.processes.items()}
        assert codes == {"policy": 0, "buffer": 0, "env": 0}
        for text in (command.stderr, *(process.log for process in services.processes.values())):
            assert "Traceback" not in text
    assert end["outcome"] == "solved"
    check_versions(tmp_path / end["run"] / "episodes.csv")


def newest_version(services):
    async def ask():
        async with PolicyClient(services.addresses["policy"]) as client:
            return (await client.describe()).policy_version

    return asyncio.run(ask())


def check_versions(file):
    """Asserts that no env was answered by older weights than before."""
    newest = defaultdict(int)
    for row in csv.DictReader(file.read_text().splitlines()):
        key, version = (row["env"], row["row"]), int(row["version"])
        assert version >= newest[key], row
        newest[key] = version
    assert max(newest.values()) > 3
