"""What leaves a table: each batch is lent to one learner until it was used, or was given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from rlightning.buffer.rollouts import RolloutCollector
from rlightning.buffer.shares import SharedRollouts
from rlightning.buffer.take_once import QueuedRows, TakeOnce
from rlightning.buffer.taken import Taken, taken_of

# Batches of a queue that were given back, of which an ack may still come.
_MAX_RETURNED = 64


class Lending(ABC):
    """Lends batches to learners. What it does follows from what was asked of it, in order.

    Attributes:
        lent: Batches that were taken, and neither released nor given back, in the order in which
            they were taken; by rank and number.
    """

    def __init__(self) -> None:
        self.lent: dict[tuple[int, int], Taken] = {}

    def take(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None:
        """Lends a batch; its columns are not read.

        Args:
            count: Transitions in it, no more than there are; of rollouts without meaning.
            rank: Which of `world_size` learners it is for.
            world_size: How many learners there are.
            learner: Id of the client that gets it.

        Returns:
            None if there is none.

        Raises:
            PreconditionError: The rows of a rollout do not divide by `world_size`.
        """
        taken = self._take(count, rank, world_size, learner)
        if taken is not None:
            self.lent[rank, taken.batch_id] = taken
        return taken

    def release(self, taken: Taken) -> None:
        """Takes note that a batch was used: it leaves the table."""
        self.lent.pop((taken.rank, taken.batch_id), None)
        self._release(taken)

    def give_back(self, taken: Taken) -> None:
        """Lets another learner take what was lent, before all that waits."""
        self.lent.pop((taken.rank, taken.batch_id), None)
        self._give_back(taken)

    @abstractmethod
    def release_returned(self, rank: int, batch_id: int) -> bool:
        """Takes note that a batch that was given back was used all the same.

        Returns:
            Whether anything is known of it.
        """

    @abstractmethod
    def has(self, taken: Taken) -> bool:
        """Tells whether all of a batch that is lent is still here."""

    @abstractmethod
    def _take(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None: ...

    @abstractmethod
    def _release(self, taken: Taken) -> None: ...

    @abstractmethod
    def _give_back(self, taken: Taken) -> None: ...


class RolloutLending(Lending):
    """Lends rollouts, whole or in shares.

    Args:
        rollouts: Where they come from.

    Attributes:
        rollouts: As given.
        shares: How they are shared; None while one learner gets them whole.
    """

    def __init__(self, rollouts: RolloutCollector) -> None:
        super().__init__()
        self.rollouts = rollouts
        self.shares: SharedRollouts | None = None

    def release_returned(self, rank: int, batch_id: int) -> bool:
        """Releases a rollout that is ready, or a share; see `Lending.release_returned`."""
        index = batch_id - 1
        if self.shares is None:
            return self.rollouts.release_ready(index)
        return self.shares.release(rank, index)

    def has(self, taken: Taken) -> bool:
        """Tells whether a rollout is still here: always, until it is released."""
        return True

    def awaited(self, rank: int, world_size: int) -> str | None:
        """Says which other ranks keep one waiting; None if they do not."""
        shares = self.shares
        if shares is None or shares.world_size != world_size:
            return None
        return shares.awaited(rank)

    def _take(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None:
        self._share_between(world_size)
        shares = self.shares
        rollout = self.rollouts.take() if shares is None else shares.take(rank)
        return None if rollout is None else taken_of(rollout, rank, world_size, learner)

    def _share_between(self, world_size: int) -> None:
        """Shares with so many learners: what another number has not used is given back."""
        if self.shares is not None and self.shares.world_size != world_size:
            self.shares.dissolve()
            self.shares = None
        if self.shares is None and world_size > 1:
            self.shares = SharedRollouts(self.rollouts, world_size)

    def _release(self, taken: Taken) -> None:
        assert taken.rollout is not None
        if self.shares is None:
            self.rollouts.release(taken.rollout)
        else:
            self.shares.release(taken.rank, taken.rollout.index)

    def _give_back(self, taken: Taken) -> None:
        assert taken.rollout is not None
        if self.shares is None:
            self.rollouts.give_back(taken.rollout)
        else:
            self.shares.give_back(taken.rank, taken.rollout.index)


class QueueLending(Lending):
    """Lends the transitions of a queue.

    Args:
        queue: Where they come from.

    Attributes:
        queue: As given.
        last_number: Number of the last batch.
        returned: Batches that were given back, and may be acked all the same, by number.
    """

    def __init__(self, queue: TakeOnce) -> None:
        super().__init__()
        self.queue = queue
        self.last_number = 0
        self.returned: OrderedDict[int, QueuedRows] = OrderedDict()

    def release_returned(self, rank: int, batch_id: int) -> bool:
        """Removes the transitions of a batch, wherever they are; see `Lending`."""
        rows = self.returned.pop(batch_id, None)
        if rows is not None:
            self.queue.remove(rows)
        return rows is not None

    def has(self, taken: Taken) -> bool:
        """Tells whether none of the transitions were discarded."""
        assert taken.queued is not None
        return self.queue.has_taken(taken.queued)

    def _take(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None:
        queued = self.queue.take(count)
        self.last_number += 1
        return Taken(
            count, {}, queued=queued, units=count, batch_id=self.last_number, learner=learner
        )

    def _release(self, taken: Taken) -> None:
        assert taken.queued is not None
        self.queue.remove(taken.queued)

    def _give_back(self, taken: Taken) -> None:
        assert taken.queued is not None
        self.queue.put_back(taken.queued)
        self.returned[taken.batch_id] = taken.queued
        while len(self.returned) > _MAX_RETURNED:
            self.returned.popitem(last=False)
