"""A batch on its way to a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlightning.buffer.rollouts import Rollout
from rlightning.buffer.take_once import QueuedRows


@dataclass(frozen=True)
class Taken:
    """A batch on its way to a learner.

    Attributes:
        transitions: Number of transitions in it.
        metadata: What it is made of.
        rollout: The rollout that it is; None if it is none.
        rows: Which rows of the rollout, counted over all envs: the first, and the one after the
            last.
        queued: The transitions of a queue that it is made of; None if there is none.
        sample: The columns of what is no rollout.
        nbytes: Size of the columns in bytes; of what is no rollout, at most.
        units: Transitions or episodes that were drawn.
        parts: Batches of several tables that it was made of.
        reusable: Whether the arrays of `sample` may be written anew once they were copied.
        batch_id: Under which number it is acked; 0 if it stays.
        rank: Which of several learners it is for.
        world_size: How many learners there are.
        learner: Id of the client that has it; empty in a process of its own.
    """

    transitions: int
    metadata: Mapping[str, Any]
    rollout: Rollout | None = None
    rows: tuple[int, int | None] = (0, None)
    queued: QueuedRows | None = None
    sample: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    units: int = 0
    parts: Sequence[Taken] = ()
    reusable: bool = False
    batch_id: int = 0
    rank: int = 0
    world_size: int = 1
    learner: str = ""

    @property
    def leaves(self) -> bool:
        """Whether it leaves the buffer once it was used; a sample stays."""
        return self.rollout is not None or self.queued is not None

    def columns(self) -> dict[str, Any]:
        """Returns the columns; for a rollout as `Rollout.columns` does, from any thread."""
        return dict(self.sample) if self.rollout is None else self.rollout.columns(*self.rows)


def taken_of(rollout: Rollout, rank: int = 0, world_size: int = 1, learner: str = "") -> Taken:
    """Returns the part of a rollout that one of several learners gets.

    Its number is the same for every learner and session, so that no ack can mean another one.
    """
    own = sum(rollout.rows) // world_size
    first, stop = rank * own, (rank + 1) * own
    pairs = zip(rollout.env_ids, rollout.within(first, stop), strict=True)
    mine = [(env_id, end - begin) for env_id, (begin, end) in pairs if end > begin]
    metadata: dict[str, Any] = {
        "env_ids": [env_id for env_id, _ in mine],
        "rows": [rows for _, rows in mine],
        "rollout": rollout.index,
    }
    if world_size > 1:
        metadata |= {"rank": rank, "world_size": world_size}
    return Taken(
        rollout.transitions // world_size,
        metadata,
        rollout,
        (first, stop),
        nbytes=rollout.nbytes // world_size,
        batch_id=rollout.index + 1,
        rank=rank,
        world_size=world_size,
        learner=learner,
    )
