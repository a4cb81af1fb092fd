"""`docker compose up --scale` while a run goes on: env servers and policy servers join it and leave it."""

import csv
import time

import pytest

from rlightning.policy import PolicyClient
from rlightning.rpc.loop import shared_loop
from tests.docker.stack import HERE, Stack, run, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def stack(built):
    stack = Stack(HERE / "longer.yml")
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def describe_policies(stack, count):
    """Returns what each policy server says of itself, asked over the port that it is published on."""

    async def ask(address):
        async with PolicyClient(address) as client:
            return await client.describe()

    indices = range(1, count + 1)
    addresses = [stack("port", "--index", i, "policy_server", 50052).strip() for i in indices]
    return [shared_loop().run(ask(address)) for address in addresses]


def test_servers_join_a_run_and_leave_it(stack):
    def servers_in_episodes():
        text = stack("exec", "-T", "learner", "cat", "/runs/cartpole/latest/episodes.csv")
        envs = {row["env"] for row in csv.DictReader(text.splitlines())}
        return {env.removeprefix("cartpole-").rsplit("-", 2)[0] for env in envs}

    stack.wait_for_progress(5_000, 3, "the run begins")
    folder, _, _ = stack.progress()

    stack.up("--scale", "policy_server=2")
    stack.up("--scale", "policy_server=2", "--scale", "env_server=3")
    for dialled, count in (("env_server:50051", 3), ("policy_server:50052", 2)):
        health = ("exec", "-T", "learner", "rlightning", "health", dialled, "--timeout", 5)
        lines = stack(*health).splitlines()
        assert len(lines) == count
        assert all(line.endswith(f":{dialled[-5:]}  SERVING") for line in lines)
    stack.wait_for_log(lambda log: log.count("has joined with 64 rows") == 2, 60, "both joined")
    # A rollout has rows of all env servers, so that every update from now on does.
    stack.wait_for_progress(20_000, 5, "the run goes on with three")
    ids = {container[:12] for container in stack("ps", "-q", "env_server").split()}
    assert servers_in_episodes() == ids
    # The new ones went to the new policy server, which had no sessions; both have the same weights.
    policies = describe_policies(stack, 2)
    assert all(one.sessions and one.stats["requests"] for one in policies)
    reached = max(one.policy_version for one in policies)

    def all_have_reached(versions):
        return all(one.policy_version >= versions for one in describe_policies(stack, 2))

    wait_until(lambda: all_have_reached(reached + 5), 60, "the learner publishes to both")

    since = time.time_ns() / 1e9
    stack.up("--scale", "policy_server=1", "--scale", "env_server=1")
    stack.wait_for_log(lambda log: log.count("has left after") == 2, 60, "both left")
    died = run(
        *("docker", "events", f"--since={since:.3f}", f"--until={time.time_ns() / 1e9:.3f}"),
        *("--filter=event=die", "--format={{.Actor.Attributes.exitCode}}"),
    )
    assert died.split() == ["0"] * 3  # drained
    stack.wait_for_progress(5_000, 5, "the run goes on with one of each")
    assert stack.progress()[0] == folder
    names = ("policy_server", "buffer_server", "env_server", "learner")
    assert [stack.inspect(name)["RestartCount"] for name in names] == [0] * 4
