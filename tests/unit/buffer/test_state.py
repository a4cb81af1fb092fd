"""What a buffer holds, written to disk and read by another: all of it, and nothing else."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer, SamplerConfig, StorageConfig, episodes
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable import checkpoint
from rlightning.buffer.durable import state as module
from rlightning.buffer.durable.checkpoint import read_checkpoint, write_checkpoint
from rlightning.buffer.durable.files import CorruptError
from rlightning.buffer.durable.state import dump_sampler, dump_storage, load_sampler, load_storage
from rlightning.buffer.durable.tables import dump_table, load_table
from rlightning.buffer.utils import frozen
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.conversions import BFloat16Array
from tests.unit.buffer.scripted import ScriptedEnv, answer
from tests.unit.buffer.test_texts import SPACE, step_of


async def nothing() -> None:
    return


def through_disk(value: Any, folder: Path) -> Any:
    path = folder / "checkpoint"
    asyncio.run(write_checkpoint(path, value, notes={}, before_rename=nothing))
    return read_checkpoint(path)


def replay(**options: Any) -> ReplayBuffer:
    settings = {"type": "ReplayBuffer", "capacity": 60, "auto_truncate_episode": True, **options}
    buffer = ReplayBuffer(BufferConfig(**settings))
    buffer.init()
    return buffer


def copied(buffer: ReplayBuffer, folder: Path) -> ReplayBuffer:
    """Another buffer that begins with what is in this one."""
    other = ReplayBuffer(buffer.config)
    other.init()
    state = {
        "storage": dump_storage(buffer.storages[0]),
        "sampler": dump_sampler(buffer.sampler),
    }
    state = through_disk(state, folder)
    load_storage(other.storages[0], state["storage"])
    load_sampler(other.sampler, state["sampler"])
    return other


def ends(row: int, episode: int) -> tuple[int, bool]:
    return 3 + (episode + row) % 5, episode % 2 == 0


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert type(one) is type(other)
        if isinstance(one, str):
            assert one == other
            return
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def act(buffer: ReplayBuffer, env: ScriptedEnv, env_ret: EnvRet, steps: int) -> EnvRet:
    for _ in range(steps):
        buffer.add_transition(env.env_id, env_ret, answer(env_ret))
        env_ret = env.step()
    return env_ret


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wrapped": {"capacity": 20},
    "episodes": {"storage": StorageConfig(unit="episode"), "capacity": 40},
    "prioritised": {"sampler": SamplerConfig(type="prioritised", seed=3)},
    "lowest": {
        "sampler": SamplerConfig(type="prioritised", seed=3),
        "storage": StorageConfig(removal="priority"),
        "capacity": 30,
    },
    "newest": {"storage": StorageConfig(removal="lifo"), "capacity": 30},
    "sequences": {"sampler": SamplerConfig(type="sequence", length=3, seed=3)},
    "without replacement": {"sampler": SamplerConfig(type="batch", seed=3)},
    "compressed": {"storage": StorageConfig(compression={"observation": "zlib"}), "capacity": 30},
    "more columns": {"columns": ["ts_observed_ns", "action_age"]},
}


@pytest.mark.parametrize("variant", [*VARIANTS, "fixed", "smaller than what ends"])
def test_it_is_the_same_whether_episodes_are_stored_together(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        **VARIANTS,
        "fixed": {"storage": StorageConfig(mode="fixed"), "capacity": 200},
        "smaller than what ends": {"capacity": 8},
    }[variant]
    buffers = []
    for large in (0, 10**9):
        monkeypatch.setattr(episodes, "_LARGE_BYTES", large)
        # Episodes of 3, 4, .. steps; those of all rows end together.
        buffer, env = replay(**options), ScriptedEnv(3, lambda _, episode: (3 + episode // 3, True))
        act(buffer, env, env.reset(), 30)
        buffers.append(buffer)
    one, other = buffers
    assert one.size() > 0
    assert_equal(one.get_all(), other.get_all())
    for buffer in buffers:
        buffer.discard_episode(env.env_id)  # the open ones
        buffer.discard_episode(env.env_id)
    assert_equal(one.get_all(), other.get_all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_buffer_goes_on_as_this_one_would(variant: str, tmp_path: Path) -> None:
    buffer, env = replay(**VARIANTS[variant]), ScriptedEnv(3, ends)
    env_ret = act(buffer, env, env.reset(), 31)
    prioritised = "prioritised" in str(buffer.config.sampler)
    if prioritised:
        buffer.update_priorities(np.arange(10), np.arange(10) + 0.5)
    buffer.sample(5)
    buffer.discard_episode(env.env_id)
    env_ret = act(buffer, env, env_ret, 17)
    other = copied(buffer, tmp_path)
    assert_equal(buffer.get_all(), other.get_all())
    assert buffer.counters.to_dict() == other.counters.to_dict()
    for _ in range(3):
        for _ in range(3):
            assert_equal(buffer.sample(4), other.sample(4))
        if prioritised:
            for one in (buffer, other):
                one.update_priorities(np.arange(5), np.arange(5) * 2.0)
        for _ in range(13):
            for one in (buffer, other):
                one.add_transition(env.env_id, env_ret, answer(env_ret))
            env_ret = env.step()
        assert_equal(buffer.get_all(), other.get_all())
    for one in (buffer, other):
        one.truncate_one_episode(env.env_id)
        one.discard_episode(env.env_id)
    assert_equal(buffer.get_all(), other.get_all())


def test_nested_values_stacks_and_agents_come_back(tmp_path: Path) -> None:
    space = gym.spaces.Dict(
        {
            "camera": gym.spaces.Box(0, 255, (4, 2, 2), np.uint8),
            "arm": gym.spaces.Tuple(
                (gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(5))
            ),
        }
    )
    config = StorageConfig(frame_stack={"observation.camera": {"axis": 0}})
    buffer = replay(storage=config, capacity=25)
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(3), space, 2))
    rng = np.random.default_rng(0)

    def step(number: int) -> tuple[EnvRet, PolicyResponse]:
        frames = np.arange(number, number + 4, dtype=np.uint8)
        observation = {
            "camera": np.broadcast_to(frames[None, :, None, None], (2, 4, 2, 2)).copy(),
            "arm": (rng.random((2, 3), np.float32), rng.integers(0, 5, 2)),
        }
        flags = {"left": np.zeros(2, bool), "right": np.full(2, number % 7 == 6)}
        env_ret = EnvRet(
            "env",
            observation,
            last_reward={"left": np.ones(2), "right": np.full(2, number * 1.0)},
            last_terminated=flags,
            last_truncated={"left": np.full(2, number % 7 == 6), "right": np.zeros(2, bool)},
        )
        bits = rng.integers(0, 2**15, (2, 3)).astype(np.uint16).view(BFloat16Array)
        return env_ret, PolicyResponse(
            "env", action=rng.integers(0, 3, 2), hidden=(bits, bits[:, 0])
        )

    for number in range(40):
        buffer.add_transition("env", *step(number))
    other = copied(buffer, tmp_path)
    assert_equal(buffer.get_all(), other.get_all())
    for number in range(40, 60):
        pair = step(number)
        for one in (buffer, other):
            one.add_transition("env", *pair)
    assert_equal(buffer.get_all(), other.get_all())


def test_texts_come_back(tmp_path: Path) -> None:
    buffer = replay(capacity=30)
    buffer.open_group(EnvMeta("env", gym.spaces.Discrete(9), SPACE, 2))

    def act_on(buffers: list[ReplayBuffer], steps: range) -> None:
        for number in steps:
            ended = np.full(2, number % 9 == 8)
            env_ret, response = step_of(number, [f"lift {number}é", "wait"], terminated=ended)
            for one in buffers:
                one.add_transition("env", env_ret, response)

    act_on([buffer], range(49))
    other = copied(buffer, tmp_path)
    texts = [one.storages[0].container._texts for one in (buffer, other)]
    assert texts[0]._ids == texts[1]._ids
    for steps in (range(49, 60), range(60, 1200), range(1200, 1300)):
        assert_equal(buffer.get_all(), other.get_all())
        act_on([buffer, other], steps)
    assert_equal(buffer.get_all(), other.get_all())


def test_another_env_tells_of_the_step_before_as_the_first_did(tmp_path: Path) -> None:
    buffer = replay()
    for env_id in ("one", "two"):
        env = ScriptedEnv(2, ends, env_id)
        env_ret = env.reset()
        for _ in range(10):
            env_ret._extra = {"last_time": 10 * np.asarray(env_ret.step)}
            buffer.add_transition(env.env_id, env_ret, answer(env_ret))
            env_ret = env.step()
        folder = tmp_path / env_id
        folder.mkdir()
        buffer = copied(buffer, folder)
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["last_time"], columns["step"] * 10)
    over = columns["terminated"] | columns["truncated"]
    after = np.where(over, 0, columns["step"] + 1)  # the next episode has begun
    np.testing.assert_array_equal(columns["time"], after * 10)


def test_an_empty_buffer_comes_back_empty(tmp_path: Path) -> None:
    other = copied(replay(), tmp_path)
    assert other.size() == 0
    assert other.get_all() == {}


# What is not written, because it follows from the rest, or because the configuration has it.
_DERIVED = {
    "DataContainer": {
        *("capacity", "mode", "unit", "changes", "watcher", "_frame_stack", "_removal", "_valid"),
        *("_compression", "_has_text", "_fitting"),
    },
    "Observations": {"layout", "_capacity", "_stacks", "_deepest", "_compressed"},
    "Pool": {"_leaves"},
    "EpisodeRegistry": {"_table", "_first", "_end"},  # by way of `starts` and `lengths`
    "PrioritisedSampler": {"alpha", "beta", "scale"},
    "SequenceSampler": {"length", "_begins", "_seen"},
    "Storage": {
        *("max_bytes", "timing_raw", "_pipeline", "_postprocess_fn", "_auto_truncate", "_metas"),
        "_pooled",
    },
    "EpisodeGroup": {
        *("env_id", "_start", "_declared", "_all", "_level", "_container", "_auto_truncate"),
        *("_postprocess_fn", "_finished"),
    },
    "BufferTable": {
        *("name", "journal", "transit", "buffer", "queue", "rendezvous"),
        *("_has_functions", "_short_of_memory", "_pushed", "_shares", "_memory"),
    },
}


@pytest.mark.parametrize("kind", _DERIVED)
def test_no_attribute_is_forgotten(kind: str) -> None:
    sampler = "sequence" if kind == "SequenceSampler" else "prioritised"
    options = {"length": 2} if sampler == "sequence" else {}
    config = BufferConfig(
        type="ReplayBuffer", capacity=60, sampler=SamplerConfig(type=sampler, **options)
    )
    table = BufferTable("default", config)
    act(table.buffer, ScriptedEnv(2, ends), ScriptedEnv(2, ends).reset(), 3)  # type: ignore[arg-type]
    table.buffer.truncate_group("env")
    storage = table.buffer.storages[0]
    container = storage.container
    found: dict[str, Any] = {
        type(one).__name__: one
        for one in (
            *(table, storage, container, container._observations, container._observations._nexts),
            *(container.episode_registry, table.sampler, storage._groups["env"]),
        )
    }
    source = (
        Path(module.__file__).read_text() + Path(module.__file__).with_name("tables.py").read_text()
    )
    names = {name for name in vars(found[kind]) if name not in _DERIVED[kind]}
    forgotten = {
        name
        for name in names
        if f".{name}" not in source and f'"{name.removeprefix("_")}"' not in source
    }
    assert not forgotten, "write it in durable/state.py, or say above why it is not needed"


@pytest.mark.parametrize("file", ["data", "manifest"])
@pytest.mark.parametrize("what", ["flip", "cut", "missing"])
def test_damage_is_found(file: str, what: str, tmp_path: Path) -> None:
    table = BufferTable("default", replay().config)
    env = ScriptedEnv(2, ends)
    act(table.buffer, env, env.reset(), 30)  # type: ignore[arg-type]
    through_disk(dump_table(table), tmp_path)
    path = tmp_path / "checkpoint" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if what == "flip":
        path.write_bytes(data)
    elif what == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    table.reset()
    with pytest.raises(CorruptError, match=str(path)):
        load_table(table, read_checkpoint(tmp_path / "checkpoint"))


def test_data_that_nobody_needs_is_written_over(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    for size in (10_000, 10):  # longer and shorter than what comes
        spare.write_bytes(b"x" * size)
        inode = spare.stat().st_ino
        array = np.arange(300, dtype=np.int32)
        folder = tmp_path / f"checkpoint-{size}"
        state = {"column": frozen.Frozen(array, 200)}
        asyncio.run(write_checkpoint(folder, state, notes={}, before_rename=nothing, spare=spare))
        assert not spare.exists()
        data = (folder / checkpoint.DATA).stat()
        assert (data.st_ino, data.st_size) == (inode, 800)
        read = np.zeros(200, np.int32)
        read_checkpoint(folder)["column"].read_into(read)
        np.testing.assert_array_equal(read, array[:200])


async def test_rows_that_change_while_they_are_written_are_written_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 64)
    array = np.arange(100, dtype=np.int64)
    real, loop = checkpoint.write_at, asyncio.get_running_loop()
    changed = threading.Event()

    def change() -> None:
        frozen.before_write([array], slice(0, 30))
        array[:30] = -1
        changed.set()

    def write(fd: int, parts: Any, offset: int) -> None:
        if offset == 128 and not changed.is_set():
            loop.call_soon_threadsafe(change)
            assert changed.wait(30)
        real(fd, parts, offset)

    monkeypatch.setattr(checkpoint, "write_at", write)
    state = {"column": frozen.Frozen(array, 100)}
    await write_checkpoint(tmp_path / "one", state, notes={}, before_rename=nothing)
    assert changed.is_set()
    read = np.zeros(100, np.int64)
    read_checkpoint(tmp_path / "one")["column"].read_into(read)
    np.testing.assert_array_equal(read, np.arange(100))


@pytest.mark.parametrize("step", ["_set_size", "_write_chunks", "sync", "_finish", "_publish"])
async def test_a_cancelled_checkpoint_is_over_once_no_thread_is_at_it(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SYNC_BYTES", 8)
    real, begun, go_on = getattr(checkpoint, step), threading.Event(), threading.Event()
    failed: list[Exception] = []

    def slow(*args: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        try:
            return real(*args)
        except Exception as error:  # the file was closed, or the folder removed
            failed.append(error)
            raise

    monkeypatch.setattr(checkpoint, step, slow)
    state = {"column": frozen.Frozen(np.arange(100), 100)}
    writing = asyncio.create_task(
        write_checkpoint(tmp_path / "one", state, notes={}, before_rename=nothing)
    )
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(2):
        writing.cancel()
        await asyncio.sleep(0.01)
    early = writing.done()
    go_on.set()
    await asyncio.wait({writing})
    assert writing.cancelled()
    assert not early
    assert not failed
    assert [path.name for path in tmp_path.iterdir()] == ["one"] * (step == "_publish")
    assert not frozen._frozen


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(what: Any, *others: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what
            done.append(f"{name} {Path(path).name}")
            return real(what, *others)

        monkeypatch.setattr(module, name, noted)

    watch(checkpoint, "sync")
    watch(checkpoint, "sync_folder")
    watch(checkpoint.os, "replace")
    copied(replay(), tmp_path)
    named = next(i for i, step in enumerate(done) if step.startswith("replace"))
    temporary = done[named].removeprefix("replace ")
    assert {
        f"sync {checkpoint.DATA}",
        f"sync {checkpoint._MANIFEST}",
        f"sync_folder {temporary}",
    } <= set(done[:named])
    assert f"sync_folder {tmp_path.name}" in done[named:]
