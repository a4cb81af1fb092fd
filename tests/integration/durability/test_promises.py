"""What keeps the promises of the journal and of checkpoints: without one of these lines, they break.

A copy of the data directory, made between two steps of the event loop, is what `kill -9` leaves there.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import columns
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.checkpoint import read_checkpoint, write_checkpoint
from rlightning.buffer.durable.files import CorruptError
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.durable.tables import dump_table, load_table
from rlightning.buffer.pipeline import Item
from rlightning.buffer.utils import container, frozen, observations, pool
from rlightning.rpc.metrics import Metrics
from rlightning.services.buffer_server.inserts import InsertHandler
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.utils.config import BufferConfig
from rlightning.utils.failpoints import armed, passed
from tests.integration.buffer.harness import FAST, act, asking, inserting
from tests.integration.durability.crash import RepeatingClient
from tests.integration.durability.test_restarts import durable, ends
from tests.unit.buffer.scripted import ScriptedEnv, answer


async def keeps_what_it_acked(folder: Path, disk_s: float = 0.05) -> bool:
    """Tells whether a server has, after a crash, every message that was acked before it.

    Each write takes the disk `disk_s` seconds.
    """
    env = ScriptedEnv(2)
    async with durable(folder) as buffers, inserting(buffers.address, env.meta) as writer:
        with armed(f"journal.before_write=sleep:{disk_s}"):
            env_ret = env.reset()
            for _ in range(20):
                await writer.insert(env_ret, answer(env_ret))
                env_ret = env.step()
            await assert_eventually(lambda: writer.acked >= 16, 60)
            shutil.copytree(folder, folder.with_name("left"))
            acked, writer_id = writer.acked, writer._writer_id
            await writer.flush(20)
    async with durable(folder.with_name("left")) as buffers:
        known = buffers.service._insert._writers.get(writer_id)
        items = buffers.table.buffer.counters.completed // 2 + 1
        segments = buffers.table.buffer.counters.segments
    return known is not None and items >= acked and segments == 0


async def test_a_server_keeps_what_it_acked(tmp_path: Path) -> None:
    assert await keeps_what_it_acked(tmp_path / "data")


async def _at_once(_: Any) -> None:
    return


@pytest.mark.parametrize(
    ("owner", "line", "instead", "disk_s"),
    [
        (DurableStore, "insert", lambda *_: None, 0.05),  # the record
        # The ack waits for it: all others would come before the second write is done.
        (DurableStore, "settled", _at_once, 1.0),
        (InsertHandler, "take_over", lambda _: None, 0.05),  # how far writers were
    ],
)
async def test_it_does_not_without(
    owner: Any,
    line: str,
    instead: Any,
    disk_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, line, instead)
    assert not await keeps_what_it_acked(tmp_path / "data", disk_s)


async def stores_once_what_comes_twice(folder: Path) -> bool:
    """Tells whether a server has once what a client sends it again after a cut."""
    env = ScriptedEnv(2)
    async with (
        durable(folder) as buffers,
        FaultProxy(buffers.address) as proxy,
        RepeatingClient(proxy.address, spec=env.meta, rpc=FAST) as writer,
    ):
        env_ret = env.reset()
        with armed("journal.before_write=sleep:0.05"):  # so that something is not acked yet
            for number in range(20):
                await writer.insert(env_ret, answer(env_ret))
                env_ret = env.step()
                if number == 15:
                    await assert_eventually(lambda: writer.acked > 0)
                    proxy.reset()
        await writer.insert(env_ret, None)
        await writer.flush(20)
        async with asking(buffers.address) as asked:
            await asked.truncate([env.env_id])
            steps = (await asked.get())["step"].tolist()
        assert buffers.service._insert.counts.messages_total > writer._seq
    return sorted(steps) == sorted([*range(20), *range(20)])


async def test_a_server_stores_once_what_comes_twice(tmp_path: Path) -> None:
    assert await stores_once_what_comes_twice(tmp_path / "data")


async def test_it_does_not_without_looking_at_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_message = InsertHandler.on_message

    async def take_all(self: InsertHandler, session: Any, reader: Any) -> None:
        insert, writer = reader.message.insert, session.state
        insert.seq = max(insert.seq, writer.next_seq + len(writer.waiting))
        await on_message(self, session, reader)

    monkeypatch.setattr(InsertHandler, "on_message", take_all)
    assert not await stores_once_what_comes_twice(tmp_path / "data")


async def test_what_several_writers_wait_for_reaches_the_disk_together(tmp_path: Path) -> None:
    envs = [ScriptedEnv(2, env_id=f"env-{number}") for number in range(4)]
    async with (
        durable(tmp_path / "data", durability="power") as buffers,
        AsyncExitStack() as stack,
    ):
        writers = [
            await stack.enter_async_context(inserting(buffers.address, env.meta)) for env in envs
        ]
        counts = buffers.service._insert.counts
        with armed("journal.synced=sleep:0.02"):  # which is not more than a disk may take
            await asyncio.gather(*(act(*pair, 30) for pair in zip(writers, envs, strict=True)))
            await asyncio.gather(*(writer.flush(20) for writer in writers))
            syncs = passed("journal.synced")
        assert [writer.acked for writer in writers] == [31] * 4
        assert 1 <= syncs < counts.messages_total / 2
        metrics = Metrics()
        buffers.service.measure(metrics)
        counted = {
            sample.name: sample.value for one in metrics.families() for sample in one.samples
        }
        assert counted["rlightning_wal_fsync_seconds_count"] >= syncs
        assert counted["rlightning_wal_fsync_seconds_sum"] > 0
        for what in ("sum", "count"):
            within = counted[f"rlightning_journal_write_seconds_{what}"]
            assert counted[f"rlightning_wal_fsync_seconds_{what}"] <= within


async def is_of_one_moment(folder: Path) -> bool:
    """Tells whether a checkpoint that others write into meanwhile is what was there at its begin."""
    config = BufferConfig(type="ReplayBuffer", capacity=200, auto_truncate_episode=True)
    table, env = BufferTable("default", config), ScriptedEnv(2, ends)
    table.open_writer(env.meta, "writer")
    env_ret = env.reset()

    def act(steps: int) -> None:
        nonlocal env_ret
        for _ in range(steps):
            table.try_insert(env.env_id, [Item(env_ret, answer(env_ret))])
            env_ret = env.step()

    act(150)
    before = table.buffer.get_all()
    writing = asyncio.create_task(
        write_checkpoint(folder / "one", dump_table(table), notes={}, before_rename=_nothing)
    )
    while not writing.done():
        act(20)
        await asyncio.sleep(0.001)
    await writing
    table.reset()
    try:
        load_table(table, read_checkpoint(folder / "one"))
    except CorruptError:
        return False  # it changed between its checksum and its end
    after = table.buffer.get_all()
    return all(np.array_equal(column, after[name]) for name, column in before.items())


async def _nothing() -> None:
    return


async def test_a_checkpoint_is_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 256)
    assert await is_of_one_moment(tmp_path)


async def test_it_is_not_without_copying_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "CHUNK_BYTES", 256)
    for module in (columns, container, observations, pool):
        monkeypatch.setattr(module, "before_write", lambda *_: None)
    assert not await is_of_one_moment(tmp_path)
