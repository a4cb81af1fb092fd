"""The rows of the documented config models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from rlightning.buffer import BufferConfig, SamplerConfig, StorageConfig
from rlightning.errors import ConfigError
from rlightning.utils import config as configs
from rlightning.utils.config import Config


def test_the_names_of_the_subpackage_are_listed() -> None:
    utils = importlib.import_module("rlightning.buffer.utils")
    assert set(utils.__all__) == {"Storage", "BufferView", "EpisodeTable"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(utils, "Nothing")  # noqa: B009


def test_importing_the_package_registers_both_buffers() -> None:
    from rlightning.utils.registry import BUFFERS

    assert BUFFERS.get("ReplayBuffer").__name__ == "ReplayBuffer"
    assert BUFFERS.get("RolloutBuffer").__name__ == "RolloutBuffer"


@pytest.mark.parametrize("missing", ["type", "capacity"])
def test_type_and_capacity_are_required(missing: str) -> None:
    fields: dict[str, Any] = {"type": "ReplayBuffer", "capacity": 10}
    del fields[missing]
    with pytest.raises(ValidationError, match=missing):
        BufferConfig(**fields)
    with pytest.raises(ValidationError, match="type"):
        BufferConfig(type="Other", capacity=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("auto_truncate_episode", False),
        ("node_affinity_env", False),
        ("node_affinity_train", False),
    ],
)
def test_defaults_of_a_buffer(field: str, value: object) -> None:
    assert getattr(BufferConfig(type="ReplayBuffer", capacity=-3), field) == value


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (
            "EnvConfig",
            {"num_workers": 1, "num_envs": 1, "max_episode_steps": None, "num_cpus": 1}
            | {"num_gpus": 0.0, "env_kwargs": Config(), "init_params": None}
            | {"evaluate_cfg": None, "policy_setup": "widowx"},
        ),
        ("WeightBufferConfig", {"type": "WeightBuffer", "buffer_strategy": "Double"}),
        (
            "PolicyConfig",
            {"train_num_gpus": 1.0, "eval_num_gpus": 1.0, "rollout_mode": "sync"}
            | {"router_type": "simple"},
        ),
        (
            "TrainConfig",
            {"batch_size": 64, "max_rollout_steps": -1, "max_eval_rollout_steps": -1, "lr": 3e-4}
            | {"parallel": None, "eval_interval": -1, "save_interval": -1},
        ),
        (
            "ClusterConfig",
            {"train_worker_num": 1, "eval_worker_num": 1, "buffer_worker_num": 1}
            | {"train_each_gpu_num": 1.0, "eval_each_gpu_num": 1.0, "ray_address": None}
            | {"remote_train": True, "remote_eval": True, "remote_storage": True}
            | {"remote_env": True, "is_colocated": False, "enable_offload": False}
            | {"rollout_env_interaction": False, "resource_pool": Config()},
        ),
        ("PlacementConfig", {"mode": "auto", "strategy": "default", "env_strategy": "default"}),
        (
            "LogConfig",
            {"level": "INFO", "backend": "tensorboard", "project": None, "name": None}
            | {"log_dir": "runs", "mode": None},
        ),
        ("MainConfig", {"debug": True, "verbose": True}),
    ],
)
def test_defaults_of_the_other_sections(kind: str, defaults: dict[str, Any]) -> None:
    required = {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"}
    config = getattr(configs, kind)(**(required if kind == "EnvConfig" else {}))
    assert {name: getattr(config, name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("engine", ["asyncrl", "async_rsl", "rsl", "syncrl", "eval"]),
        ("log.level", ["DEBUG", "INFO", "WARNING", "ERROR"]),
        ("log.backend", ["tensorboard", "wandb", "swanlab"]),
        ("cluster.placement.mode", ["auto", "manual"]),
        ("cluster.placement.strategy", ["default", "disaggregate", "colocate"]),
        ("cluster.placement.env_strategy", ["default", "device-colocate"]),
        ("cluster.buffer_worker_num", [2, "auto"]),
        ("cluster.train_each_gpu_num", [0.5]),
        ("cluster.eval_each_gpu_num", [0.0]),
        ("cluster.resource_pool", [{"node": [0, 1]}]),
    ],
)
def test_documented_values_are_taken_and_others_refused(field: str, values: list[Any]) -> None:
    def load(value: Any) -> configs.MainConfig:
        section: Any = value
        for name in reversed(field.split(".")):
            section = {name: section}
        return configs.MainConfig.from_dict(section)

    for value in values:
        found: Any = load(value)
        for name in field.split("."):
            found = found[name]
        assert (found.to_dict() if isinstance(found, Config) else found) == value
    with pytest.raises(ConfigError, match=rf"field '{field}[.\w]*'"):
        load("else")


def test_an_omegaconf_node_is_a_config_once_its_interpolations_are_resolved() -> None:
    node = OmegaConf.create(
        {"size": 7, "type": "ReplayBuffer", "capacity": "${size}", "storage": {"unit": "episode"}}
    )
    config = BufferConfig.from_omegaconf(node)
    assert (config.capacity, config.storage.unit) == (7, "episode")
    assert type(config.storage) is StorageConfig
    node.capacity = "many"
    with pytest.raises(ConfigError, match="field 'capacity': "):
        BufferConfig.from_omegaconf(node)


@pytest.mark.parametrize("missing", ["name", "backend", "task"])
def test_an_env_needs_name_backend_and_task(missing: str) -> None:
    fields = {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"}
    config = configs.MainConfig(env=fields)  # type: ignore[arg-type]
    assert [env.name for env in config.env] == ["e"]  # always a list
    del fields[missing]
    with pytest.raises(ValidationError, match=missing):
        configs.EnvConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "sampler"), [("ReplayBuffer", "uniform"), ("RolloutBuffer", "all")]
)
def test_the_default_sampler_goes_by_type(kind: Any, sampler: str) -> None:
    config = BufferConfig(type=kind, capacity=1)
    assert config.sampler is not None
    assert config.sampler.type == sampler
    own = BufferConfig(type=kind, capacity=1, sampler=SamplerConfig(type="batch"))
    assert own.sampler is not None
    assert own.sampler.type == "batch"


def test_a_sampler_needs_its_type() -> None:
    with pytest.raises(ValidationError, match="type"):
        SamplerConfig()
    assert SamplerConfig(type="all").seed is None


@pytest.mark.parametrize(
    ("field", "default", "others"),
    [
        ("mode", "circular", ["fixed"]),
        ("type", "unified", ["sharded"]),
        ("unit", "transition", ["episode"]),
        ("device", "cpu", ["cuda"]),
    ],
)
def test_fields_of_a_storage(field: str, default: str, others: list[str]) -> None:
    assert getattr(StorageConfig(), field) == default
    for other in others:
        assert getattr(StorageConfig(**{field: other}), field) == other
    with pytest.raises(ValidationError, match=field):
        StorageConfig(**{field: "else"})


def test_sharded_storage_is_on_the_cpu() -> None:
    with pytest.raises(ValidationError, match="cpu"):
        StorageConfig(type="sharded", device="cuda")


def test_storage_configs_are_not_shared() -> None:
    first, second = (BufferConfig(type="ReplayBuffer", capacity=1) for _ in range(2))
    assert first.storage is not second.storage


def test_constructors_take_more_keys() -> None:
    config = StorageConfig(num_shards=2, nested={"a": {"b": 1}})  # type: ignore[call-arg]
    assert config.num_shards == 2  # type: ignore[attr-defined]
    assert isinstance(config.nested, Config)  # type: ignore[attr-defined]
    assert config["mode"] == config.get("mode") == "circular"
    assert config.get("nothing", 3) == 3
    with pytest.raises(AttributeError):
        config["nothing"]
