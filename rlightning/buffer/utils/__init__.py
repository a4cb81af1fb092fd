"""What buffers are made of.

The names below are loaded when they are asked for: the assembly of episodes needs the layouts in
here before a `Storage`, which is made of both, can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.buffer.utils.storage import BufferView, Storage
    from rlightning.buffer.utils.table import EpisodeTable

__all__ = ["BufferView", "EpisodeTable", "Storage"]

_MODULES = {"BufferView": "storage", "EpisodeTable": "table", "Storage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
