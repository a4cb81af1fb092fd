"""Builders under their documented path; they are made elsewhere."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.buffer import build_data_buffer
    from rlightning.env import build_env_group
    from rlightning.policy import build_policy_group

__all__ = ["build_data_buffer", "build_env_group", "build_policy_group"]

_PACKAGES = {
    "build_data_buffer": "rlightning.buffer",
    "build_env_group": "rlightning.env",
    "build_policy_group": "rlightning.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PACKAGES[name]), name)
