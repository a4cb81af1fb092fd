"""The documented config models."""

import warnings

import pytest
from pydantic import ValidationError

from rlightning.errors import ConfigError
from rlightning.utils.config import (
    BufferConfig,
    ClientAuthConfig,
    Config,
    EnvConfig,
    MainConfig,
    PolicyServiceConfig,
    SamplerConfig,
    ServiceConfig,
    StorageConfig,
    WeightBufferConfig,
    diff_configs,
    keys_without_effect,
)


def make_env(**overrides):
    return EnvConfig(**{"name": "e", "backend": "gymnasium", "task": "CartPole-v1", **overrides})


def test_undeclared_mappings_become_configs_and_lists_stay():
    config = Config(a={"b": {"c": 1}}, d=[{"e": 2}])
    assert config.a.b.c == 1
    assert config["d"] == [{"e": 2}]
    assert config.get("missing", 7) == 7
    with pytest.raises(AttributeError):
        config["missing"]


def test_dict_and_yaml_round_trip(tmp_path):
    config = MainConfig(env=[make_env(env_kwargs={"x": [1, {"y": 2}], "lr": "1e-3"})])
    assert MainConfig.from_dict(config.to_dict()) == config
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert MainConfig.load_yaml(file) == config
    assert MainConfig.load_yaml(None) == MainConfig()


def test_random_weights_act_only_where_a_config_says_so():
    assert MainConfig().policy.initial_weights == "none"


def test_from_dict_names_each_field():
    with pytest.raises(ValueError, match=r"field 'env\.0\.num_envs': .*\nfield 'train\.lr': "):
        MainConfig.from_dict(
            {
                "env": {"name": "e", "backend": "ale", "task": "t", "num_envs": "x"},
                "train": {"lr": 0},
            }
        )


@pytest.mark.parametrize(
    ("kind", "sampler"), [("ReplayBuffer", "uniform"), ("RolloutBuffer", "all")]
)
def test_the_default_sampler_fits_the_buffer(kind, sampler):
    assert BufferConfig(type=kind, capacity=1).sampler == SamplerConfig(type=sampler)
    chosen = BufferConfig(type=kind, capacity=1, sampler=SamplerConfig(type="batch"))
    assert chosen.sampler.type == "batch"


def test_sharded_storage_is_on_the_cpu():
    assert StorageConfig(type="sharded", num_shards=2).get("num_shards") == 2
    with pytest.raises(ValueError, match="needs device 'cpu'"):
        StorageConfig(type="sharded", device="cuda")


