"""Replay: rows are sampled again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.where import Where
from rlightning.utils.registry import BUFFERS


@BUFFERS.register("ReplayBuffer")
class ReplayBuffer(DataBuffer):
    """A buffer whose transitions stay until newer ones take their place."""

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool | None = True,
        drop_last: bool | None = True,
        *,
        where: Where | None = None,
        out: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Draws a batch as `DataBuffer.sample` does; the data stays.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: `batch_size` is larger than what is stored.
        """
        if batch_size is not None and batch_size > self.size() > 0:
            raise ValueError(f"a batch of {batch_size} from {self.size()} stored transitions")
        return super().sample(batch_size, shuffle, drop_last, where=where, out=out)
