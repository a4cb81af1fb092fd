"""What a buffer counts as its memory is what it takes, and has a bound."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer, RolloutBuffer
from rlightning.buffer.pipeline import Item
from rlightning.errors import ConfigError, InvalidRowError, StorageFullError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils import memory
from tests.unit.buffer.scripted import ScriptedEnv, answer


def rollouts(max_bytes: int) -> RolloutBuffer:
    buffer = RolloutBuffer(
        BufferConfig(type="RolloutBuffer", capacity=1, rollout_length=4, max_bytes=max_bytes)
    )
    buffer.init()
    return buffer


def fill(buffer: DataBuffer, env: ScriptedEnv, steps: int, **fields: object) -> None:
    env_ret = env.reset()
    for _ in range(steps):
        for name, value in fields.items():
            setattr(env_ret, name, value)
        buffer.commit(buffer.prepare(env.env_id, [Item(env_ret, answer(env_ret))]))
        env_ret = env.step()


@pytest.mark.parametrize("executes", [False, True])
def test_the_counted_memory_is_that_of_the_columns(executes: bool) -> None:
    env = ScriptedEnv(3)
    buffer = rollouts(2**20)
    buffer.open_group(env.meta)
    fields = {"executed_action": answer(env.reset()).action} if executes else {}
    fill(buffer, env, 3, **fields)
    (group,) = buffer.rollouts.groups.values()
    arrays = [array for column in group.columns.values() for array in column.arrays]
    states = (group.positions, group._all, group._state, group._tail, group._episode, group._step)
    assert group.nbytes == sum(array.nbytes for array in (*arrays, *states))


def test_rollouts_that_are_held_count_although_their_env_is_gone() -> None:
    first, second = ScriptedEnv(40, env_id="first"), ScriptedEnv(40, env_id="second")
    buffer = rollouts(64 * 2**10)
    buffer.open_group(first.meta)
    fill(buffer, first, 5)
    rollout = buffer.rollouts.take()
    assert rollout is not None
    buffer.close_group("first")
    buffer.open_group(second.meta)
    with pytest.raises(StorageFullError, match=r"'second': 12 steps of 40 rows.*max_bytes allows"):
        fill(buffer, second, 1)
    buffer.rollouts.release(rollout)
    fill(buffer, second, 1)


def test_an_open_episode_grows_within_the_memory() -> None:
    env = ScriptedEnv(10)
    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=300, max_bytes=200 * 2**10))
    buffer.init()
    buffer.open_group(env.meta)
    with pytest.raises(StorageFullError, match=r"256 steps of 10 rows.*buffer\.capacity"):
        fill(buffer, env, 300)
    assert 64 <= buffer.storages[0]._groups["env"].highest <= 128
    buffer.truncate_group("env")
    assert buffer.size() == 300


def test_a_storage_larger_than_the_memory_is_refused_before_it_is_allocated() -> None:
    env = ScriptedEnv(2)
    buffer = ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=10_000, max_bytes=2**19))
    buffer.init()
    buffer.open_group(env.meta)
    with pytest.raises(StorageFullError, match=r"of the storage; buffer\.max_bytes allows 524288"):
        fill(buffer, env, 1)


def test_a_capacity_that_no_memory_is_enough_for_is_a_config_error() -> None:
    config = BufferConfig(type="RolloutBuffer", capacity=5 * 10**9, max_bytes=2**33)
    with pytest.raises(ConfigError, match=r"buffer\.capacity.*20000000000 bytes.*max_bytes"):
        RolloutBuffer(config)


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "container_limit", lambda: None)
    machine = memory.memory_limit()
    for nbytes, least in ((2**20, 2**20), (2**61, machine)):
        limit = memory.MemoryLimit(nbytes, tmp_path)
        monkeypatch.setattr(memory, "container_limit", lambda limit=limit: limit)
        assert memory.memory_limit() == least


def test_rows_that_nobody_declared_are_counted_and_bounded() -> None:
    """An array of no elements says in a few bytes that it has any number of rows."""
    buffer = rollouts(2**30)
    buffer.open_group(EnvMeta("env"))
    nothing = np.zeros((2**28, 0), np.float32)
    item = Item(EnvRet("env", nothing, nothing), PolicyResponse("env", action=nothing))
    tracemalloc.start()
    with pytest.raises(InvalidRowError, match=r"at most 1048576 rows, got 268435456"):
        buffer.prepare("env", [item])
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
