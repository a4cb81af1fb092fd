"""TensorDicts over the memory of what a buffer returned."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rlightning.buffer import BufferConfig, ReplayBuffer, SamplerConfig, tensordict_of
from rlightning.buffer.utils import BufferView
from rlightning.types import EnvMeta
from rlightning.utils.conversions import BFloat16Array
from tests.unit.buffer.scripted import ScriptedEnv, answer


def replay(**given: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(BufferConfig(**{"type": "ReplayBuffer", "capacity": 100, **given}))
    buffer.init()
    return buffer


def columns(count: int = 6) -> dict[str, Any]:
    rows = np.arange(count)
    return {
        "observation": {"image": np.zeros((count, 2, 2), np.uint8), "arm": (rows / 2, rows * 2)},
        "task": np.array([f"task {i}" for i in rows], object),
        "half": rows.astype(np.uint16).view(BFloat16Array),
        "reward": rows.astype(np.float32),
    }


def test_a_sample_is_the_same_memory() -> None:
    buffer = replay()
    buffer.add_episode(columns())
    (batch,) = buffer.sample(4)
    view = tensordict_of(batch)
    assert view.batch_size == torch.Size([4])
    for got, tensor in (
        (batch["reward"], view["reward"]),
        (batch["observation"]["image"], view["observation", "image"]),
        (batch["observation"]["arm"][1], view["observation", "arm", "1"]),
        (batch["half"], view["half"]),
    ):
        assert tensor.data_ptr() == got.__array_interface__["data"][0]
        assert tuple(tensor.shape) == got.shape
    assert view["half"].dtype is torch.bfloat16
    batch["reward"][0] = 99.0
    assert view["reward"][0] == 99.0
    assert view["task"] == batch["task"].tolist()


def test_what_get_and_get_all_return() -> None:
    buffer = replay()
    buffer.add_episode(columns())
    everything = buffer.get_all(as_tensordict=True)
    assert everything.batch_size == torch.Size([6])
    assert everything["observation", "arm", "0"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    stored = buffer.storages[0].get_data(as_tensordict=True)
    assert (stored["reward"] == everything["reward"]).all()
    one = buffer.get(2, as_tensordict=True)
    assert one.batch_size == torch.Size([])
    assert one["reward"] == 2.0
    assert one["task"] == "task 2"
    assert buffer.get([1, 2], as_tensordict=True)["reward"].tolist() == [1.0, 2.0]
    view = BufferView(buffer.storages[0].container)
    assert view.tensordict(slice(2, 4))["reward"].tolist() == [2.0, 3.0]
    assert view.tensordict()["reward"].tolist() == [0, 1, 2, 3, 4, 5]


def test_sequences_have_two_axes() -> None:
    buffer = replay(sampler=SamplerConfig(type="sequence", length=3))
    buffer.add_episode({"observation": np.arange(8.0), "reward": np.arange(8, dtype=np.float32)})
    assert tensordict_of(buffer.sample(5)[0]).batch_size == torch.Size([5, 3])


def test_episodes_of_several_lengths_are_one_each() -> None:
    buffer = replay(storage={"unit": "episode"})
    for length in (2, 3):
        buffer.add_episode(columns(length))
    views = buffer.get([0, 1], as_tensordict=True)
    assert [view.batch_size[0] for view in views] == [2, 3]
    with pytest.raises(TypeError, match="expected columns"):
        tensordict_of(buffer.get([0, 1]))  # type: ignore[arg-type]


def test_what_may_not_be_written_is_copied() -> None:
    fixed = np.arange(3, dtype=np.float32)
    fixed.flags.writeable = False
    view = tensordict_of({"reward": fixed})
    view["reward"][0] = 5.0
    assert fixed[0] == 0.0


def test_a_tensordict_can_be_stored() -> None:
    buffer = replay()
    env = ScriptedEnv(1)
    buffer.open_group(EnvMeta("env"))
    env_ret = env.reset()
    buffer.add_transition("env", env_ret, answer(env_ret))
    tensors = tensordict_of({"observation": np.zeros((2, 3), np.float32), "reward": np.ones(2)})
    other = replay()
    other.add_episode(tensors)
    assert other.get_all()["reward"].tolist() == [1.0, 1.0]


def test_without_the_extra_the_error_names_it() -> None:
    code = """
import sys
sys.modules["tensordict"] = None
import numpy as np
from rlightning.buffer import tensordict_of
try:
    tensordict_of({"reward": np.zeros(1)})
except ImportError as error:
    assert "rlightning[tensordict]" in str(error), error
else:
    raise SystemExit("no error")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
