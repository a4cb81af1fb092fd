"""A cluster that hosts no env: all of them attach."""

from contextlib import ExitStack

import pytest

from tests.e2e.command import Command, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NO_ENV = """
policy: {model_cfg: {hidden: [8]}, initial_weights: random}
buffer: {rollout_length: 8}
train: {max_env_steps: 400, batch_size: 16}
services: {env: {min_clients: 2, clients_timeout_s: 120}}
"""


def test_training_waits_for_its_clients_and_learns_from_them(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(NO_ENV)
    with ExitStack() as stack:
        train = stack.enter_context(Command("train", config, "--json", cwd=tmp_path))
        address = train.wait_for(r"^env server +SERVING +(\S+)$", 90)[1]
        clients = [
            stack.enter_context(
                Command("attach", "CartPole-v1", "--server", address, "--name", name, cwd=tmp_path)
            )
            for name in ("one", "two")
        ]
        assert train.wait(150) == 0, train.stderr
        assert '"outcome": "finished"' in train.stdout
        episodes = (tmp_path / "runs" / "run" / "1" / "episodes.csv").read_text()
        assert "attached/one" in episodes
        assert "attached/two" in episodes
        for client in clients:
            assert client.process.poll() is None, client.stderr
            client.interrupt()
            assert client.wait(20) == 130
            assert "ended " in client.stdout


def test_clients_that_do_not_come_end_the_run_with_a_reason(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(NO_ENV)
    few = settings("services.env.clients_timeout_s=1", "env=[]")
    code, _, err = run("train", config, *few, cwd=tmp_path, timeout_s=120)
    assert code == 1
    assert "0 of 2 clients attached within 1 s (services.env.min_clients)" in err
    assert "Traceback" not in err


def test_a_cluster_without_envs_and_clients_is_refused(tmp_path):
    config = tmp_path / "cluster.yaml"
    env = "env: {name: cart, backend: gymnasium, task: CartPole-v1"
    for text, line in [
        ("train: {seed: 1}", "the config has no env"),
        (f"{env}, num_workers: 0}}", "no env here is for the actor loop"),
        (f"{env}, driver: external}}", "set env[].driver"),
    ]:
        config.write_text(text)
        code, _, err = run("train", config, cwd=tmp_path)
        assert code == 2
        assert line in err
    config.write_text(NO_ENV)
    code, _, err = run("train", config, "--launcher", "in-process", cwd=tmp_path)
    assert code == 2
    assert "nothing attaches to a cluster in one process" in err
