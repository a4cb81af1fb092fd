"""What buffers are made of."""

from __future__ import annotations

from rlightning.buffer.utils.storage import Storage

__all__ = ["Storage"]
