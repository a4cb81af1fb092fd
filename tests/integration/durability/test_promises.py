"""What keeps the promises of the journal and of checkpoints: without one of these lines, they break.

A copy of the data directory, made between two steps of the event loop, is what `kill -9` leaves there.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import columns
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.checkpoint import read_checkpoint, write_checkpoint
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.durable.tables import dump_table, load_table
from rlightning.buffer.pipeline import Item
from rlightning.buffer.utils import container, frozen, observations, pool
from rlightning.services.buffer_server.inserts import InsertHandler
from rlightning.testing import assert_eventually
from rlightning.utils.config import BufferConfig
from rlightning.utils.failpoints import armed
from tests.integration.buffer.harness import inserting
from tests.integration.durability.test_restarts import durable, ends
from tests.unit.buffer.scripted import ScriptedEnv, answer


async def keeps_what_it_acked(folder: Path) -> bool:
    """Tells whether a server has, after a crash, every message that was acked before it."""
    env = ScriptedEnv(2)
    async with durable(folder) as buffers, inserting(buffers.address, env.meta) as writer:
        with armed("journal.before_write=sleep:0.05"):  # a slow disk
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
    ("owner", "line", "instead"),
    [
        (DurableStore, "insert", lambda *_: None),  # the record
        (DurableStore, "settled", _at_once),  # the ack waits for it
        (InsertHandler, "take_over", lambda _: None),  # how far writers were
    ],
)
async def test_it_does_not_without(
    owner: Any, line: str, instead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, line, instead)
    assert not await keeps_what_it_acked(tmp_path / "data")


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
    load_table(table, read_checkpoint(folder / "one"))
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
