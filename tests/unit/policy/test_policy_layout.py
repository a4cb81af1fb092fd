"""Which arrays a policy gets, and how rows of several groups become one batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import InvalidRequestError
from rlightning.policy.batch_memory import BatchMemory
from rlightning.policy.layout import InputLayout
from rlightning.types import EnvRet

CPU = torch.device("cpu")
VECTOR = gym.spaces.Box(-1, 1, (4,), np.float32)
ROBOT = gym.spaces.Dict(
    {
        "camera": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "joints": gym.spaces.Tuple((VECTOR, gym.spaces.Discrete(3))),
        "task": gym.spaces.Text(20),
    }
)


def robot(rows: int, *, fill: int = 0) -> dict[str, Any]:
    return {
        "task": ("pick",) * rows,
        "camera": np.full((rows, 2, 2, 3), fill, np.uint8),
        "joints": (np.full((rows, 4), fill, np.float32), np.arange(rows)),
    }


def vector(rows: int) -> np.ndarray:
    return np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)


def test_a_vector_is_one_leaf_with_reward_and_flags_behind() -> None:
    layout = InputLayout(VECTOR)
    observation = vector(2)
    values, rows = layout.flatten(EnvRet("a", observation, np.ones(2), last_truncated=True))
    assert rows == 2
    assert values[0] is observation
    assert [v.dtype for v in values[1:]] == [np.float32, bool, bool]
    assert values[1].tolist() == [1, 1]
    assert values[3].tolist() == [True, True]


def test_a_nesting_comes_out_as_it_went_in() -> None:
    layout = InputLayout(ROBOT)
    assert [leaf.name for leaf in layout.leaves[:4]] == [
        "observation.camera",
        "observation.joints[0]",
        "observation.joints[1]",
        "observation.task",
    ]
    values, rows = layout.flatten(EnvRet("a", robot(3)))
    assert rows == 3
    observation, *_ = layout.build(values)
    assert list(observation) == ["camera", "joints", "task"]
    assert isinstance(observation["joints"], tuple)
    assert observation["task"] == ("pick",) * 3


def test_one_row_without_a_leading_dimension_is_given_one() -> None:
    layout = InputLayout(VECTOR)
    values, rows = layout.flatten(EnvRet("a", np.zeros(4, np.float32), 2.0, True))
    assert rows is None
    assert values[0].shape == (1, 4)
    assert (values[1].tolist(), values[2].tolist()) == ([2], [True])
    single = {"task": "pick", "camera": np.zeros((2, 2, 3), np.uint8)}
    single |= {"joints": (np.zeros(4, np.float32), np.int64(2))}
    values, rows = InputLayout(ROBOT).flatten(EnvRet("a", single))
    assert rows is None
    assert values[2].tolist() == [2]
    assert values[3] == ["pick"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"camera": np.zeros((2, 2, 2, 3), np.float32)},
            r"observation.camera: expected uint8\[2, 2, 2, 3\], got float32\[2, 2, 2, 3\]",
        ),
        (
            {"camera": np.zeros((2, 9, 2, 3), np.uint8)},
            r"observation.camera: expected uint8\[2, 2, 2, 3\], got uint8\[2, 9",
        ),
        (
            {"joints": (np.zeros((3, 4), np.float32), np.arange(2))},
            r"observation.joints\[0\]: expected float32\[2, 4\], got float32\[3, 4\]",
        ),
        (
            {"joints": np.zeros((2, 4), np.float32)},
            r"observation.joints: expected 2 parts, got float32\[2, 4\]",
        ),
        ({"task": ("pick",)}, "observation.task: expected a list of 2 values, got tuple of 1"),
        ({"task": None}, "observation.task: expected a list of 2 values, got NoneType"),
        ({"tasks": ()}, "observation: 'tasks' is not in the space"),
    ],
)
def test_what_is_not_in_the_space_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        InputLayout(ROBOT).flatten(EnvRet("a", robot(2) | change))


@pytest.mark.parametrize(
    ("env_ret", "message"),
    [
        (
            EnvRet("a", np.zeros(5, np.float32)),
            r"with or without a leading dimension of rows, got float32\[5\]",
        ),
        (EnvRet("a", {"x": 1}), "observation: expected float32"),
        (EnvRet("a", vector(0)), "observation: no rows"),
        (
            EnvRet("a", vector(2), np.ones(3)),
            r"last_reward: expected float32\[2\], got float32\[3\]",
        ),
        (EnvRet("a", [[1.0], [1.0, 2.0]]), "observation: expected an array, got list of 2"),
        (EnvRet("a", vector(2), "lots"), r"last_reward: expected float32\[2\], got str"),
        (EnvRet("a", vector(2), {"x": 1}), r"last_reward: expected float32\[2\], got a dict"),
        (EnvRet("a", vector(2), [1, [2]]), r"last_reward: expected float32\[2\], got list of 2"),
    ],
)
def test_a_wrong_vector_or_reward_is_named(env_ret: EnvRet, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        InputLayout(VECTOR).flatten(env_ret)


def test_a_missing_key_and_a_wrong_container_are_named() -> None:
    layout = InputLayout(ROBOT)
    observation = robot(1)
    del observation["camera"]
    with pytest.raises(InvalidRequestError, match="observation: 'camera' is missing"):
        layout.flatten(EnvRet("a", observation))
    with pytest.raises(InvalidRequestError, match="observation: expected a dict, got float32"):
        layout.flatten(EnvRet("a", vector(1)))
    with pytest.raises(InvalidRequestError, match="holds no value"):
        InputLayout(gym.spaces.Dict({}))


def test_a_multi_agent_env_has_rewards_and_flags_by_agent() -> None:
    layout = InputLayout(OrderedDict(left=VECTOR, right=VECTOR))
    observation = {"left": vector(2), "right": vector(2)}
    rewards = {"left": np.ones(2), "right": np.zeros(2)}
    values, rows = layout.flatten(
        EnvRet("a", observation, rewards, {"left": np.array([True, False])})
    )
    assert rows == 2
    _, reward, terminated, truncated = layout.build(values)
    assert reward["left"].tolist() == [1, 1]
    assert terminated["left"].tolist() == [True, False]
    assert terminated["right"].tolist() == truncated["left"].tolist() == [False, False]


def test_rows_of_several_groups_lie_one_below_the_other() -> None:
    layout = InputLayout(ROBOT)
    memory = BatchMemory(layout.leaves, CPU)
    parts = [layout.flatten(EnvRet(str(n), robot(n, fill=n)))[0] for n in (1, 3, 2)]
    observation, reward, *_ = layout.build(memory.gather(parts, 6).take())
    assert observation["camera"].shape == (6, 2, 2, 3)
    assert observation["camera"].dtype == torch.uint8
    assert observation["joints"][0][:, 0].tolist() == [1, 3, 3, 3, 2, 2]
    assert observation["joints"][1].tolist() == [0, 0, 1, 2, 0, 1]
    assert observation["task"] == ["pick"] * 6
    assert reward.tolist() == [0.0] * 6


def test_views_of_a_message_are_copied_into_aligned_memory() -> None:
    layout = InputLayout(VECTOR)
    memory = BatchMemory(layout.leaves, CPU)
    raw = b"\0" + vector(2).tobytes()
    unaligned = np.frombuffer(raw, np.float32, 8, offset=1).reshape(2, 4)
    batch = memory.gather([layout.flatten(EnvRet("a", unaligned))[0]], 2).take()
    assert batch[0].data_ptr() % 16 == 0
    assert batch[0].tolist() == vector(2).tolist()
    again = memory.gather([layout.flatten(EnvRet("a", vector(2)))[0]], 2).take()
    assert again[0].data_ptr() == batch[0].data_ptr()


def test_the_memory_grows_and_keeps_a_bounded_number_of_views() -> None:
    layout = InputLayout(VECTOR)
    memory = BatchMemory(layout.leaves, CPU)
    for rows in range(1, 600):
        batch = memory.gather([layout.flatten(EnvRet("a", vector(rows)))[0]], rows).take()
        assert batch[0].shape == (rows, 4)
        assert batch[0][-1, -1] == 4 * rows - 1
    assert len(next(memory._slots).views) <= 256


def test_tensors_of_an_env_on_the_device_are_not_copied() -> None:
    layout = InputLayout(VECTOR)
    memory = BatchMemory(layout.leaves, CPU)
    tensor = torch.ones(2, 4)
    values, rows = layout.flatten(EnvRet("a", tensor, torch.ones(2)))
    assert rows == 2
    assert memory.gather([values], 2).take()[0] is tensor
    assert memory.gather([values, values], 4).take()[0].shape == (4, 4)
    with pytest.raises(InvalidRequestError, match=r"got float64\[2, 4\]"):
        layout.flatten(EnvRet("a", tensor.double()))


def test_tensors_of_an_env_that_is_differentiated_are_data() -> None:
    layout = InputLayout(VECTOR)
    values, _ = layout.flatten(EnvRet("a", torch.ones(2, 4, requires_grad=True)))
    memory = BatchMemory(layout.leaves, CPU)
    for groups in (1, 2):
        batch = memory.gather([values] * groups, 2 * groups).take()
        assert batch[0].tolist() == [[1.0] * 4] * 2 * groups
        assert not batch[0].requires_grad


def test_a_device_that_is_neither_cpu_nor_cuda_gets_copies() -> None:
    layout = InputLayout(VECTOR)
    memory = BatchMemory(layout.leaves, torch.device("meta"))
    for observation in (vector(2), torch.ones(2, 4)):
        values, _ = layout.flatten(EnvRet("a", observation))
        for groups in (1, 2):
            batch = memory.gather([values] * groups, 2 * groups).take()
            assert {leaf.device.type for leaf in batch} == {"meta"}
            assert batch[0].shape == (2 * groups, 4)
