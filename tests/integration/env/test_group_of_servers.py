"""Env servers as members of an `EnvGroup`: dialled ones, and ones that listen here."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env import EnvGroup
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.errors import DeadlineExceededError, RemoteError, RLightningError
from rlightning.types import BatchedData, PolicyResponse
from rlightning.utils.config import EnvConfig
from tests.integration.gym_client.serving import FAST, env_server, hosted
from tests.integration.pairing.env import Counting

pytestmark = pytest.mark.timeout(60)
COUNTING = "tests.integration.pairing.env:Counting"


def server_config(**values):
    return EnvConfig(name="remote", backend="env_server", task="any", **values)


@contextmanager
def client(host, port, name, env=None):
    """A client that attaches its env in a thread of its own."""
    remote = RemoteEnvClient(env or Counting(), host, port, name=name, rpc=FAST)
    thread = threading.Thread(target=remote.run, daemon=True)
    thread.start()
    try:
        yield remote
    finally:
        remote.stop()
        thread.join(30)
        assert not thread.is_alive()
        remote.close()


def answers(batch, env_ids=None):
    """The right action for every counting env of a batch."""
    kept = [(i, r) for i, r in batch.items() if env_ids is None or i in env_ids]
    ids = [env_id for env_id, _ in kept]
    return BatchedData(ids, [PolicyResponse(i, action=r.observation[..., :3]) for i, r in kept])


def check_right(batch):
    for env_ret in batch.values():
        assert (env_ret.observation[..., 3] == 0).all()
        # Wherever it comes from: when it left there, which is known for sure on one machine.
        taken_s, within_s = env_ret.corrected_latency()
        assert (0 <= taken_s < 60, within_s) == (True, 0.0)


def test_hosted_and_attached_envs_beside_a_local_one():
    with env_server(hosted(COUNTING, num_envs=2), attached_driver="external") as server:
        host, _, port = server.address.rpartition(":")
        local = EnvConfig(name="here", backend="gymnasium", task=COUNTING)
        group = EnvGroup([server_config(address=server.address, min_clients=2), local])
        assert (len(group), group.size()) == (2, 1)
        (remote,) = group.env_servers
        with client(host, int(port), "robot"):
            metas = group.init()
            prefix = remote.get_env_id()
            ids = [group.env_list[0].get_env_id(), f"{prefix}/env-0-0", f"{prefix}/robot"]
            assert group.env_ids == [meta.env_id for meta in metas] == ids
            assert [meta.num_envs for meta in metas] == [1, 2, 1]
            assert all(meta.action_space.shape == (3,) for meta in metas)
            assert group[ids[1]] is remote
            batch, truncations = group.reset()
            assert batch.ids() == tuple(ids)
            assert truncations == [False] * 3
            assert [one.env_id for one in batch.values()] == ids
            assert batch[ids[1]].observation.shape == (2, 4)
            for _ in range(20):
                batch, truncations = group.step(answers(batch))
                assert truncations is None
                check_right(batch)
                if batch[ids[0]].last_terminated or batch[ids[0]].last_truncated:
                    batch, _ = group.reset()
            batch, _ = group.step(answers(batch, ids[2:]))  # some of them only
            assert batch.ids() == (ids[2],)
            group.step_async(answers(batch))
            with pytest.raises(ValueError, match="still steps"):
                group.step(answers(batch))
            batch, _ = group.collect_async(wait_all=True)
            check_right(batch)
            assert batch.ids() == (ids[2],)
            with pytest.raises(ValueError, match="a response for env server"):
                group.step(BatchedData([prefix], [PolicyResponse(prefix, action=0)]))
            with pytest.raises(ValueError, match="no env"):
                group.step(BatchedData(["x/y"], [PolicyResponse("x/y", action=0)]))
        assert group.get_env_stats()["return"] >= 0
        group.close()


def test_clients_attach_to_a_server_of_the_group():
    group = EnvGroup([server_config(min_clients=2)])
    (server,) = group.env_servers
    host, port = server.get_address_port()
    assert host == "127.0.0.1"
    assert port > 0
    with client(host, port, "one") as one, client(host, port, "two"):
        metas = group.init()
        ids = {f"{server.get_env_id()}/{name}" for name in ("one", "two")}
        assert {meta.env_id for meta in metas} == set(group.env_ids) == ids
        batch, _ = group.reset()
        with group.auto_reset(max_episode_steps=5):
            flags = []
            for _ in range(12):
                batch, truncations = group.step(answers(batch))
                flags.append(truncations[0])
                check_right(batch)
            # An episode of 5 steps has 6 returns; the first reset was before.
            assert [n for n, flag in enumerate(flags) if flag] == [4, 10]
        group.step_async(answers(batch))
        seen = []
        while len(seen) < 2:
            batch, _ = group.collect_async(timeout=30)
            seen += batch.ids()
        assert set(seen) == ids
        assert one.status.state == "running"
        with pytest.raises(RemoteError, match="takes no seed"):
            group.reset(seed=1)
        batch, _ = group.reset()
        with client(host, port, "three"):
            for _ in range(100):
                batch, _ = group.reset()
                if len(batch) == 3:
                    break
            batch, _ = group.step(answers(batch))
            assert len(batch) == 3
    group.close()


def test_the_interface_of_the_server_itself():
    server = EnvGroup.build_env(server_config())[0]
    assert server.collect_async() == ()
    with client(*server.get_address_port(), "robot"):
        (first,) = server.reset()
        env_id = first.env_id
        server.step_async([PolicyResponse(env_id, action=first.observation[:, :3])])
        (second,) = server.collect_async(timeout=30)
        third = server.step(PolicyResponse(env_id, action=second.observation[:, :3]))
        assert third.observation[0, 3] == 0
        assert server.init().num_envs == 1
    server.close()


def test_port_and_deadline():
    group = EnvGroup([server_config(zmq_port=0, clients_timeout_s=0.3)])
    with pytest.raises(DeadlineExceededError, match=r"0 of 1 clients .* 0.3 s \(env.min_clients\)"):
        group.init()
    group.close()
    with env_server(hosted()) as server:
        config = server_config(address=server.address, min_clients=2, clients_timeout_s=0.3)
        group = EnvGroup([config])
        with pytest.raises(DeadlineExceededError, match="1 of 2 envs were there within 0.3 s"):
            group.init()
        group.close()


def test_a_client_that_leaves_is_an_error_of_its_step_alone():
    group = EnvGroup([server_config(min_clients=2)])
    address = group.env_servers[0].get_address_port()
    with client(*address, "stays"):
        with client(*address, "leaves"):
            group.init()
            batch, _ = group.reset()
        group.step_async(answers(batch))
        errors, seen = [], []
        for _ in range(2):
            try:
                batch, _ = group.collect_async(wait_all=True)
                seen += batch.ids()
            except RLightningError as error:
                errors.append(str(error))
        assert (len(errors), len(seen)) == (1, 1)
        assert "leaves" in errors[0]
    group.close()


def test_vectorised_and_nested_envs_come_through_unchanged():
    task = "tests.unit.env.envs:Nested"
    with env_server(hosted(task, num_envs=3)) as server:
        group = EnvGroup([server_config(address=server.address)])
        group.init()
        batch, _ = group.reset(seed=3)
        (env_id,) = batch.ids()
        assert batch[env_id].observation["task"] == ("step 0",) * 3
        action = {"grip": np.zeros(3, np.int64), "move": np.zeros((3, 2), np.float32)}
        for _ in range(2):
            batch, _ = group.step(BatchedData([env_id], [PolicyResponse(env_id, action=action)]))
        env_ret = batch[env_id]
        assert env_ret.last_terminated.all()
        assert env_ret.info["final_observation"]["task"] == ("step 2",) * 3
        group.close()


def test_an_env_server_hosts_no_env_server():
    with pytest.raises(Exception, match="is for an EnvGroup"):
        with env_server(hosted(backend="env_server")):
            pass


def test_a_preprocess_fn_is_for_the_client():
    with pytest.warns(UserWarning, match="give it to the env at the client"):
        env, is_server = EnvGroup.build_env(server_config(), lambda response: response.action)
    assert is_server
    env.close()


def test_it_is_gymnasiums_spaces_that_are_told():
    group = EnvGroup([server_config()])
    with client(*group.env_servers[0].get_address_port(), "pole", gym.make("CartPole-v1")):
        (meta,) = group.init()
        assert meta.action_space == gym.spaces.Discrete(2)
    group.close()
