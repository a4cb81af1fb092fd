"""Conversions, precisions and the flags of the process environment, under documented names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlightning.utils.conversions import to_device, to_numpy

if TYPE_CHECKING:
    import torch

__all__ = ["InternalFlag", "to_device", "to_numpy", "torch_dtype_from_precision"]

_PRECISIONS = {
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "16": "float16",
    "fp16": "float16",
    "16-mixed": "float16",
    "32": "float32",
    "32-true": "float32",
}


def torch_dtype_from_precision(precision: str | int | None) -> torch.dtype | None:
    """Returns the torch dtype of a precision as trainers spell it.

    Args:
        precision: `bf16`, `bf16-mixed`, `16`, `fp16`, `16-mixed`, `32`, `32-true` (numbers may be
            ints), or None.

    Returns:
        The dtype; None for None.

    Raises:
        ValueError: The precision is none of these.
        ImportError: torch is not installed.
    """
    if precision is None:
        return None
    name = None if isinstance(precision, bool) else _PRECISIONS.get(str(precision))
    if name is None:
        known = ", ".join(_PRECISIONS)
        raise ValueError(f"unknown precision {precision!r}; expected one of {known} or None")
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


class _Flags(type):
    """Makes the flags properties of the class itself."""

    NAMES = ("DEBUG", "VERBOSE", "REMOTE_TRAIN", "REMOTE_EVAL", "REMOTE_STORAGE", "REMOTE_ENV")

    @property
    def DEBUG(cls) -> bool:
        """Whether debug output is on."""
        return _is_set("DEBUG")

    @property
    def VERBOSE(cls) -> bool:
        """Whether verbose output is on."""
        return _is_set("VERBOSE")

    @property
    def REMOTE_TRAIN(cls) -> bool:
        """Whether train policies run in processes of their own."""
        return _is_set("REMOTE_TRAIN")

    @property
    def REMOTE_EVAL(cls) -> bool:
        """Whether eval policies run in processes of their own."""
        return _is_set("REMOTE_EVAL")

    @property
    def REMOTE_STORAGE(cls) -> bool:
        """Whether storage runs in a process of its own."""
        return _is_set("REMOTE_STORAGE")

    @property
    def REMOTE_ENV(cls) -> bool:
        """Whether envs run in processes of their own."""
        return _is_set("REMOTE_ENV")


class InternalFlag(metaclass=_Flags):
    """Flags of the process environment: `RLIGHTNING_<NAME>` is "1"; read at each use."""

    @staticmethod
    def get_env_vars() -> dict[str, str]:
        """Returns the six flags as environment variables, "0" or "1", for another process."""
        return {f"RLIGHTNING_{name}": "1" if _is_set(name) else "0" for name in _Flags.NAMES}


def _is_set(name: str) -> bool:
    environ = os.environ  # noqa: TID251 - one of the two places that read it
    return environ.get(f"RLIGHTNING_{name}", "0") == "1"
