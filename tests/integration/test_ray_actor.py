"""What an actor of Ray does on its node, without Ray."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from rlightning.cluster.ray_actor import ServiceActor
from rlightning.testing import wait_until

CONFIG = "env: {name: cart, backend: gymnasium, task: CartPole-v1}\nbuffer: {type: RolloutBuffer}\n"
OWN = "services: {buffer: {listen: 127.0.0.1:0}}\n"


def test_a_service_runs_again_when_it_has_ended_and_leaves_nothing_when_it_is_stopped():
    actor = ServiceActor("buffer-1", {"config.yaml": CONFIG, "buffer-1.yaml": OWN})
    folder = actor._folder

    def listens(times):
        logs = list(folder.glob("*.log"))
        return logs and logs[0].read_text().count("buffer_server listens on 127.0.0.1:") == times

    with ThreadPoolExecutor() as threads:
        first = threads.submit(actor.run)
        wait_until(lambda: listens(1), 60, "it does not listen")
        os.kill(actor._process.pid, signal.SIGKILL)
        assert "buffer server 1 was killed by SIGKILL" in first.result(30)

        again = threads.submit(actor.run)
        wait_until(lambda: listens(2), 60, "it does not listen again")
        log = actor.stop(20.0)
        assert log.rstrip().endswith("buffer_server stops")
        assert "exited with code 0" in again.result(30)
        assert "was stopped" in actor.run()
    assert not folder.exists()


def test_a_service_that_cannot_start_says_why():
    actor = ServiceActor("policy", {"config.yaml": "policy: {max_batch_rows: 0}\n"})
    assert "policy.max_batch_rows" in actor.run()
    assert "max_batch_rows" in actor.stop(1.0)
