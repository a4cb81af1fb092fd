"""Loading a config: merge order, strictness, and what the errors say."""

from pathlib import Path

import pytest
import yaml

from rlightning.cli.options import read_config
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig, load_config, strict_schema
from rlightning.utils.config.strict import is_open

ENV = "env: {name: cp, backend: gymnasium, task: CartPole-v1, num_envs: 8}\n"


@pytest.fixture
def write(tmp_path):
    def _write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def load(path, *overrides, **environ):
    paths = path if isinstance(path, list) else [path]
    return load_config(paths, overrides, environ)


def test_later_sources_win(write):
    first = write(ENV + "train: {lr: 1e-3, batch_size: 8}\nlog: {name: a}\n", "1.yaml")
    second = write("train: {lr: 2e-3}\nlog: {name: b}\n", "2.yaml")
    assert load([first, second]).train.lr == 2e-3
    assert load([first, second]).train.batch_size == 8
    assert load([second, first]).log.name == "a"
    environ = {"RLIGHTNING__TRAIN__LR": "3e-3", "RLIGHTNING__LOG__NAME": "c", "OTHER": "x"}
    assert load([first, second], **environ).train.lr == 3e-3
    config = load([first, second], "train.lr=4e-3", **environ)
    assert (config.train.lr, config.log.name) == (4e-3, "c")


def test_the_schema_takes_the_keys_that_files_may_have():
    schema = strict_schema(MainConfig)
    sections = {"MainConfig": schema, **schema["$defs"]}
    takes_any = {name for name, section in sections.items() if section["additionalProperties"]}
    assert takes_any == {"Config"}
    open_fields = {
        key
        for section in sections.values()
        for key, field in section.get("properties", {}).items()
        if "#/$defs/Config" in {one.get("$ref") for one in (field, *field.get("anyOf", ()))}
    }
    assert {key for key in open_fields if not is_open(key)} == {"evaluate_cfg"}
    one_env = {"$ref": "#/$defs/EnvConfig"}
    assert schema["properties"]["env"]["anyOf"][0] == one_env
    assert "required" not in schema["$defs"]["BufferConfig"]


def test_the_process_environment_counts(write, monkeypatch):
    monkeypatch.setenv("RLIGHTNING__TRAIN__SEED", "5")
    assert load_config([write(ENV)]).train.seed == 5


def test_values_are_yaml(write):
    config = load(write(ENV), "env.env_kwargs.sizes=[1, 2]", "env.env_kwargs.rate=1e-3")
    assert config.env[0].env_kwargs.sizes == [1, 2]
    assert config.env[0].env_kwargs.rate == 1e-3
    assert load(write(ENV), "train.target_return=null").train.target_return is None


def test_a_list_with_one_element_takes_keys(write):
    one = write("env: [{name: cp, backend: gymnasium, task: CartPole-v1}]\n")
    more = write("env: {num_envs: 3}\n", "more.yaml")
    assert load([one, more]).env[0].num_envs == 3
    assert load(one, "env.num_envs=4").env[0].num_envs == 4
    assert load(one, "env.0.num_envs=5").env[0].num_envs == 5


def test_elements_of_a_longer_list_are_numbered(write):
    entry = "{name: cp, backend: gymnasium, task: CartPole-v1}"
    two = write(f"env: [{entry}, {entry}]\n")
    config = load(two, "env.1.num_envs=4", "env.1.env_kwargs.a.b=1")
    assert [env.num_envs for env in config.env] == [1, 4]
    assert config.env[1].env_kwargs.a.b == 1
    with pytest.raises(ConfigError, match="'env' has 2 elements; there is no 2"):
        load(two, "env.2.num_envs=4")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trian: {lr: 1}", "{file}: unknown key 'trian'; did you mean 'train'?"),
        ("train: {Lr: 1}", "{file}: unknown key 'train.Lr'; did you mean 'train.lr'?"),
        (
            "train: {learning_rate: 1}",
            "{file}: unknown key 'train.learning_rate'; did you mean 'train.lr'?",
        ),
        ("ppo: {}", "{file}: unknown key 'ppo'; `rlightning config schema` lists all"),
        ("policy: {gamma: 1}", "{file}: unknown key 'policy.gamma'; did you mean 'learner.gamma'?"),
        (
            "buffer: {sampler: {type: all, sed: 1}}",
            "{file}: unknown key 'buffer.sampler.sed'; did you mean 'buffer.sampler.seed'?",
        ),
        (
            "services: {policy: {rpc: {lease: 1}}}",
            "{file}: unknown key 'services.policy.rpc.lease'; did you mean "
            "'services.policy.rpc.lease_s'?",
        ),
        (
            "services: {env: {listen: [{adress: x}]}}",
            "{file}: unknown key 'services.env.listen.0.adress'; did you mean "
            "'services.env.listen.0.address'?",
        ),
        (
            "env: {name: e, backend: ale, task: t, evaluate_cfg: {num_env: 1}}",
            "{file}: unknown key 'env.evaluate_cfg.num_env'; did you mean "
            "'env.evaluate_cfg.num_envs'?",
        ),
        ("train: {lr: fast}", "{file}: 'train.lr': expected a valid number, got 'fast'"),
        (
            "train: {batch_size: 0}",
            "{file}: 'train.batch_size': expected greater than or equal to 1, got 0",
        ),
        ("train: 3", "{file}: 'train': expected a mapping, got 3"),
        ("env: {name: e, backend: ale}", "{file}: 'env.0.task' is required"),
        (
            "buffer: {type: Fifo}",
            "{file}: 'buffer.type': expected 'ReplayBuffer' or 'RolloutBuffer', got 'Fifo'",
        ),
        ("- 1", "{file}: expected a mapping of sections, got list"),
        ("train: {lr: 1, lr: 2}", "{file}:1:16: not valid YAML: the key 'lr' is there twice"),
        (
            "train: [",
            "{file}:1:9: not valid YAML: expected the node content, but found '<stream end>'",
        ),
    ],
)
def test_bad_files_give_one_clear_line(write, text, line):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == line.format(file=path)


