"""Rows of images that are kept compressed come back bit by bit, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.buffer.utils.container import DataContainer
from rlightning.errors import ConfigError


def images(count: int, seed: int = 0, side: int = 16) -> np.ndarray:
    """Frames with a few bright squares, as those of a simple game."""
    rng = np.random.default_rng(seed)
    frames = np.zeros((count, side, side), np.uint8)
    for frame in frames:
        x, y = rng.integers(0, side - 3, 2)
        frame[x : x + 3, y : y + 3] = rng.integers(1, 255)
    return frames


def episode(count: int, seed: int) -> dict[str, Any]:
    seen = images(count + 1, seed)
    return {
        "observation": {"camera": seen[:-1], "arm": np.arange(count, dtype=np.float32)},
        "next_observation": {"camera": seen[1:], "arm": np.arange(1, count + 1, dtype=np.float32)},
        "reward": np.arange(count, dtype=np.float32),
    }


def check_same(one: Any, other: Any) -> None:
    for name, value in one.items():
        if isinstance(value, dict):
            check_same(value, other[name])
        else:
            assert value.dtype == other[name].dtype
            np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize("removal", ["fifo", "lifo"])
def test_compressed_rows_equal_plain_ones(removal: Any) -> None:
    plain = DataContainer(40, removal=removal)
    packed = DataContainer(40, removal=removal, compression={"observation.camera": "zlib"})
    rng = np.random.default_rng(1)
    for seed in range(12):
        count = int(rng.integers(1, 15))
        for container in (plain, packed):
            container.push(episode(count, seed))
            if seed % 4 == 3:
                container.discard(container.pushed_total - count, count)
        index = rng.integers(0, len(plain), 25)  # any order, some of them twice
        check_same(plain.read(index), packed.read(index))
    check_same(plain.get_data(), packed.get_data())
    assert packed.pooled_bytes > 0


def test_frames_of_stacks_are_compressed_too() -> None:
    frames = images(33)
    stacks = np.stack([frames[i : i + 30] for i in range(4)], axis=1)
    data = {
        "observation": stacks[:-1],
        "next_observation": stacks[1:],
        "reward": np.zeros(29, np.float32),
    }
    options: dict[str, Any] = {"frame_stack": {"observation": 0}}
    plain = DataContainer(20, **options)
    packed = DataContainer(20, compression={"observation": "zlib"}, **options)
    for container in (plain, packed):
        container.push(data)
    check_same(plain.get_data(), packed.get_data())


def test_the_memory_of_simple_images_shrinks_and_is_counted() -> None:
    plain = DataContainer(500)
    packed = DataContainer(500, compression={"observation.camera": "zlib"})
    for container in (plain, packed):
        for seed in range(10):
            container.push(episode(50, seed))
    rows = packed._observations._ring[0]  # type: ignore[union-attr]
    held = sum(len(blob) + 41 for blob in rows._rows if blob is not None)
    assert rows.held_bytes == held
    assert packed.nbytes < plain.nbytes * 0.6
    for seed in range(20, 30):  # every row is written anew
        packed.push(episode(50, seed))
    assert rows.held_bytes == sum(len(blob) + 41 for blob in rows._rows if blob is not None)


def test_a_batch_may_be_written_into_another_one() -> None:
    buffer = ReplayBuffer(
        BufferConfig(
            type="ReplayBuffer",
            capacity=50,
            storage={"compression": {"observation.camera": "zlib"}},  # type: ignore[arg-type]
        )
    )
    buffer.init()
    buffer.add_episode(episode(30, 3))
    first = buffer.sample(20)
    camera = first[0]["observation"]["camera"]
    again = buffer.sample(20, out=first)
    assert np.shares_memory(again[0]["observation"]["camera"], camera)
    seen = images(31, 3)
    for frame, reward in zip(camera, again[0]["reward"], strict=True):
        np.testing.assert_array_equal(frame, seen[int(reward)])


def test_what_cannot_be_compressed_is_a_config_error() -> None:
    for path, said in (
        ("observation.lidar", "no array 'observation.lidar'"),
        ("observation.arm", "one value"),
    ):
        container = DataContainer(5, compression={path: "zlib"})
        with pytest.raises(ConfigError, match=rf"storage\.compression: .*{said}"):
            container.push(episode(2, 0))
