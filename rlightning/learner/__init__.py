"""Learners: what turns rollouts into better weights. Everything here needs the extra `learn`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "PPO": "ppo",
    "LearnerStats": "loop",
    "Update": "loop",
    "train_loop": "loop",
}

__all__ = ["PPO", "LearnerStats", "Update", "preload", "train_loop"]


def preload() -> None:
    """Imports what learning needs, which takes seconds: for a thread beside other start-up work.

    Raises:
        ImportError: The extra `learn` is not installed.
    """
    for module in sorted(set(_MODULES.values())):
        import_module(f"{__name__}.{module}")


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "tensordict", "torchrl", "safetensors"}:
            raise
        raise ImportError(
            f"{__name__}.{name} needs {error.name}: pip install 'rlightning[learn]'"
        ) from error
