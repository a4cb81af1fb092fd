"""A buffer server that comes back has what it acked, and says what it cannot load."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.buffer.durable import files
from rlightning.buffer.durable.files import CorruptError
from rlightning.errors import (
    ConfigError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.rpc.health import ServingStatus, check
from rlightning.testing import assert_eventually
from rlightning.testing.ports import free_address
from rlightning.utils.config import BufferConfig, RpcConfig, SamplerConfig
from tests.integration.buffer.harness import (
    FAST,
    Buffers,
    act,
    asking,
    buffer_server,
    inserting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

BRIEF = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=0.3)


def ends(row: int, episode: int) -> tuple[int, bool]:
    return 4 + (episode + row) % 3, True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@asynccontextmanager
async def durable(folder: Path, **options: Any) -> AsyncIterator[Buffers]:
    settings = {
        "type": "ReplayBuffer",
        "auto_truncate_episode": True,
        "durability": "process",
        "data_dir": str(folder),
        "restore": "latest",
        **options,
    }
    async with buffer_server(**settings) as buffers:
        yield buffers


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_server_has_what_it_had(folder: Path, durability: Any) -> None:
    async with durable(folder, durability=durability) as buffers:
        async with inserting(buffers.address, ScriptedEnv(2, ends).meta) as writer:
            await act(writer, ScriptedEnv(2, ends), 30)
            await writer.flush(10)
        async with asking(buffers.address) as asked:
            before, status = await asked.get(), await asked.describe()
    async with durable(folder, durability=durability) as buffers:
        async with asking(buffers.address) as asked:
            after = await asked.get()
            now = await asked.describe()
        assert check_transitions(after) == 60
        for name, column in before.items():
            np.testing.assert_array_equal(column, after[name])
        assert now.storage_id == status.storage_id
        assert now.tables["default"].inserted_total == status.tables["default"].inserted_total


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_writer_goes_on_with_its_open_episode(folder: Path, checkpoint: bool) -> None:
    env, address = ScriptedEnv(2), free_address()
    async with inserting_later(address, env) as started:
        async with durable(folder, listen=address) as buffers:
            writer = await started()
            env_ret = env.reset()
            for _ in range(5):
                await writer.insert(env_ret, answer(env_ret))
                env_ret = env.step()
            await writer.flush(10)
            if checkpoint:
                async with asking(buffers.address) as asked:
                    await asked.checkpoint()
        async with durable(folder, listen=address) as buffers:
            for _ in range(5):
                await writer.insert(env_ret, answer(env_ret))
                env_ret = env.step()
            await writer.insert(env_ret, None)
            await writer.flush(20)
            assert (writer.rebased, buffers.table.buffer.counters.segments) == (0, 0)
            async with asking(buffers.address) as asked:
                assert await asked.truncate([env.env_id]) == 2
                columns = await asked.get()
            assert check_transitions(columns) == 20
            assert columns["step"].tolist() == [*range(10), *range(10)]


@asynccontextmanager
async def inserting_later(address: str, env: ScriptedEnv, **options: Any) -> AsyncIterator[Any]:
    """A writer that connects once its server is there, and outlives it."""
    from rlightning.buffer.remote_buffer import InsertClient

    client = InsertClient(address, spec=env.meta, rpc=FAST, **options)

    async def start() -> InsertClient:
        await client.start()
        return client

    try:
        yield start
    finally:
        await client.close()


async def test_an_episode_whose_writer_stays_away_is_closed(folder: Path) -> None:
    env, address = ScriptedEnv(2), free_address()
    async with inserting_later(address, env) as started:
        async with durable(folder, listen=address):
            writer = await started()
            await act(writer, env, 5)
            await writer.flush(10)
    async with durable(folder, rpc=BRIEF) as buffers:
        assert buffers.table.buffer.size() == 0
        await assert_eventually(lambda: buffers.table.buffer.size() == 10, 30)
        assert buffers.table.buffer.get_all()["cut"].sum() == 2
        assert not buffers.table.producers
    async with durable(folder) as buffers:
        assert buffers.table.buffer.size() == 10


async def test_samplers_and_priorities_come_back(folder: Path) -> None:
    options: dict[str, Any] = {"sampler": SamplerConfig(type="prioritised", seed=1)}
    async with durable(folder, **options) as buffers:
        async with inserting(buffers.address, ScriptedEnv(2, ends).meta) as writer:
            await act(writer, ScriptedEnv(2, ends), 40)
            await writer.flush(10)
        async with sampling(buffers.address, batch_size=8, prefetch=1) as learner:
            for _ in range(3):
                batch = await learner.next_batch(10)
        async with asking(buffers.address) as asked:
            await asked.checkpoint()
            columns = batch.columns
            await asked.update_priorities(
                columns["sample_index"], np.arange(8) + 0.5, columns["sample_generation"]
            )
        state = buffers.table.sampled_total
        priorities = buffers.table.sampler._tree.values.copy()
    async with durable(folder, **options) as buffers:
        assert buffers.table.sampled_total == state
        assert np.array_equal(buffers.table.sampler._tree.values, priorities)


async def test_batches_after_a_restore_are_those_of_the_run_that_was_not_interrupted(
    folder: Path,
) -> None:
    async with durable(folder, durability="none", restore="none") as buffers:
        async with inserting(buffers.address, ScriptedEnv(2, ends).meta) as writer:
            await act(writer, ScriptedEnv(2, ends), 40)
            await writer.flush(10)
        buffers.table.take(8)
        async with asking(buffers.address) as asked:
            made = await asked.checkpoint()
        expected = [buffers.table.take(8).columns() for _ in range(100)]
    assert made.name == "checkpoint-00000001"
    assert made.nbytes == sum(p.stat().st_size for p in (folder / "checkpoints").rglob("*")) - sum(
        p.stat().st_size
        for p in (folder / "checkpoints").rglob("*")
        if p.is_dir() or p.name == "position"
    )
    for restore in ("latest", made.name):
        async with durable(folder, durability="none", restore=restore) as buffers:
            for batch in expected:
                again = buffers.table.take(8).columns()
                for name, column in batch.items():
                    np.testing.assert_array_equal(column, again[name])


async def test_a_named_checkpoint_is_what_was_and_nothing_after_it(folder: Path) -> None:
    async with durable(folder) as buffers:
        first = buffers.service._store.storage_id
        async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
            async with asking(buffers.address) as asked:
                await act(writer, ScriptedEnv(1, ends), 20)
                await writer.flush(10)
                name = (await asked.checkpoint()).name
                await act(writer, ScriptedEnv(1, ends), 20)
                await writer.flush(10)
    async with durable(folder, restore=name) as buffers:
        size = buffers.table.buffer.size()
        assert 15 < size <= 20
        # What was acked after it is gone, so that writers must not take it for being here.
        second = buffers.service._store.storage_id
        assert second != first
        async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
            await act(writer, ScriptedEnv(1, ends), 8)
            await writer.flush(10)
        now = buffers.table.buffer.size()
        assert now > size
    async with durable(folder) as buffers:
        assert buffers.table.buffer.size() == now
        assert buffers.service._store.storage_id == second


async def test_nothing_is_loaded_that_the_config_does_not_name(folder: Path) -> None:
    async with durable(folder, restore="none") as buffers:
        async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
            await act(writer, ScriptedEnv(1, ends), 20)
            await writer.flush(10)
        async with asking(buffers.address) as asked:
            await asked.checkpoint()
    with pytest.raises(ConfigError, match=r"buffer.restore: .* holds data already; 'latest'"):
        async with durable(folder, restore="none"):
            pass
    async with durable(folder, durability="none", restore="none") as buffers:
        assert buffers.table.buffer.size() == 0
    with pytest.raises(
        ConfigError, match="buffer.restore: no checkpoint 'x' .* checkpoint-00000001"
    ):
        async with durable(folder, restore="x"):
            pass


@pytest.mark.parametrize("saved", ["journal", "checkpoint"])
@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"capacity": 20_000}, "buffer.capacity: 20000, but .* was written with 10000"),
        ({"storage": {"unit": "episode"}}, "buffer.storage.unit: 'episode'"),
        ({"sampler": SamplerConfig(type="batch")}, "buffer.sampler.type: 'batch'"),
        ({"columns": ["action_age"]}, "buffer.columns: "),
    ],
)
async def test_another_config_is_refused_by_key(
    folder: Path, saved: str, options: dict[str, Any], key: str
) -> None:
    async with durable(folder) as buffers:
        if saved == "checkpoint":
            async with asking(buffers.address) as asked:
                await asked.checkpoint()
    with pytest.raises(ConfigError, match=key):
        async with durable(folder, **options):
            pass


async def test_a_damaged_newest_checkpoint_falls_back(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with durable(folder, checkpoint_keep=2) as buffers:
        async with asking(buffers.address) as asked:
            async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
                for _ in range(4):
                    await act(writer, ScriptedEnv(1, ends), 10)
                    await writer.flush(10)
                    await asked.checkpoint()
            before = await asked.get()
    kept = sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))
    assert kept == ["checkpoint-00000003", "checkpoint-00000004"]
    manifest = folder / "checkpoints" / kept[1] / "manifest"
    manifest.write_bytes(manifest.read_bytes()[:-5] + b"wrong")
    async with durable(folder) as buffers:
        np.testing.assert_array_equal(buffers.table.buffer.get_all()["step"], before["step"])
    assert "checkpoint-00000004 is damaged, the one before is taken" in caplog.text


async def test_a_damaged_journal_is_refused_and_a_checkpoint_still_opens(folder: Path) -> None:
    async with durable(folder) as buffers:
        async with asking(buffers.address) as asked:
            async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
                await act(writer, ScriptedEnv(1, ends), 10)
                await writer.flush(10)
                name = (await asked.checkpoint()).name
                await act(writer, ScriptedEnv(1, ends), 20)
                await writer.flush(10)
    (segment,) = (folder / "journal").glob("*.journal")
    data = bytearray(segment.read_bytes())
    end = len(data.rstrip(b"\0"))
    data[end - 2000] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"{segment.name}: offset \d+: a record is damaged"):
        async with durable(folder):
            pass
    async with durable(folder, restore=name) as buffers:
        assert buffers.table.buffer.size() > 0
    async with durable(folder):
        pass


async def test_a_newer_format_is_refused_by_name(folder: Path) -> None:
    async with durable(folder):
        pass
    (folder / "FORMAT").write_text("rlightning buffer, format 3\n")
    with pytest.raises(ConfigError, match=rf"{folder} has format 3, which is newer than 2"):
        async with durable(folder):
            pass


async def test_a_format_that_is_no_text_is_refused_by_name(folder: Path) -> None:
    async with durable(folder):
        pass
    (folder / "FORMAT").write_bytes(b"rlightning buffer\xf2, format 1\n")
    with pytest.raises(ConfigError, match=rf"{folder}/FORMAT is not of a buffer"):
        async with durable(folder):
            pass


async def test_a_folder_is_for_one_server(folder: Path) -> None:
    async with durable(folder):
        with pytest.raises(ConfigError, match=rf"{folder} is used by another process"):
            async with durable(folder):
                pass


async def test_checkpoints_need_a_folder() -> None:
    async with buffer_server(type="ReplayBuffer") as buffers, asking(buffers.address) as asked:
        assert await asked.checkpoint() is None
        with pytest.raises(PreconditionError, match=r"set buffer.data_dir"):
            await buffers.service._store.checkpoint()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"durability": "process"}, "durability 'process' needs a data_dir"),
        ({"restore": "latest"}, "restore 'latest' needs a data_dir"),
        ({"checkpoint_interval_s": 5}, "checkpoint_interval_s needs a data_dir"),
        ({"tables": {"a": {"data_dir": "x"}}}, r"a\.data_dir: the server has one for all"),
        ({"durability": "disk"}, "durability"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BufferConfig.from_dict({"type": "ReplayBuffer", "capacity": 10, **options})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_full_disk_stops_acks_until_it_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, full = os.pwritev, False

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        if full:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    async def ready() -> bool:
        return await check(buffers.address, "readiness") is ServingStatus.SERVING

    async def live() -> bool:
        return await check(buffers.address, "liveness") is ServingStatus.SERVING

    monkeypatch.setattr(files.os, "pwritev", pwritev)
    env = ScriptedEnv(2, ends)
    async with durable(folder) as buffers, inserting(buffers.address, env.meta) as writer:
        await act(writer, env, 10)
        await writer.flush(10)
        acked = writer.acked
        full = True
        env_ret = env.reset()
        await writer.insert(env_ret, answer(env_ret))
        await until(ready, wanted=False)
        assert await live()
        for _ in range(3):
            await writer.insert(env_ret := env.step(), answer(env_ret))
        async with asking(buffers.address) as asked:
            for refused in (asked.clear(), asked.truncate([env.env_id]), asked.checkpoint()):
                with pytest.raises(ResourceExhaustedError, match=os.strerror(number)):
                    await refused
        assert writer.acked == acked
        full = False
        await until(ready, wanted=True)
        await writer.flush(20)
        assert writer.acked == acked + 4
        before = buffers.table.buffer.counters.completed
    async with durable(folder) as buffers:
        assert buffers.table.buffer.counters.completed == before


async def until(ask: Any, *, wanted: bool) -> None:
    async def waited() -> None:
        while await ask() is not wanted:
            await asyncio.sleep(0.02)

    await asyncio.wait_for(waited(), 20)


async def test_what_the_disk_does_not_confirm_ends_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with durable(folder, durability="power") as buffers:
        async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
            await act(writer, ScriptedEnv(1, ends), 3)
            await writer.flush(10)
            acked = writer.acked

            def fail(fd: int) -> None:
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(files.os, "fdatasync", fail)
            env = ScriptedEnv(1, ends)
            await writer.insert(env.reset(), None)
            await assert_eventually(buffers.service.failure.done, 60)
            assert "Input/output error" in str(buffers.service.failure.exception())
            monkeypatch.undo()
            await asyncio.sleep(0.1)
            assert writer.acked == acked


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("left", ["a part", "nothing"])
async def test_a_journal_cut_below_the_newest_checkpoint_is_told(
    folder: Path, durability: Any, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with durable(folder, durability=durability) as buffers:
        async with asking(buffers.address) as asked:
            async with inserting(buffers.address, ScriptedEnv(1, ends).meta) as writer:
                await act(writer, ScriptedEnv(1, ends), 10)
                await writer.flush(10)
                name = (await asked.checkpoint()).name
                before = await asked.get()
    position = int((folder / "checkpoints" / name / "position").read_text())
    (segment,) = (folder / "journal").glob("*.journal")
    if left == "nothing":
        segment.unlink()
        ends_at = "the journal has nothing"
    else:
        with segment.open("r+b") as file:
            file.truncate(position // 2)
        ends_at = r"the journal ends at \d+"
    said = rf"{ends_at}, before the newest checkpoint, which was written at {position}"
    if durability == "power":
        with pytest.raises(CorruptError, match=said):
            async with durable(folder, durability=durability):
                pass
        async with durable(folder, durability=durability, restore=name) as buffers:
            assert buffers.table.buffer.size() > 0
        return
    async with durable(folder) as buffers:
        np.testing.assert_array_equal(buffers.table.buffer.get_all()["step"], before["step"])
    assert re.search(said, caplog.text)
    caplog.clear()
    async with durable(folder):  # a server that has gone on since then has nothing to tell
        assert "before the newest checkpoint" not in caplog.text


async def test_checkpoints_that_somebody_refers_to_are_kept(folder: Path) -> None:
    def kept() -> list[str]:
        return [path.name[-1:] for path in sorted((folder / "checkpoints").glob("[!.]*"))]

    async with durable(folder, checkpoint_keep=1) as buffers, asking(buffers.address) as asked:
        one = (await asked.checkpoint([])).name
        await asked.checkpoint()
        await asked.checkpoint()
        assert kept() == ["1", "3"]
    async with durable(folder, checkpoint_keep=1) as buffers, asking(buffers.address) as asked:
        four = (await asked.checkpoint([one, "../elsewhere", "checkpoint-00000099"])).name
        await asked.checkpoint()
        assert kept() == ["1", "4", "5"]
        await asked.checkpoint([four])
        await asked.checkpoint()
        assert kept() == ["4", "6", "7"]
