"""The garbage collector, where it costs more than it gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects nothing inside, and never looks again through what there is at the end.

    For imports of large libraries: what they make lives for ever. Looking through it again and
    again takes as long as the import itself, and later stops the process for 0.2 s at a time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
