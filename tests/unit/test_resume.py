"""What a run goes on from: the buffer of the one before, and a state that is not what it should be."""

from pathlib import Path

import pytest
import torch
import yaml

from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.resume import checkpoint_to_resume, load_checkpoint, restore_buffer
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.learner import Checkpoint
from rlightning.learner.state_file import dump_state
from rlightning.utils.config import MainConfig, load_config


def make_config(services=None, **buffer):
    env = {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"}
    buffer = {"type": "ReplayBuffer", "capacity": 100, **buffer}
    return MainConfig.from_dict({"env": env, "buffer": buffer, "services": services or {}})


def make_checkpoint(of_buffer=None, state=b""):
    return Checkpoint(Path("runs/e/1/checkpoints/9"), 9, 8, 7, 6, None, of_buffer, b"", state)


NAME = "checkpoint-00000003"


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("of_buffer", [NAME, None])
def test_the_buffer_begins_with_the_checkpoint_or_it_is_said_what_is_lost(
    tmp_path, there, durability, of_buffer
):
    if there:
        (tmp_path / "checkpoints" / NAME).mkdir(parents=True)
    config = make_config(data_dir=str(tmp_path), durability=durability, restore="latest")
    line = restore_buffer(make_checkpoint(of_buffer), config)
    if there and of_buffer:
        assert (config.buffer.restore, line) == (
            NAME,
            f"the replay buffer begins with {NAME} of {tmp_path}",
        )
        return
    lost = f"{NAME} is not there" if of_buffer else "the run kept no checkpoint of it"
    if durability == "none":
        assert config.buffer.restore == "none"
        assert line == f"the replay buffer begins empty: {lost} in {tmp_path}"
    else:
        assert config.buffer.restore == "latest"
        assert line == f"the replay buffer begins with the newest that {tmp_path} has: {lost}"


def test_every_shard_begins_with_its_own(tmp_path):
    for shard, name in enumerate(("checkpoint-00000003", "checkpoint-00000005")):
        (tmp_path / f"buffer-{shard}" / "checkpoints" / name).mkdir(parents=True)
    storage = {"type": "sharded", "num_shards": 2}
    config = make_config(data_dir=str(tmp_path), storage=storage)
    names = "checkpoint-00000003,checkpoint-00000005"
    assert names in restore_buffer(make_checkpoint(names), config)
    assert config.buffer.restore == names
    for others in ("checkpoint-00000003", "checkpoint-00000005,checkpoint-00000003"):
        assert "begins empty" in restore_buffer(make_checkpoint(others), config)
        assert config.buffer.restore == "none"


@pytest.mark.parametrize(
    ("services", "buffer", "said"),
    [
        ({}, {}, f"begins empty: buffer.data_dir is not set, and {NAME} is lost"),
        ({"buffer": {"address": "h:1"}}, {}, "it goes on with what it holds now"),
        ({}, {"type": "RolloutBuffer"}, ""),
    ],
)
def test_what_cannot_be_restored_is_said(services, buffer, said):
    line = restore_buffer(make_checkpoint(NAME), make_config(services, **buffer))
    assert said in line
    assert bool(said) == bool(line)


def restore_of(file):
    return load_config(file, environ={}).buffer.restore


def test_a_server_that_is_started_again_has_all_that_it_had(tmp_path):
    """What came after the checkpoint is acked, so a restart by hand must not go back to it."""
    storage = {"type": "sharded", "num_shards": 2}
    config = make_config(data_dir=str(tmp_path), storage=storage, restore=f"{NAME},{NAME[:-1]}7")
    config.log.log_dir = str(tmp_path / "runs")
    run = Run.create(config, command=[])
    launcher = LocalLauncher(config, run, report=lambda line: None)
    for shard in ("buffer-0", "buffer-1"):
        launcher._tell_listeners(shard)
    shards = [run.path / "buffer-0.yaml", run.path / "buffer-1.yaml"]
    assert [yaml.safe_load(file.read_text())["buffer"]["restore"] for file in shards] == [
        NAME,
        f"{NAME[:-1]}7",
    ]
    launcher._restart_with_all()
    assert restore_of(run.config_file) == "latest"
    assert all("restore" not in yaml.safe_load(file.read_text())["buffer"] for file in shards)


class Counter:
    """An algorithm that believes what it is given."""

    def __init__(self):
        self.rows = 0
        self.generator = torch.Generator()

    def state(self):
        return {"rows": self.rows, "generator": self.generator.get_state()}

    def restore(self, state):
        self.rows = state["rows"] + 0
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": "many"}, "rows: expected a number, got 'many'"),
        ({"generator": [1]}, "generator: expected a tensor"),
        ({"generator": torch.zeros(3)}, "RNG state must be a torch.ByteTensor|RNG state is wrong"),
    ],
)
def test_a_state_of_odd_values_is_no_traceback(change, said):
    state = dump_state({**Counter().state(), **change})
    with pytest.raises(ConfigError, match=rf"checkpoints/9 does not fit .*({said})"):
        load_checkpoint(make_checkpoint(state=state), Counter())


def test_what_belongs_to_it_is_taken():
    counter = Counter()
    load_checkpoint(make_checkpoint(state=dump_state({**counter.state(), "rows": 5})), counter)
    assert counter.rows == 5


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"type": "q_network"}, "policy.type was 'actor_critic' there, and is 'q_network' here"),
        (
            {"model_cfg": {"hidden": [32], "activation": "tanh"}},
            r"model_cfg.hidden was \[64, 64\] the",
        ),
        ({"model_cfg": {"hidden": [64, 64]}}, "model_cfg.activation was 'tanh' there, and is None"),
    ],
)
def test_a_config_that_contradicts_the_run_is_refused_with_the_key(tmp_path, policy, message):
    config = make_config()
    config.log.log_dir = str(tmp_path)
    run = Run.create(config, command=[])
    other = MainConfig.from_dict({**config.to_dict(), "policy": policy})
    with pytest.raises(ConfigError, match=message):
        checkpoint_to_resume(run.path, other)