def test_every_bad_key_has_its_line(write):
    with pytest.raises(ConfigError) as caught:
        load(write("trian: {}\nenvs: {}\n"))
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["trian", "envs"]


def test_errors_name_the_source_of_the_value(write):
    path = write(ENV)
    with pytest.raises(ConfigError, match=r"^RLIGHTNING__TRAIN__LR: 'train.lr'"):
        load(path, RLIGHTNING__TRAIN__LR="x")
    with pytest.raises(ConfigError, match=r"^RLIGHTNING__TRIAN__LR: unknown key 'trian'"):
        load(path, RLIGHTNING__TRIAN__LR="1")
    with pytest.raises(ConfigError, match=r"^--set train.lr=x: 'train.lr'"):
        load(path, "train.lr=x")
    # The file's `env` is a mapping, which the config holds as a list of one.
    for key in ("env.num_envs", "env.0.num_envs"):
        with pytest.raises(ConfigError, match=rf"^--set {key}=0: 'env.0.num_envs': expected .* 1"):
            load(path, f"{key}=0")
    with pytest.raises(ConfigError, match=r"^RLIGHTNING__ENV__NUM_ENVS: 'env.0.num_envs'"):
        load(path, RLIGHTNING__ENV__NUM_ENVS="0")
    with pytest.raises(ConfigError, match="expected key=value"):
        load(path, "train.lr")


@pytest.mark.parametrize("section", ["env.env_kwargs", "env.init_params", "policy.model_cfg"])
def test_open_sections_take_any_key(write, section):
    assert load(write(ENV), f"{section}.anything.at.all=1")


def test_a_value_with_blanks_around_it_is_not_taken_for_a_file(tmp_path):
    for rest in (["=", "1"], ["=1"]):  # --set train.lr = 1
        files = [tmp_path / "absent.yaml", *map(Path, rest)]
        with pytest.raises(ConfigError, match=r"^--set train.lr: expected key=value"):
            read_config(files, None, ["train.lr"])
    with pytest.raises(ConfigError, match=r"^train.seed=3: .* its own --set train.seed=3$"):
        read_config([Path("train.seed=3")], None, ["train.lr=1"])  # --set train.lr=1 train.seed=3


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the config: No such file"):
        load(tmp_path / "absent.yaml")


def test_empty_files_and_sections_are_defaults(write):
    assert load(write("")) == load(write("train:\nlog:\n")) == load([])


def test_the_effective_config_loads_to_itself(write):
    config = load(
        write(ENV), "env.env_kwargs.text='1e-3'", "train.lr=1e-5", "train.target_return=475"
    )
    again = load(write(config.to_yaml(), "effective.yaml"))
    assert again == config
    assert again.env[0].env_kwargs.text == "1e-3"


@pytest.mark.parametrize("key", ["services.policy.address", "services.policy.listen"])
@pytest.mark.parametrize("address", ["nonsense", "host:", "127.0.0.1:99999"])
def test_an_address_names_a_port(write, key, address):
    with pytest.raises(ConfigError, match=r"expected HOST:PORT, .* got '"):
        load(write(ENV), f"{key}={address!r}")
    assert load(write(ENV), f"{key}='[::1]:0'")
    assert load(write(ENV), f"{key}='unix:/tmp/x'")


def test_an_unknown_backend_is_no_matter_of_loading(write):
    assert load(write("env: {name: e, backend: mine, task: t}")).env[0].backend == "mine"


def test_the_shipped_configs_load():
    root = Path(__file__).parents[2]
    shipped = [*(root / "configs").glob("*.yaml"), *root.glob("rlightning/**/config.yaml.tmpl")]
    whole = [path for path in shipped if load(path).env]  # the others are merged over one of these
    assert len(whole) >= 3
    for path in whole:
        assert load(path).env[0].task
        # Random weights act only where a config says so.
        assert yaml.safe_load(path.read_text())["policy"]["initial_weights"] == "random", path


def test_sections_by_name_are_checked_inside(write):
    text = """
buffer:
  type: ReplayBuffer
  storage: {frame_stack: {observation.camera: {axis: 1}}}
  tables: {robot: {capacity: 5}, sim: }
"""
    buffer = load(write(ENV + text)).buffer
    assert buffer.storage.frame_stack["observation.camera"].axis == 1
    assert (buffer.tables["robot"].capacity, buffer.tables["sim"].capacity) == (5, 1_000_000)
    assert (
        load(write(ENV + text), "buffer.tables.robot.capacity=7").buffer.tables["robot"].capacity
        == 7
    )
    for bad, near in (
        ("buffer: {tables: {robot: {capaciti: 5}}}", "buffer.tables.robot.capacity"),
        ("buffer: {storage: {frame_stack: {observation: {axes: 1}}}}", "axis"),
        ("buffer: {rate_limiter: {min_sizes: 1}}", "buffer.rate_limiter.min_size"),
    ):
        with pytest.raises(ConfigError, match=f"unknown key .*did you mean '.*{near}'"):
            load(write(bad))
