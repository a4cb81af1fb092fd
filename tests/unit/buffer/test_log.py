"""The journal in an event loop: who writes what is appended, and when."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlightning.buffer.durable import checkpoint, store
from rlightning.buffer.durable import journal as journal_module
from rlightning.buffer.durable import log as module
from rlightning.buffer.durable.directory import DataDirectory
from rlightning.buffer.durable.files import SyncError
from rlightning.buffer.durable.journal import Entry, Journal, JournalReader
from rlightning.buffer.durable.log import Log
from rlightning.errors import ConfigError, ResourceExhaustedError, UnavailableError
from rlightning.utils.config import BufferConfig


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the system drop nothing of a segment."""
    monkeypatch.setattr(journal_module, "_is_held", lambda *_: True)


class Watched(Journal):
    """Notes which thread wrote how many records."""

    def __init__(self, folder: Path, *, power: bool = False) -> None:
        super().__init__(folder, 0, power=power)
        self.by: list[tuple[bool, int]] = []

    def write(self, entries: Sequence[Entry]) -> None:
        self.by.append((threading.current_thread() is threading.main_thread(), len(entries)))
        super().write(entries)


def opened(folder: Path, **options: Any) -> tuple[Watched, Log]:
    journal = Watched(folder, **options)
    return journal, Log(journal, on_full=lambda _: None, on_lost=lambda _: None)


def stored(folder: Path, **options: Any) -> store.DurableStore:
    config = BufferConfig(
        type="ReplayBuffer", capacity=1, durability="process", data_dir=str(folder), **options
    )
    return store.DurableStore(config, {}, lambda *_: [])


async def put(log: Log, *payloads: bytes) -> None:
    for payload in payloads:
        log.append(1, (payload,))
    await log.settled()


LONG = bytes(100_000)


async def test_what_is_short_is_written_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 60.0)
    journal, log = opened(tmp_path)
    await put(log, b"makes the first segment")
    await put(log, b"one", b"two")
    await put(log, LONG)
    await put(log, b"three")
    await log.close()
    assert journal.by == [(False, 1), (True, 2), (False, 1), (True, 1)]
    read = [bytes(record.payload) for record in JournalReader(tmp_path, 0)]
    assert read[1:] == [b"one", b"two", LONG, b"three"]


async def test_nothing_that_waits_for_the_disk_is_written_by_the_loop(tmp_path: Path) -> None:
    journal, log = opened(tmp_path, power=True)
    await put(log, b"one")
    await put(log, b"two")
    await log.close()
    assert journal.by == [(False, 1), (False, 1)]


