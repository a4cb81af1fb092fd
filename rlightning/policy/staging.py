"""Memory in which the rows of several groups become one batch on the policy's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlightning.policy.layout import Leaf, torch_dtype

# Batch sizes whose views are kept; when there are more, all are made anew.
_KEPT_SIZES = 256


class Staging:
    """Reused, aligned memory for batches; pinned where the device is CUDA. For one thread.

    Args:
        leaves: The arrays of one batch.
        device: Where batches go.
    """

    def __init__(self, leaves: Sequence[Leaf], device: torch.device) -> None:
        self._leaves = leaves
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._capacity = 0
        self._memory: list[Tensor] = []
        self._views: dict[int, list[tuple[Any, Tensor]]] = {}

    def gather(self, parts: Sequence[Sequence[Any]], rows: int) -> list[Any]:
        """Puts the arrays of several groups together, one below the other.

        Args:
            parts: For each group one array, tensor or list for each leaf, as `InputLayout.flatten`
                returns them.
            rows: Their rows in all.

        Returns:
            A tensor [rows, ...] on the device for each leaf, valid until the next call; a list of
            `rows` values for a leaf without a fixed shape.
        """
        views = self._views.get(rows) or self._make_views(rows)
        batch: list[Any] = []
        for i, leaf in enumerate(self._leaves):
            first = parts[0][i]
            if leaf.dtype is None:
                batch.append([_own(value) for part in parts for value in part[i]])
                continue
            array, tensor = views[i]
            if isinstance(first, Tensor):
                # An env on the device: its rows need not pass through the CPU.
                tensors = [torch.as_tensor(part[i], device=self._device) for part in parts]
                batch.append(tensors[0] if len(parts) == 1 else torch.cat(tensors))
                continue
            # Decoded arrays are read-only and not aligned: torch needs a copy in any case.
            if len(parts) == 1:
                np.copyto(array, first)
            else:
                np.concatenate([part[i] for part in parts], out=array)
            batch.append(tensor if self._on_cpu else tensor.to(self._device, non_blocking=True))
        return batch

    def _make_views(self, rows: int) -> list[tuple[Any, Tensor]]:
        if rows > self._capacity or len(self._views) >= _KEPT_SIZES:
            self._views.clear()
        if rows > self._capacity:
            # Powers of two, so that a growing batch does not allocate anew for every size.
            self._capacity = 1 << (rows - 1).bit_length()
            self._memory = [self._allocate(leaf) for leaf in self._leaves]
        views = [(memory[:rows].numpy(), memory[:rows]) for memory in self._memory]
        self._views[rows] = views
        return views

    def _allocate(self, leaf: Leaf) -> Tensor:
        if leaf.dtype is None:
            return torch.empty(0)
        shape = (self._capacity, *leaf.shape)
        return torch.empty(shape, dtype=torch_dtype(leaf.dtype), pin_memory=not self._on_cpu)


def _own(value: Any) -> Any:
    """Returns a value of a space without a fixed shape, whose arrays are views of the request."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_own, value))
    return value
