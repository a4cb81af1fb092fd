"""What the launcher of Ray says where there is none; tests/ray has the rest."""

import sys

import pytest

from rlightning.cluster.launchers import make_launcher
from rlightning.cluster.ray_launcher import EFFECTIVE
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig, keys_without_effect


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"rlightning\[ray\]"):
        make_launcher(MainConfig(), Run(tmp_path), on_ray=True, report=print)


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
