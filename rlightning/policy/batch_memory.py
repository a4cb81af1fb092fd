"""Memory in which the rows of several groups become one batch on the policy's device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlightning.policy.layout import Leaf, torch_dtype

# Batch sizes whose views are kept; when there are more, all are made anew.
_KEPT_SIZES = 256


@dataclass(slots=True)
class Gathered:
    """One batch on the device, or on its way there.

    Attributes:
        values: A tensor [rows, ...] for each leaf; a list of `rows` values for a leaf without a
            fixed shape.
        arrived: When all copies to a CUDA device are over; None where nothing is under way.
    """

    values: list[Any]
    arrived: torch.cuda.Event | None = None

    def take(self) -> list[Any]:
        """Returns the values for work on the current stream of this thread, which waits for them.

        Does not block.
        """
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.arrived.device)
            stream.wait_event(self.arrived)
            for value in self.values:
                if isinstance(value, Tensor):
                    # Their memory is of the stream that copied, and not to be reused before this
                    # one has read it.
                    value.record_stream(stream)
        return self.values


class BatchMemory:
    """Reused, aligned memory for batches; where they go to a GPU of CUDA, pinned and there twice.

    So one batch can be put together and copied, on a stream of its own, while the network works on
    the one before.

    Args:
        leaves: The arrays of one batch.
        device: Where batches go.
    """

    def __init__(self, leaves: Sequence[Leaf], device: torch.device) -> None:
        self._leaves = leaves
        self._device = device
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = cycle([_Slot() for _ in range(1 if self._copies is None else 2)])
        self._lock = threading.Lock()

    def gather(self, parts: Sequence[Sequence[Any]], rows: int) -> Gathered:
        """Puts the arrays of several groups together, one below the other.

        Args:
            parts: For each group one array, tensor or list for each leaf, as `InputLayout.flatten`
                returns them; tensors must not change before the answer.
            rows: Their rows in all.

        Returns:
            The batch; valid until the next call. On CUDA one other may be put together meanwhile,
            also from another thread.
        """
        with self._lock:
            slot = next(self._slots)
            if slot.arrived is not None:
                slot.arrived.synchronize()  # a copy out of it may still be under way
            views = slot.views.get(rows) or self._make_views(slot, rows)
            values: list[Any] = []
            for i, leaf in enumerate(self._leaves):
                array, tensor = views[i]
                first = parts[0][i]
                if leaf.dtype is None:
                    values.append([_own(value) for part in parts for value in part[i]])
                    continue
                if isinstance(first, Tensor):
                    values.append(self._join([part[i] for part in parts], tensor))
                    continue
                # Decoded arrays are read-only and not aligned: torch needs a copy in any case.
                if len(parts) == 1:
                    np.copyto(array, first)
                else:
                    np.concatenate([part[i] for part in parts], out=array)
                values.append(self._upload(tensor))
            if self._copies is not None:
                slot.arrived = self._copies.record_event()
            return Gathered(values, slot.arrived)

    def _join(self, parts: list[Any], memory: Tensor) -> Tensor:
        """Returns a leaf that comes in tensors, by way of some memory where it has to be."""
        tensors = [torch.as_tensor(part) for part in parts]
        tensors = [one.detach() if one.requires_grad else one for one in tensors]
        if not all(one.is_cpu for one in tensors):
            # An env on the device: its rows need not pass through the CPU.
            tensors = [one.to(self._device) for one in tensors]
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if len(tensors) == 1:
            return self._upload(tensors[0])
        return self._upload(torch.cat(tensors, out=memory))

    def _upload(self, tensor: Tensor) -> Tensor:
        if self._copies is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._copies):
            return tensor.to(self._device, non_blocking=True)

    def _make_views(self, slot: _Slot, rows: int) -> list[tuple[Any, Tensor]]:
        if rows > slot.capacity or len(slot.views) >= _KEPT_SIZES:
            slot.views.clear()
        if rows > slot.capacity:
            # Powers of two, so that a growing batch does not allocate anew for every size.
            slot.capacity = 1 << (rows - 1).bit_length()
            slot.memory = [self._allocate(leaf, slot.capacity) for leaf in self._leaves]
        views = [(memory[:rows].numpy(), memory[:rows]) for memory in slot.memory]
        slot.views[rows] = views
        return views

    def _allocate(self, leaf: Leaf, rows: int) -> Tensor:
        if leaf.dtype is None:
            return torch.empty(0)
        shape = (rows, *leaf.shape)
        return torch.empty(
            shape, dtype=torch_dtype(leaf.dtype), pin_memory=self._copies is not None
        )


@dataclass(slots=True)
class _Slot:
    """Memory for one batch, its views by number of rows, and when the last copy out of it ends."""

    capacity: int = 0
    memory: list[Tensor] = field(default_factory=list)
    views: dict[int, list[tuple[Any, Tensor]]] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None


def _own(value: Any) -> Any:
    """Returns a value of a space without a fixed shape, whose arrays are views of the request."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_own, value))
    return value
