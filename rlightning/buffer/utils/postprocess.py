"""Documented place of the postprocess functions."""

from __future__ import annotations

from rlightning.buffer.utils.utils import default_postprocess_fn

__all__ = ["default_postprocess_fn"]
