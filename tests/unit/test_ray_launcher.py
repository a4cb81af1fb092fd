"""What the launcher of Ray says where there is none; tests/ray has the rest."""

import sys
from types import ModuleType

import pytest

from rlightning.cluster.launchers import make_launcher
from rlightning.cluster.ray_launcher import EFFECTIVE
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig, keys_without_effect, load_config


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"rlightning\[ray\]"):
        make_launcher(MainConfig(), Run(tmp_path), on_ray=True, report=print)


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))

    def launcher(*, policy=None, more_of_env=None, **services):
        storage = {"type": "sharded", "num_shards": 2}
        env = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_cpus": 2}
        config = MainConfig(
            env=[{**env, **(more_of_env or {})}],
            policy=policy or {},
            buffer={"type": "ReplayBuffer", "storage": storage, "node_affinity_env": True},
            services=services,
        )
        return make_launcher(config, Run(tmp_path), on_ray=True, report=print)

    return launcher


def test_with_affinity_env_servers_are_placed_beside_the_shard_that_they_write_to(make):
    launcher = make(env={"replicas": 4})
    for number, section in enumerate(launcher.sections):
        launcher._service(section).address = f"ipv4:10.0.0.1:{number},10.0.0.2:{number}"
    bundles = launcher._bundles(list(launcher.sections))
    assert bundles == [["policy"], ["buffer-0", "env-0", "env-2"], ["buffer-1", "env-1", "env-3"]]
    launcher._ray.cluster_resources = dict
    assert launcher._needs_of(bundles[1]) == {"CPU": 5.0}

    files = dict(launcher._files("env-1"))
    for name, text in files.items():
        (launcher._run.path / name).write_text(text)
    read = load_config([launcher._run.path / name for name in files], environ={})
    assert read.buffer_addresses == [launcher.address("buffer-1")]
    assert not read.buffer.node_affinity_env  # nothing is left to say of nodes
    assert (read.services.env.replica, read.services.env.replicas) == ("env1", 1)


@pytest.mark.parametrize(
    ("policy", "there", "gpus"),
    [
        ({"device": "auto"}, 2, 1.0),
        ({"device": "auto", "eval_num_gpus": 0.5}, 2, 0.5),
        ({"device": "auto"}, 0, None),
        ({"device": "cpu"}, 2, None),
        # It is said that there is no room, rather than that a server without a GPU fails.
        ({"device": "cuda:0"}, 0, 1.0),
        ({"device": "cuda", "eval_num_gpus": 0}, 2, None),
    ],
)
def test_a_policy_server_reserves_gpus_where_it_acts_on_one(make, policy, there, gpus):
    launcher = make(policy=policy, env={"replicas": 2})
    launcher._ray.cluster_resources = lambda: {"CPU": 8.0, "GPU": float(there)}
    expected = {"CPU": 1.0} if gpus is None else {"CPU": 1.0, "GPU": gpus}
    assert launcher._needs_of(["policy"]) == expected


def test_env_servers_reserve_what_their_workers_need_and_shards_no_gpu(make):
    launcher = make(
        more_of_env={"num_workers": 3, "num_envs": 3, "num_gpus": 0.25}, env={"replicas": 2}
    )
    launcher._ray.cluster_resources = lambda: {"CPU": 64.0, "GPU": 4.0}
    assert launcher._needs("env-0") == {"CPU": 6.0, "GPU": 0.75}
    assert launcher._needs("buffer-0") == {"CPU": 1.0}
    (beside,) = (b for b in launcher._bundles(list(launcher.sections)) if "buffer-1" in b)
    assert beside == ["buffer-1", "env-1"]
    assert launcher._needs_of(beside) == {"CPU": 7.0, "GPU": 0.75}


@pytest.mark.parametrize(
    ("services", "complaint"),
    [
        ({"env": {"replicas": 3}}, "services.env.replicas: .* a multiple of the 2 shards, got 3"),
        ({"env": {"addresses": ["a:1", "b:1"]}}, "node_affinity_env: .* not for those with addr"),
    ],
)
def test_affinity_that_cannot_be_is_refused(make, services, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(**services)


def test_what_ray_is_told_has_an_effect_with_it_alone():
    config = MainConfig(
        env=[{"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_cpus": 2}],
        policy={"eval_num_gpus": 0.5, "train_num_gpus": 2},
        cluster={"ray_address": "10.0.0.1:6379"},
    )
    assert set(keys_without_effect(config, honoured=EFFECTIVE)) == {"policy.train_num_gpus"}
    assert set(keys_without_effect(config)) == {
        *("cluster", "env.0.num_cpus", "policy.eval_num_gpus", "policy.train_num_gpus")
    }
