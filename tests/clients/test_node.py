"""A client in another language, made from the .proto files alone, in a running cluster."""

import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlightning.cluster import LocalCluster
from rlightning.errors import DeadlineExceededError
from rlightning.rpc.loop import LoopThread
from rlightning.testing import FaultProxy, wait_until
from tests.e2e.command import CARTPOLE

FOLDER = Path(__file__).parents[2] / "examples" / "node_client"

pytestmark = [pytest.mark.node, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def installed():
    subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=FOLDER, check=True, timeout=180
    )


@pytest.fixture
def cluster(tmp_path):
    overrides = [f"log.log_dir={tmp_path}", "policy.initial_weights=random", "env.num_envs=4"]
    with LocalCluster(CARTPOLE, overrides=overrides) as cluster:
        yield cluster


@pytest.fixture
def rollouts(cluster):
    """The rollouts that come, which would else hold the envs up."""
    taken, ended = [], threading.Event()

    def take():
        while not ended.is_set():
            try:
                taken.append(cluster.buffer.next_batch(0.5))
            except DeadlineExceededError:
                continue

    thread = threading.Thread(target=take)
    thread.start()
    yield taken
    ended.set()
    thread.join()


def start(address, *options):
    return subprocess.Popen(
        ["node", "cartpole.js", address, *options],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_is_heard_while_nobody_takes_the_rollouts(cluster):
    with start(cluster.config.services.env.dial_address) as client:
        wait_until(lambda: cluster.env.describe().stats["groups_attached"] == 1, 30, "attached")
        steps = [-1]

        def stands():
            time.sleep(0.1)
            steps.append(cluster.env.describe().env_steps)
            return len(steps) > 10 and len(set(steps[-10:])) == 1 and steps[-1] > 0

        wait_until(stands, 60, "the buffer is not full")
        client.send_signal(signal.SIGINT)
        out, err = client.communicate(timeout=30)
    assert client.returncode == 0, err
    assert out.startswith("steps ")


def test_a_client_made_from_the_protos_takes_part_and_survives_a_cut(cluster, rollouts):
    with LoopThread("proxy") as loop:
        proxy = FaultProxy(cluster.config.services.env.dial_address)
        loop.run(proxy.start())
        with start(proxy.address, "--steps", "2000") as client:
            wait_until(lambda: cluster.env.describe().stats["groups_attached"] == 1, 30, "attached")
            before = cluster.env.describe().env_steps
            wait_until(lambda: cluster.env.describe().env_steps > before + 500, 60, "steps")
            loop.loop.call_soon_threadsafe(proxy.cut)
            out, err = client.communicate(timeout=120)
        assert client.returncode == 0, err
        loop.run(proxy.close())
    said = re.fullmatch(r"steps 2001  episodes (\d+)  version 0  reconnects 1\n", out)
    assert said, out
    wait_until(lambda: cluster.env.describe().stats["groups_attached"] == 0, 5, "left at once")

    # No step was done or stored twice, and none was lost: its episodes are whole.
    mine = [e for e in cluster.env.episodes() if e.env_id.startswith("attached/")]
    assert len(mine) - int(said[1]) in {0, 1}  # the last one may have been left open
    assert sum(episode.length for episode in mine) == 2000
    rows = [
        batch.columns["observation"][:, row]
        for batch in rollouts
        for row, env_id in enumerate(batch.metadata["env_ids"])
        if env_id.startswith("attached/")
    ]
    assert np.abs(np.concatenate(rows)[:, 0]).max() < 2.4 + 0.1


def test_a_client_of_another_env_is_refused_with_what_differs(cluster):
    source = (FOLDER / "cartpole.js").read_text().replace("n: 2", "n: 3")
    other = FOLDER / "other.js"
    other.write_text(source)
    try:
        done = subprocess.run(
            ["node", other.name, cluster.config.services.env.dial_address],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        other.unlink()
    assert done.returncode == 1
    assert re.match(r"error: .*FAILED_PRECONDITION.*action_space", done.stderr), done.stderr
