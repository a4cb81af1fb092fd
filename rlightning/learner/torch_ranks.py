"""Ranks that torchrun has started, connected by gloo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlightning.errors import ClusterError
from rlightning.learner.ranks import Order, Ranks

# How long a rank waits for others that start.
_JOIN = timedelta(minutes=5)
# And for another that works: for as long as rank 0 may wait for data. One that has ended is noticed
# at once.
_WORK = timedelta(days=7)


class TorchRanks(Ranks):
    """The ranks of a torch process group; see `Ranks`. All goes through the CPU.

    Joins the group that the environment of torchrun describes, and waits for all ranks to do so.

    Args:
        local_rank: Which rank of this machine this is; it chooses the CUDA device.

    Raises:
        ClusterError: A rank has ended; so does every method.
    """

    def __init__(self, local_rank: int) -> None:
        with _reported():
            dist.init_process_group("gloo", timeout=_JOIN)
            self._group = dist.new_group(backend="gloo", timeout=_WORK)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._local_rank = local_rank

    def order(self, order: Order, version: int = 0) -> None:
        """Tells the others what to do."""
        with _reported():
            dist.broadcast(torch.tensor([order, version]), 0, group=self._group)

    def receive_order(self) -> tuple[Order, int]:
        """Waits for what rank 0 tells."""
        told = torch.zeros(2, dtype=torch.int64)
        with _reported():
            dist.broadcast(told, 0, group=self._group)
        return Order(int(told[0])), int(told[1])

    def share(self, data: bytes) -> bytes:
        """Returns what rank 0 gave, to all."""
        with _reported():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self._group)
            buffer = torch.zeros(int(size), dtype=torch.uint8)
            if self.rank == 0:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self._group)
        return buffer.numpy().tobytes()

    def device(self, name: str) -> str:
        """Returns the device for `policy.device`: with `auto`, each rank has its own if it can."""
        count = torch.cuda.device_count()
        return f"cuda:{self._local_rank % count}" if name == "auto" and count else name

    def least(self, value: float) -> float:
        """Returns the least of a number of each rank."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def total(self, value: float) -> float:
        """Returns the sum of a number of each rank."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def _reduce(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor(value, dtype=torch.float64)
        with _reported():
            dist.all_reduce(number, operation, group=self._group)
        return float(number)

    def average(self, parameters: Iterable[Tensor], rows: int) -> None:
        """Sets gradients to the mean over the rows of all ranks."""
        learned = list(parameters)
        zeros = (torch.zeros_like(one) if one.grad is None else one.grad for one in learned)
        weighted = torch.cat([gradient.detach().reshape(-1).float().cpu() for gradient in zeros])
        # With the rows in the same message.
        message = torch.cat([weighted * rows, torch.tensor([float(rows)])])
        with _reported():
            dist.all_reduce(message, group=self._group)
        mean = message[:-1] / message[-1].clamp(min=1.0)
        for one, part in zip(
            learned, torch.split(mean, [one.numel() for one in learned]), strict=True
        ):
            one.grad = part.view(one.shape).to(one.device, one.dtype)

    def concatenate(self, values: Tensor) -> Tensor:
        """Returns the values of all ranks, [n, ...] of each."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with _reported():
            dist.all_gather(sizes, torch.tensor([len(values)]), group=self._group)
            longest = max(map(int, sizes))
            padded = values.new_zeros((longest, *values.shape[1:]), device="cpu")
            padded[: len(values)] = values.detach().cpu()
            parts = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=self._group)
        kept = [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(kept).to(values.device)


@contextmanager
def _reported() -> Iterator[None]:
    """Says what an error of the connection to another rank means."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClusterError(
            f"another rank of this learner has ended, or cannot be reached: {first:.200}"
        ) from error
