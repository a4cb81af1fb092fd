"""The buffer server with small segments, and without one of the lines that keep its promises.

Run as the service itself; `TEST_WITHOUT` names the line.
"""

from __future__ import annotations

import os
from typing import Any

from rlightning.buffer import columns
from rlightning.buffer.durable import journal, store
from rlightning.buffer.utils import container, observations, pool
from rlightning.services.buffer_server import inserts
from rlightning.services.buffer_server.__main__ import main

journal.SEGMENT_BYTES = 64 * 1024


def no_marks() -> None:
    """How far writers were is not loaded, so that what comes again is stored again."""
    inserts.InsertHandler.take_over = lambda _: None  # type: ignore[method-assign]


def no_journal() -> None:
    """Inserts are not written down."""
    store.DurableStore.insert = lambda *_: None  # type: ignore[method-assign,assignment]


def no_wait() -> None:
    """Acks do not wait for what they promise."""

    async def settled(self: Any) -> None:
        return

    store.DurableStore.settled = settled  # type: ignore[method-assign]


def no_copy() -> None:
    """A checkpoint takes what others wrote meanwhile for what was there."""
    for module in (columns, container, observations, pool):
        module.before_write = lambda *_: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    mutation = os.environ.get("TEST_WITHOUT")
    if mutation:
        globals()[f"no_{mutation}"]()
    main()