async def test_the_loop_does_not_write_while_a_thread_uses_the_journal(tmp_path: Path) -> None:
    journal, log = opened(tmp_path)
    await put(log, b"one")
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def work(used: Journal) -> None:
        begun.set()
        go_on.wait(30)
        seen.append(used.end)

    running = asyncio.create_task(log.run(work))
    await asyncio.to_thread(begun.wait, 30)
    before = journal.end
    settling = asyncio.create_task(put(log, b"two"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert journal.end == before
    go_on.set()
    await asyncio.gather(running, settling)
    assert seen == [before]
    await put(log, b"three")
    await log.close()
    assert journal.by == [(False, 1), (False, 1), (True, 1)]


async def test_a_system_that_holds_writers_up_does_not_hold_up_the_loop_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, log = opened(tmp_path)
    await put(log, b"one")
    monkeypatch.setattr(module, "_LEAST_SPARED_S", 60.0)
    monkeypatch.setattr(module, "_SLOW_S", 0.0)
    await put(log, b"two")
    await put(log, b"three")
    await log.close()
    assert journal.by == [(False, 1), (True, 1), (False, 1)]


async def test_the_loop_is_spared_for_the_longer_the_longer_it_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, held_s = 1000.0, 3.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    journal, log = opened(tmp_path)
    await put(log, b"one")
    real = journal.write

    def slow(entries: Sequence[Entry]) -> None:
        nonlocal now
        now += held_s
        real(entries)

    monkeypatch.setattr(journal, "write", slow)
    await put(log, b"two")
    monkeypatch.setattr(journal, "write", real)
    for waited_s in (0.5 * held_s, 99 * held_s, held_s):  # 100.5 times as long
        now += waited_s
        await put(log, b"more")
    await log.close()
    assert journal.by == [(False, 1), (True, 1), (False, 1), (False, 1), (True, 1)]


async def test_the_loop_does_not_write_while_others_keep_the_disk_busy(tmp_path: Path) -> None:
    journal, log = opened(tmp_path)
    await put(log, b"one")
    with log.sparing_loop():
        await put(log, b"two")
    await put(log, b"three")
    await log.close()
    assert journal.by == [(False, 1), (False, 1), (True, 1)]


async def test_the_loop_does_not_write_while_a_thread_does_what_nobody_waits_for_any_more(
    tmp_path: Path,
) -> None:
    journal, log = opened(tmp_path)
    await put(log, b"one")
    begun, go_on = threading.Event(), threading.Event()

    def work(_: Journal) -> None:
        begun.set()
        go_on.wait(30)

    running = asyncio.create_task(log.run(work))
    await asyncio.to_thread(begun.wait, 30)
    running.cancel()
    settling = asyncio.create_task(put(log, b"two"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    await asyncio.gather(running, settling, return_exceptions=True)
    assert running.cancelled()
    await log.close()
    assert journal.by == [(False, 1), (False, 1)]


@pytest.mark.parametrize("error", [SyncError("fdatasync"), RuntimeError("a bug")])
async def test_what_cannot_be_written_again_lets_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    journal, full, lost = Watched(tmp_path), list[bool](), list[Exception]()
    log = Log(journal, on_full=full.append, on_lost=lost.append)
    await put(log, b"one")
    asking = iter([error])

    def asked(_: Sequence[Entry]) -> bool:
        if (raised := next(asking, None)) is not None:
            raise raised
        return False

    monkeypatch.setattr(journal, "is_short", asked)
    for _ in range(2):  # nor is anything written later, as if nothing had been lost
        with pytest.raises(UnavailableError, match=f"not written any more: {error}"):
            await asyncio.wait_for(put(log, b"two"), 20)
    with pytest.raises(UnavailableError):
        await log.settled()
    with pytest.raises(ResourceExhaustedError):
        log.check()
    assert (full, lost, log.failure) == ([True], [error], error)
    await log.close()
    assert journal.by == [(False, 1)]


async def test_the_loop_does_not_write_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals: list[Watched] = []

    def made(folder: Path, *_: Any, **__: Any) -> Journal:
        journals.append(Watched(folder))
        return journals[-1]

    async def written(*_: Any, **__: Any) -> int:
        kept.know_writer("writer", "env", 1)
        await kept.settled()
        return 0

    monkeypatch.setattr(store, "Journal", made)
    monkeypatch.setattr(store, "write_checkpoint", written)
    kept = stored(tmp_path)
    kept.open()
    await kept.begin(on_full=lambda _: None, on_lost=lambda _: None)
    await kept.checkpoint()
    kept.know_writer("writer", "env", 2)
    await kept.settled()
    await kept.close()
    assert journals[0].by == [(False, 1), (False, 1), (True, 1)]


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Lets checkpoints wait before their end; returns what tells that one does, and lets it go."""
    writes, go_on, real = threading.Event(), threading.Event(), checkpoint._finish

    def slow(*given: Any) -> int:
        writes.set()
        go_on.wait(30)
        return real(*given)

    monkeypatch.setattr(checkpoint, "_finish", slow)
    return writes, go_on


@pytest.mark.parametrize("asked", [False, True], ids=["periodic", "asked"])
async def test_the_directory_is_let_go_once_nothing_writes_into_it_even_if_nobody_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    writes, go_on = held_up(monkeypatch)
    kept = stored(tmp_path, restore="latest", checkpoint_interval_s=None if asked else 0.01)
    kept.open()
    await kept.begin(on_full=lambda _: None, on_lost=lambda _: None)
    asking = asyncio.create_task(kept.checkpoint()) if asked else None
    assert await asyncio.to_thread(writes.wait, 30)
    closing = asyncio.create_task(kept.close())
    await asyncio.wait({closing}, timeout=0.05)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    with pytest.raises(UnavailableError, match="stops"):
        await kept.checkpoint()
    with pytest.raises(ConfigError, match="is used by another process"):
        DataDirectory(tmp_path)
    go_on.set()
    await asyncio.wait_for(kept.close(), 20)
    if asking is not None:
        with pytest.raises(UnavailableError, match="stops"):
            await asking
    with pytest.raises(UnavailableError, match="stops"):
        await kept.checkpoint()
    free = DataDirectory(tmp_path)
    assert not list(free.checkpoints.iterdir())
    free.close()


async def test_a_disk_that_gets_full_while_the_journal_closes_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, log = opened(tmp_path)
    await put(log, b"one")
    writes, go_on = threading.Event(), threading.Event()

    def full(_: Sequence[Entry]) -> None:
        writes.set()
        go_on.wait(30)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(journal, "write", full)
    log.append(1, (LONG,))
    assert await asyncio.to_thread(writes.wait, 30)
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(closing, 20)
    assert isinstance(log.failure, OSError)


async def test_who_is_cancelled_while_the_store_closes_is_not_told_of_that_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, go_on = held_up(monkeypatch)
    kept = stored(tmp_path)
    kept.open()
    await kept.begin(on_full=lambda _: None, on_lost=lambda _: None)
    asking = asyncio.create_task(kept.checkpoint())
    assert await asyncio.to_thread(writes.wait, 30)
    closing = asyncio.create_task(kept.close())
    await asyncio.sleep(0)
    asking.cancel()
    go_on.set()
    await asyncio.wait_for(closing, 20)
    await asyncio.wait({asking}, timeout=20)
    assert asking.cancelled()
