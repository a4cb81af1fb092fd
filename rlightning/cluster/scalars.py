"""Figures over time, as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Scalars:
    """Writes scalars to a folder; without a folder, nowhere. Safe to use from several threads."""

    def __init__(self, folder: Path | None) -> None:
        self._writer = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, values: Mapping[str, float | None], step: int) -> None:
        """Writes each value under its tag; what is None was not measured and is left out."""
        if self._writer is None:
            return
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)
