"""What leaves a table: each batch is lent to one learner until it was used, or was given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass

from rlightning.buffer.rollouts import RolloutCollector
from rlightning.buffer.shares import SharedRollouts
from rlightning.buffer.take_once import QueuedRows, TakeOnce
from rlightning.buffer.taken import Taken, taken_of

# Batches that were given back, of which an ack may still come.
_MAX_RETURNED = 64
# Clients that had one of them, each before the next.
_MAX_LEARNERS = 8


@dataclass(frozen=True)
class Returned:
    """A batch that was given back, and that those who had it may have used all the same.

    Attributes:
        learners: Ids of the last clients that had it.
        queued: The transitions of a queue that it was made of; None for a rollout.
    """

    learners: tuple[str, ...]
    queued: QueuedRows | None


class Lending(ABC):
    """Lends batches to learners. What it does follows from what was asked of it, in order.

    Attributes:
        lent: Batches that were taken, and neither released nor given back, in the order in which
            they were taken; by rank and number.
        returned: The last batches that were given back; by rank, number of learners and number.
    """

    def __init__(self) -> None:
        self.lent: dict[tuple[int, int], Taken] = {}
        self.returned: OrderedDict[tuple[int, int, int], Returned] = OrderedDict()

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
        key = taken.rank, taken.world_size, taken.batch_id
        before = self.returned.get(key)
        others = () if before is None else (one for one in before.learners if one != taken.learner)
        learners = (*others, taken.learner)[-_MAX_LEARNERS:]
        self.returned[key] = Returned(learners, taken.queued)
        self.returned.move_to_end(key)
        while len(self.returned) > _MAX_RETURNED:
            self.returned.popitem(last=False)

    def had(self, rank: int, world_size: int, batch_id: int, learner: str) -> bool:
        """Tells whether a batch was given back that a client had as that rank of so many."""
        returned = self.returned.get((rank, world_size, batch_id))
        return returned is not None and learner in returned.learners

    def release_returned(
        self, rank: int, world_size: int, batch_id: int, learner: str | None
    ) -> bool:
        """Takes note that a batch that was given back was used all the same.

        Args:
            rank: Which rank used it.
            world_size: How many learners it was for.
            batch_id: Its number.
            learner: Id of the client that says so: nothing is released for another one than had it.
                None for whoever had it, which was checked before.

        Returns:
            Whether anything was released; nothing is while another client has it.

        Raises:
            InvalidRequestError: There is no such rank among those that share it now.
        """
        if learner is not None:
            if not self.had(rank, world_size, batch_id, learner):
                self._refuse_stranger(rank, batch_id)
                return False
            if (rank, batch_id) in self.lent:
                return False
        returned = self.returned.get((rank, world_size, batch_id))
        if not self._release_returned(rank, world_size, batch_id, returned):
            return False
        self.returned.pop((rank, world_size, batch_id), None)
        return True

    @abstractmethod
    def has(self, taken: Taken) -> bool:
        """Tells whether all of a batch that is lent is still here."""

    @abstractmethod
    def _take(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None: ...

    @abstractmethod
    def _release(self, taken: Taken) -> None: ...

    @abstractmethod
    def _give_back(self, taken: Taken) -> None: ...

    @abstractmethod
    def _release_returned(
        self, rank: int, world_size: int, batch_id: int, returned: Returned | None
    ) -> bool: ...

    @abstractmethod
    def _refuse_stranger(self, rank: int, batch_id: int) -> None:
        """Refuses an ack that no learner can mean; others come again after a cut, and late."""


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

    def _shares_of(self, world_size: int) -> SharedRollouts | None:
        """Returns the shares of so many learners; None if it is no longer shared between them."""
        shares = self.shares
        return shares if shares is not None and shares.world_size == world_size else None

    def _release(self, taken: Taken) -> None:
        assert taken.rollout is not None
        if taken.world_size == 1:
            self.rollouts.release(taken.rollout)
        elif (shares := self._shares_of(taken.world_size)) is not None:
            shares.release(taken.rank, taken.rollout.index)

    def _give_back(self, taken: Taken) -> None:
        assert taken.rollout is not None
        if taken.world_size == 1:
            self.rollouts.give_back(taken.rollout)
        elif (shares := self._shares_of(taken.world_size)) is not None:
            shares.give_back(taken.rank, taken.rollout.index)

    def _release_returned(
        self, rank: int, world_size: int, batch_id: int, returned: Returned | None
    ) -> bool:
        if world_size == 1:
            return self.rollouts.release_ready(batch_id - 1)
        shares = self._shares_of(world_size)
        # Without shares it was given back whole.
        return shares is not None and shares.release(rank, batch_id - 1)

    def _refuse_stranger(self, rank: int, batch_id: int) -> None:
        if self.shares is not None and self.shares.has(batch_id - 1):
            self.shares.check(rank)


class QueueLending(Lending):
    """Lends the transitions of a queue.

    Args:
        queue: Where they come from.

    Attributes:
        queue: As given.
        last_number: Number of the last batch.
    """

    def __init__(self, queue: TakeOnce) -> None:
        super().__init__()
        self.queue = queue
        self.last_number = 0

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

    def _release_returned(
        self, rank: int, world_size: int, batch_id: int, returned: Returned | None
    ) -> bool:
        """Removes the transitions, wherever they are."""
        if returned is None or returned.queued is None:
            return False
        self.queue.remove(returned.queued)
        return True

    def _refuse_stranger(self, rank: int, batch_id: int) -> None:
        pass  # a queue has one rank