def test_an_unknown_backend_warns():
    with pytest.warns(UserWarning, match="unknown env backend 'gymnasum'"):
        make_env(backend="gymnasum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_env(backend="my_env:MyEnv")
        make_env(backend="libero")


@pytest.mark.parametrize("backend", ["gymnasium", "ale", "mujoco", "maniskill"])
def test_vectorised_backends_take_several_envs(backend):
    assert make_env(backend=backend, num_envs=4).num_envs == 4


def test_other_backends_do_not():
    with pytest.raises(ValueError, match="Vectorized environments are only supported"):
        make_env(backend="piper", num_envs=2)


@pytest.mark.parametrize(
    ("setup", "mode"),
    [
        ("widowx", "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"),
        (
            "my_google_robot_static",
            "arm_pd_ee_delta_pose_align_interpolate_by_planner"
            "_gripper_pd_joint_pos_interpolate_by_planner",
        ),
        ("panda", "as given"),
    ],
)
def test_control_mode_of_the_known_maniskill_setups(setup, mode):
    params = {"control_mode": "as given"}
    env = make_env(backend="maniskill", policy_setup=setup, init_params=params)
    assert env.init_params.control_mode == mode


def test_a_weight_buffer_strategy_needs_its_type():
    assert WeightBufferConfig(type="CPUWeightBuffer", buffer_strategy="Shared")
    with pytest.raises(ValueError, match="needs type 'ShardedWeightBuffer'"):
        WeightBufferConfig(buffer_strategy="Sharded")


@pytest.mark.parametrize("listen", ["127.0.0.1:1", {"address": "127.0.0.1:1"}, ["127.0.0.1:1"]])
def test_listeners_may_be_written_short(listen):
    assert ServiceConfig(listen=listen).listen[0].address == "127.0.0.1:1"


def test_dial_address():
    assert ServiceConfig(listen="127.0.0.1:5").dial_address == "127.0.0.1:5"
    assert ServiceConfig(listen="127.0.0.1:5", address="far:6").dial_address == "far:6"
    wide = ServiceConfig(listen={"address": "0.0.0.0:5", "plaintext": True})
    assert wide.dial_address == "127.0.0.1:5"
    with pytest.raises(ConfigError, match="lets the system choose a port"):
        _ = ServiceConfig().dial_address


def test_diff_names_leaves():
    left = MainConfig(env=[make_env()])
    right = left.model_copy(deep=True)
    right.env[0].num_envs = 4
    right.env[0].env_kwargs = Config(x=1)
    assert diff_configs(left, left) == []
    assert diff_configs(left, right) == [
        ("env.0.num_envs", 1, 4),
        ("env.0.env_kwargs.x", "(absent)", 1),
    ]


def test_diff_has_one_entry_for_a_section_that_a_config_lacks():
    left, right = MainConfig(env=[make_env()]), MainConfig()
    right.services.policy.auth = ClientAuthConfig(token="t")
    right.services.python_path = ["a"]
    env = make_env().model_dump(exclude_defaults=True)
    assert env
    assert diff_configs(left, right) == [
        ("env.0", env, "(absent)"),
        ("services.policy.auth", None, {"token": "t"}),
        ("services.python_path", [], ["a"]),
    ]
    assert diff_configs(right, left)[0] == ("env.0", "(absent)", env)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_run_name_is_one_folder(name):
    with pytest.raises(ValueError, match="expected the name of a folder"):
        MainConfig.from_dict({"log": {"name": name}})


def test_keys_without_effect_are_named_when_they_are_set():
    assert list(keys_without_effect(MainConfig(env=[make_env()]))) == []
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "env": make_env(num_cpus=2).to_dict(),
            "policy": {"weight_buffer": {"buffer_strategy": "None"}, "seed": 3},
            "cluster": {"eval_worker_num": 2},
        }
    )
    assert set(keys_without_effect(config)) == {
        "engine",
        "env.0.num_cpus",
        "policy.weight_buffer",
        "cluster",
    }
    for backend, named in [("wandb", ["log.backend"]), ("none", [])]:
        config = MainConfig.from_dict({"log": {"backend": backend}})
        assert list(keys_without_effect(config)) == named


def test_keys_for_classes_of_the_users_own_have_no_effect_on_ours():
    keys = {"optim_cfg": {"eps": 1e-5}, "policy_kwargs": {"a": 1}}
    env = make_env().to_dict() | {"init_params": {"robot": "arm"}}
    ours = MainConfig.from_dict({"env": env, "policy": keys})
    assert set(keys_without_effect(ours)) == {
        "env.0.init_params",
        "policy.optim_cfg",
        "policy.policy_kwargs",
    }
    own = MainConfig.from_dict(
        {"env": env | {"backend": "mine:Env"}, "policy": {**keys, "type": "mine:Policy"}}
    )
    assert list(keys_without_effect(own)) == []


