"""Rollouts that several learners share: each gets some of the rows, and all get every rollout."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlightning.buffer.rollouts import Rollout, RolloutCollector
from rlightning.errors import InvalidRequestError, PreconditionError


@dataclass
class Shared:
    """A rollout under way to the learners, and the ranks that took and used their share of it."""

    rollout: Rollout
    taken: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)


class SharedRollouts:
    """Gives every rollout to `world_size` learners; it is released when all have used their share.

    Args:
        rollouts: Where rollouts come from, and go back to.
        world_size: Number of learners.

    Attributes:
        world_size: As given.
    """

    def __init__(self, rollouts: RolloutCollector, world_size: int) -> None:
        self.world_size = world_size
        self._rollouts = rollouts
        self._open: dict[int, Shared] = {}

    def take(self, rank: int) -> Rollout | None:
        """Returns the oldest rollout of which a rank has not taken its share; None if none is here.

        Raises:
            InvalidRequestError: There is no such rank.
            PreconditionError: Its rows cannot be shared equally.
        """
        self.check(rank)
        for shared in self._open.values():
            if rank not in shared.taken:
                shared.taken.add(rank)
                return shared.rollout
        rollout = self._rollouts.take()
        if rollout is None:
            return None
        rows = sum(rollout.rows)
        if rows % self.world_size:
            self._rollouts.give_back(rollout)
            raise PreconditionError(indivisible(rows, self.world_size))
        self._open[rollout.index] = Shared(rollout, {rank})
        return rollout

    def release(self, rank: int, index: int) -> bool:
        """Takes note that a rank has used its share; tells whether that is news.

        Raises:
            InvalidRequestError: There is no such rank.
        """
        self.check(rank)
        shared = self._open.get(index)
        if shared is None or rank in shared.released:
            return False
        shared.taken.add(rank)
        shared.released.add(rank)
        if len(shared.released) == self.world_size:
            del self._open[index]
            self._rollouts.release(shared.rollout)
        return True

    def has(self, index: int) -> bool:
        """Tells whether a rollout is under way to the learners."""
        return index in self._open

    def check(self, rank: int) -> None:
        """Checks that a rank is one of those that share the rollouts.

        Raises:
            InvalidRequestError: It is not.
        """
        if not 0 <= rank < self.world_size:
            raise InvalidRequestError(
                f"rank {rank}: expected 0 to {self.world_size - 1}, since the rollouts are shared "
                f"with a world_size of {self.world_size}"
            )

    def give_back(self, rank: int, index: int) -> None:
        """Lets a rank take its share once more."""
        shared = self._open.get(index)
        if shared is not None and rank not in shared.released:
            shared.taken.discard(rank)

    def dissolve(self) -> None:
        """Gives the rollouts that not all have used back whole, for other learners."""
        for shared in reversed(self._open.values()):
            self._rollouts.give_back(shared.rollout)
        self._open.clear()

    def awaited(self, rank: int) -> str | None:
        """Says which other ranks keep one waiting; None if they do not."""
        for index, shared in self._open.items():
            late = [one for one in range(self.world_size) if one not in shared.released]
            if late and rank not in late:
                return (
                    f"rollout {index} waits for rank {', '.join(map(str, late))} of "
                    f"{self.world_size} to use its share"
                )
        return None


def indivisible(rows: int, world_size: int) -> str:
    """Says that rows cannot be shared equally."""
    return (
        f"world_size {world_size}: the {rows} rows of a rollout do not divide by it; give the envs "
        "another number of rows, or train with another number of learners"
    )
