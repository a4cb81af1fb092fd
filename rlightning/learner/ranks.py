"""Several learners of one run: rank 0 leads, and each learns from its share of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.learner.loop import Algorithm


class Order(IntEnum):
    """What rank 0 tells the others to do.

    Attributes:
        STOP: End; nothing more comes.
        TAKE: Take your share of the next rollout, and say how old it is.
        UPDATE: Learn from it; of what is sampled again and again, take a batch of your own first.
    """

    STOP = 0
    TAKE = 1
    UPDATE = 2


class Ranks:
    """The learners of a run as one of them sees them: here, one that is alone.

    Every rank has to call the same methods in the same order, except `order` (rank 0 alone) and
    `receive_order` (the others): each waits for all.

    Attributes:
        rank: Which of them this is; 0 leads.
        world_size: How many there are.
    """

    rank = 0
    world_size = 1

    def order(self, order: Order, version: int = 0) -> None:
        """Tells the others what to do; `version` is that of the newest weights."""

    def receive_order(self) -> tuple[Order, int]:
        """Waits for what rank 0 tells; returns it with the version of the newest weights."""
        return Order.STOP, 0

    def share(self, data: bytes) -> bytes:
        """Returns what rank 0 gave, to all."""
        return data

    def device(self, name: str) -> str:
        """Returns the device for `policy.device`."""
        return name

    def oldest(self, versions: npt.NDArray[np.int64]) -> float:
        """Returns the least version that any rank has; infinity if there is none."""
        return self.least(float(versions.min(initial=np.iinfo(np.int64).max)))

    def least(self, value: float) -> float:
        """Returns the least of a number of each rank."""
        return value

    def total(self, value: float) -> float:
        """Returns the sum of a number of each rank."""
        return value

    def average(self, parameters: Iterable[Tensor], rows: int) -> None:
        """Sets gradients to the mean over the rows of all ranks, with no gradients for no rows.

        Args:
            parameters: What was differentiated by, the same on every rank.
            rows: How many rows the gradients here are the mean of.
        """

    def concatenate(self, values: Tensor) -> Tensor:
        """Returns the values of all ranks, [n, ...] of each, in the order of the ranks."""
        return values


ALONE = Ranks()


class Share(Protocol):
    """Where another rank than 0 takes its batches from. All methods block."""

    def next_batch(self) -> Mapping[str, Any]:
        """Returns the columns of its share of the next rollout, or of a batch of its own."""
        ...

    def release(self) -> None:
        """Says that the last batch was used."""
        ...

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        """Sets the priorities of a batch's rows, where the buffer has priorities."""
        ...


def follow(
    algorithm: Algorithm, share: Share, ranks: Ranks, *, replays: bool, max_staleness: int | None
) -> None:
    """Makes the updates that rank 0 orders, until it orders to stop.

    Args:
        algorithm: What learns, in the state of that of rank 0.
        share: Where batches come from.
        ranks: The other learners.
        replays: Whether each rank samples transitions, rather than taking its share of a rollout.
        max_staleness: Age in versions beyond which replayed rows are left out.

    Raises:
        PolicyError: The algorithm failed.
        ClusterError: Another rank has ended.
        RLightningError: `share` raised.
    """
    from rlightning.learner.replay_loop import fresh_rows  # which imports what imports this

    columns: Mapping[str, Any] | None = None
    while True:
        order, version = ranks.receive_order()
        if order is Order.STOP:
            return
        if order is Order.TAKE:
            columns = share.next_batch()
            versions = np.asarray(columns["policy_version"])
            ranks.oldest(versions[versions >= 0])
            continue
        while replays:
            columns = fresh_rows(share.next_batch(), version, max_staleness)
            if len(columns["reward"]):
                break
        assert columns is not None  # a rollout was taken before
        algorithm.update(columns)
        priorities = getattr(algorithm, "priorities", None)
        if replays and priorities is not None and "sample_index" in columns:
            share.update_priorities(columns, priorities)
        share.release()
