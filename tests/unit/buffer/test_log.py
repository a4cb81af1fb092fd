"""The journal in an event loop: who writes what is appended, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlightning.buffer.durable import log as module
from rlightning.buffer.durable.journal import Entry, Journal, JournalReader
from rlightning.buffer.durable.log import Log


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


async def put(log: Log, *payloads: bytes) -> None:
    for payload in payloads:
        log.append(1, (payload,))
    await log.settled()


LONG = bytes(100_000)


async def test_what_is_short_is_written_by_the_loop(tmp_path: Path) -> None:
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
    monkeypatch.setattr(module, "_SPARED_S", 60.0)
    monkeypatch.setattr(module, "_SLOW_S", 0.0)
    await put(log, b"two")
    await put(log, b"three")
    await log.close()
    assert journal.by == [(False, 1), (True, 1), (False, 1)]
