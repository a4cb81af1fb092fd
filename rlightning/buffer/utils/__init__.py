"""What buffers are made of.

The names below are loaded when they are asked for: the assembly of episodes needs the layouts in
here before a `Storage`, which is made of both, can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from rlightning.buffer.utils.storage import BufferView, Storage
    from rlightning.buffer.utils.table import EpisodeTable

__all__ = ["BufferView", "EpisodeTable", "Storage"]

__getattr__ = lazy_names(
    __name__, {"BufferView": "storage", "EpisodeTable": "table", "Storage": "storage"}
)
