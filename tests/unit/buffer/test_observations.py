"""Each observation is stored once, and each frame of a stack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.buffer.utils.container import DataContainer
from rlightning.errors import ConfigError, StorageFullError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.conversions import BFloat16Array


def stacks(frames: np.ndarray, depth: int = 4, axis: int = 0) -> np.ndarray:
    """Returns what a frame stack shows of frames [n, ...]: the first one fills it."""
    index = np.maximum(np.arange(len(frames))[:, np.newaxis] + np.arange(1 - depth, 1), 0)
    return np.moveaxis(frames[index], 1, axis + 1)


def episode(seen: Any) -> dict[str, Any]:
    return {"observation": seen[:-1], "next_observation": seen[1:]}


def held(container: DataContainer) -> tuple[np.ndarray, np.ndarray]:
    data = container.get_data()
    return data["observation"], data["next_observation"]


def pair_bytes(container: DataContainer) -> int:
    assert container._observations is not None
    return container._observations.nbytes


def test_a_neighbour_is_not_stored_again() -> None:
    rng = np.random.default_rng(0)
    container = DataContainer(1000)
    for _ in range(10):
        seen = rng.normal(size=(101, 50))
        container.push(episode(seen))
        np.testing.assert_array_equal(container.read(-1)["next_observation"], seen[-1])
    assert pair_bytes(container) < 1.1 * 1000 * 50 * 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_bits_come_back_as_they_were(dtype: Any) -> None:
    seen = np.zeros((6, 3), dtype)
    if dtype is not np.uint8:
        seen[1], seen[2], seen[3] = np.nan, -0.0, 0.0
    container = DataContainer(10)
    container.push({"observation": seen[:-1], "next_observation": np.abs(seen[1:])})
    observation, following = held(container)
    assert observation.tobytes() == seen[:-1].tobytes()
    assert following.tobytes() == np.abs(seen[1:]).tobytes()


def test_bfloat16_and_empty_arrays_are_compared_too() -> None:
    bits = np.arange(8, dtype=np.uint16).reshape(4, 2).view(BFloat16Array)
    seen = {"a": bits, "b": np.zeros((4, 0))}
    container = DataContainer(10)
    container.push(
        {
            "observation": {name: value[:-1] for name, value in seen.items()},
            "next_observation": {name: value[1:] for name, value in seen.items()},
        }
    )
    data = container.get_data()["next_observation"]
    assert isinstance(data["a"], BFloat16Array)
    assert data["a"].tolist() == bits[1:].tolist()
    assert data["b"].shape == (3, 0)


@pytest.mark.parametrize("width", [1, 700, 1002, 1004, 1008])
def test_rows_of_any_size_are_compared(width: int) -> None:
    rng = np.random.default_rng(5)
    container = DataContainer(100)
    seen = rng.integers(0, 255, (41, width), np.uint8)
    after = seen[1:].copy()
    after[[3, 17], -1] += 1
    container.push({"observation": seen[:-1], "next_observation": after})
    observation, following = held(container)
    np.testing.assert_array_equal(observation, seen[:-1])
    np.testing.assert_array_equal(following, after)
    assert container._observations is not None
    assert (container._observations._next[:40] >= 0).sum() == 3  # those two, and the last one


@pytest.mark.parametrize("unit", ["transition", "episode"])
@pytest.mark.parametrize("axis", [0, 2])
def test_stacks_are_rebuilt_after_any_wrap(unit: Any, axis: int) -> None:
    rng = np.random.default_rng(1)
    container = DataContainer(37, unit=unit, frame_stack={"observation": axis - 3})
    written: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(40):
        length = int(rng.integers(1, 15))
        seen = stacks(rng.integers(0, 255, (length + 1, 3, 2), np.uint8), axis=axis)
        if rng.random() < 0.3:
            seen[int(rng.integers(0, length + 1))] = 7  # its older frames are not those before it
        container.push(episode(seen))
        written.append((seen[:-1], seen[1:]))
        if unit == "transition":
            rows = [
                np.concatenate(parts)[-container.size :] for parts in zip(*written, strict=True)
            ]
            order = np.argsort(container.generation[: container.size])
            for mine, expected in zip(held(container), rows, strict=True):
                np.testing.assert_array_equal(mine[order], expected)
        else:
            kept = written[-len(container) :]
            for i, (observation, following) in enumerate(kept):
                read = container.read(i)
                np.testing.assert_array_equal(read["observation"], observation)
                np.testing.assert_array_equal(read["next_observation"], following)


@pytest.mark.parametrize("removal", ["lifo", "priority"])
def test_stacks_are_rebuilt_when_others_are_removed(removal: Any) -> None:
    class Lowest:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(2)

        def wrote(self, slots: Any) -> None: ...

        def released(self, slots: Any) -> None: ...

        def lowest(self, count: int) -> Any:
            return np.sort(self.rng.choice(20, count, replace=False))

    rng = np.random.default_rng(3)
    container = DataContainer(20, frame_stack={"observation": 0}, removal=removal)
    container.watcher = Lowest()
    written = {}
    for _ in range(30):
        length = int(rng.integers(1, 9))
        seen = stacks(rng.integers(0, 255, (length + 1, 2), np.uint8))
        first = container.pushed_total
        container.push(episode(seen))
        written |= {first + t: (seen[t], seen[t + 1]) for t in range(length)}
        for mine, which in zip(held(container), (0, 1), strict=True):
            numbers = container.generation_of(np.arange(container.size))
            np.testing.assert_array_equal(mine, [written[n][which] for n in numbers])


def test_some_arrays_of_a_dict_are_stacks() -> None:
    rng = np.random.default_rng(4)
    camera = stacks(rng.integers(0, 255, (30, 4, 4), np.uint8), depth=3)
    wrist = stacks(rng.integers(0, 255, (30, 2), np.uint8), depth=2, axis=1)
    state = rng.normal(size=(30, 5)).astype(np.float32)
    buffer = ReplayBuffer(
        BufferConfig(
            type="ReplayBuffer",
            capacity=16,
            storage={
                "frame_stack": {"observation.camera": {"axis": 0}, "observation.wrist": {"axis": 1}}
            },
        )
    )
    buffer.init()
    for start, stop in ((0, 9), (9, 13), (13, 30)):
        for t in range(start, stop):
            observation = {"camera": camera[t], "wrist": wrist[t], "state": state[t]}
            buffer.add_transition(
                "env", EnvRet("env", observation), PolicyResponse("env", action=t), t == stop - 1
            )
    columns = buffer.get_all()
    order = np.argsort(columns["action"])
    assert columns["action"][order].tolist() == list(range(13, 29))
    for name, whole in (("camera", camera), ("wrist", wrist), ("state", state)):
        np.testing.assert_array_equal(columns["observation"][name][order], whole[13:29])
        np.testing.assert_array_equal(columns["next_observation"][name][order], whole[14:30])


@pytest.mark.parametrize(
    ("frame_stack", "message"),
    [
        ({"camera": 0}, "no array 'camera'; there are observation"),
        ({"observation": 3}, r"shape \[4, 2\] has no axis 3"),
    ],
)
def test_a_frame_stack_that_is_not_there(frame_stack: Any, message: str) -> None:
    container = DataContainer(9, frame_stack=frame_stack)
    with pytest.raises(ConfigError, match=message):
        container.push(episode(np.zeros((3, 4, 2))))


def test_memory_of_image_stacks() -> None:
    """84x84x4 stacks at 3,000 of 100,000 steps: the share does not depend on how many there are."""
    steps, length = 3000, 300
    rng = np.random.default_rng(5)
    buffer = ReplayBuffer(
        BufferConfig(
            type="ReplayBuffer",
            capacity=steps,
            auto_truncate_episode=True,
            storage={"frame_stack": {"observation": {"axis": -1}}},
        )
    )
    buffer.init()
    for _ in range(steps // length):
        seen = stacks(rng.integers(0, 255, (length + 1, 84, 84), np.uint8), axis=2)
        for t, observation in enumerate(seen):
            env_ret = EnvRet("env", observation, float(t), t == length)
            buffer.add_transition("env", env_ret, PolicyResponse("env", action=t))
        np.testing.assert_array_equal(buffer.get(-1)["next_observation"], seen[-1])
        np.testing.assert_array_equal(buffer.get(-5)["observation"], seen[-6])
    assert buffer.size() == steps
    naive = steps * 2 * 84 * 84 * 4
    assert buffer.storages[0].container.nbytes < 0.15 * naive


def test_the_stated_memory_bounds_a_frame_stack_by_its_frames() -> None:
    """A buffer that could not hold its stacks whole is not refused."""
    config = BufferConfig(
        type="ReplayBuffer",
        capacity=1000,
        max_bytes=3 * 2**20,
        storage={"frame_stack": {"observation": {"axis": 0}}},
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    seen = stacks(np.random.default_rng(6).integers(0, 255, (40, 32, 32), np.uint8))
    for t, observation in enumerate(seen):
        buffer.add_transition(
            "env", EnvRet("env", observation), PolicyResponse("env", action=t), t == 39
        )
    assert buffer.storages[0].container.nbytes < 2 * 2**20 < 1000 * 2 * 4 * 32 * 32


def test_what_is_stored_whole_stays_within_the_stated_memory() -> None:
    config = BufferConfig(
        type="ReplayBuffer", capacity=1000, max_bytes=11 * 2**17, auto_truncate_episode=True
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    rng = np.random.default_rng(7)

    def add(length: int, times: int = 1) -> None:
        for t in times * [*range(length + 1)]:
            env_ret = EnvRet("env", rng.normal(size=128), 0.0, t == length)
            buffer.add_transition("env", env_ret, PolicyResponse("env", action=t))

    add(60, times=20)
    with pytest.raises(StorageFullError, match=r"of the storage; buffer\.max_bytes allows"):
        add(1, times=1000)
    assert buffer.storages[0].container.nbytes < 1.3 * config.max_bytes  # type: ignore[operator]
    buffer.clear()
    add(60)
    assert buffer.size() == 60
