"""`docker compose up --scale` while a run goes on: env servers join it and leave it."""

import csv
import time

import pytest

from tests.docker.stack import HERE, Stack, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def stack(built):
    stack = Stack(HERE / "longer.yml")
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def test_env_servers_join_a_run_and_leave_it(stack):
    def servers_in_episodes():
        text = stack("exec", "-T", "learner", "cat", "/runs/cartpole/latest/episodes.csv")
        envs = {row["env"] for row in csv.DictReader(text.splitlines())}
        return {env.removeprefix("cartpole-").rsplit("-", 2)[0] for env in envs}

    stack.wait_for_progress(5_000, 3, "the run begins")
    folder, _, _ = stack.progress()

    stack.up("--scale", "env_server=3")
    health = ("exec", "-T", "learner", "rlightning", "health", "env_server:50051", "--timeout", 5)
    lines = stack(*health).splitlines()
    assert len(lines) == 3
    assert all(line.endswith(":50051  SERVING") for line in lines)
    stack.wait_for_log(lambda log: log.count("has joined with 64 rows") == 2, 60, "both joined")
    # A rollout has rows of all env servers, so that every update from now on does.
    stack.wait_for_progress(20_000, 5, "the run goes on with three")
    ids = {container[:12] for container in stack("ps", "-q", "env_server").split()}
    assert servers_in_episodes() == ids

    since = time.time_ns() / 1e9
    stack.up("--scale", "env_server=1")
    stack.wait_for_log(lambda log: log.count("has left after") == 2, 60, "both left")
    died = run(
        *("docker", "events", f"--since={since:.3f}", f"--until={time.time_ns() / 1e9:.3f}"),
        *("--filter=event=die", "--format={{.Actor.Attributes.exitCode}}"),
    )
    assert died.split() == ["0", "0"]  # drained
    stack.wait_for_progress(5_000, 5, "the run goes on with one")
    assert stack.progress()[0] == folder
    names = ("policy_server", "buffer_server", "env_server", "learner")
    assert [stack.inspect(name)["RestartCount"] for name in names] == [0] * 4