def test_a_table_takes_over_what_it_does_not_name():
    section = {
        "type": "ReplayBuffer",
        "capacity": 100,
        "max_bytes": 10**6,
        "sampler": {"type": "sequence", "length": 4},
        "storage": {"mode": "fixed"},
        "rate_limiter": {"min_size": 9},
        "tables": {
            "same": None,
            "own": {"sampler": {"type": "uniform"}, "rate_limiter": None, "envs": ["a*"]},
            "rollouts": {"type": "RolloutBuffer", "sampler": None, "rate_limiter": None},
        },
    }
    config = MainConfig(buffer=section).buffer
    same, own, rollouts = (config.tables[name] for name in ("same", "own", "rollouts"))
    assert (same.capacity, same.sampler, same.storage) == (100, config.sampler, config.storage)
    assert (same.rate_limiter, same.envs, same.max_bytes) == (config.rate_limiter, ["*"], None)
    assert (own.sampler.type, own.sampler.length, own.rate_limiter) == ("uniform", None, None)
    assert (rollouts.sampler.type, rollouts.storage.mode) == ("all", "fixed")
    assert type(config).from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"a/b": {}}, "expected names of 1 to 64 of"),
        ({"": {}}, "expected names of 1 to 64 of"),
        ({"a": {"tables": {"b": {}}}}, "a: a table has no tables of its own"),
        ({"a": {"capacity": "many"}}, "tables.a.capacity"),
    ],
)
def test_bad_tables_are_refused(tables, message):
    with pytest.raises(ConfigError, match=message):
        BufferConfig.from_dict({"type": "ReplayBuffer", "capacity": 5, "tables": tables})


QUEUE = {"rate_limiter": {"queue_size": 4}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (QUEUE, "rate_limiter.queue_size: a queue is in one buffer server"),
        ({"tables": {"a": QUEUE}}, "rate_limiter.queue_size: a queue is in one buffer server"),
        ({"tables": {"a": {"storage": {}, **QUEUE}}}, "a queue is in one buffer server"),
        (
            {"tables": {"a": {"storage": {"type": "sharded", "num_shards": 3}}}},
            "tables.a.storage.num_shards: shards are those of the whole section, which says 2, got",
        ),
        (
            {"tables": {"a": {"storage": {"addresses": ["a:1"]}}}},
            "tables.a.storage.addresses: shards are those of the whole section",
        ),
        ({"tables": {"a": {"node_affinity_env": True}}}, "tables.a.node_affinity_env: shards are"),
        (
            {"storage": {}, "tables": {"a": {"storage": {"type": "sharded"}}}},
            "tables.a.storage.type: shards are those of the whole section, which says 'unified'",
        ),
    ],
)
def test_shards_are_those_of_the_whole_section_and_no_queue(section, message):
    sharded = {"type": "sharded", "num_shards": 2}
    with pytest.raises(ConfigError, match=message):
        BufferConfig.from_dict(
            {"type": "ReplayBuffer", "capacity": 5, "storage": sharded, **section}
        )


def test_tables_are_in_every_shard():
    config = MainConfig(
        buffer={
            "type": "ReplayBuffer",
            "capacity": 5,
            "storage": {"type": "sharded", "num_shards": 2},
            "tables": {"same": None, "episodes": {"storage": {"unit": "episode"}}},
        }
    )
    assert config.buffer.tables["same"].storage.shards == 2
    config.buffer.storage.addresses = ["a:1", "b:1"]  # as a launcher does
    again = MainConfig.from_dict(config.to_dict())
    assert again.buffer_addresses == ["a:1", "b:1"]
    assert again.buffer.tables["episodes"].storage.unit == "episode"


def test_addresses_of_replicas():
    one = PolicyServiceConfig(address="policy:5")
    assert one.dial_addresses == ["policy:5"]
    several = PolicyServiceConfig(addresses=["a:1", "b:1"])
    assert several.dial_addresses == ["a:1", "b:1"]
    assert several.dial_address == "a:1"
    for wrong, message in [
        ({"address": "a:1", "addresses": ["b:1"]}, "give address or addresses, not both"),
        ({"addresses": ["a:1", "a:1"]}, "expected each address once"),
        ({"addresses": ["a"]}, "expected HOST:PORT"),
        (
            {"addresses": ["a:1", "b:1"], "replicas": 3},
            "3 are to be started, and addresses names 2",
        ),
        ({"replicas": 0}, "greater than or equal to 1"),
    ]:
        with pytest.raises(ValidationError, match=message):
            PolicyServiceConfig(**wrong)
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        ServiceConfig(replicas=2)
