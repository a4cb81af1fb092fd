"""What the batches of one learner come from: a table, its share of one, or a mixture of several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.lending import RolloutLending
from rlightning.buffer.taken import Taken
from rlightning.buffer.utils.layout import Layout, iter_arrays
from rlightning.buffer.where import Where
from rlightning.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)

RANK_SILENT = "RANK_SILENT"
"""Reason of the error that tells a learner of another one that does not use its share."""

# What a prioritised sampler adds; rows of other tables count fully, and have no such place.
_PRIORITISED = ("sample_index", "sample_generation", "sample_weight")


class Feed(ABC):
    """What the batches of one learner come from.

    Args:
        tables: The tables that batches come from.
        where: What a transition must be to be in a batch; None for anything.
        rank: Which of `world_size` learners this is.
        world_size: How many learners there are.
        learner: Id of the client.

    Attributes:
        tables: As given.
        rank: As given.
        world_size: As given.
    """

    def __init__(
        self,
        tables: Sequence[BufferTable],
        where: Where | None,
        rank: int,
        world_size: int,
        learner: str = "",
    ) -> None:
        self.tables = tuple(tables)
        self.rank = rank
        self.world_size = world_size
        self._where = where
        self._learner = learner

    @abstractmethod
    def check(self, batch_size: int) -> None:
        """Checks that there can be batches of a size; 0 for whole rollouts.

        Raises:
            InvalidRequestError: There cannot; the message names the field.
        """

    @abstractmethod
    async def next(self, patience_s: float = 0.0, *, batch_size: int = 0) -> Taken:
        """Waits for a batch, as `Rendezvous.wait_for` does.

        Args:
            patience_s: As of `Rendezvous.wait_for`.
            batch_size: Transitions or episodes in this one, checked; 0 for as many as the feed was
                made for.
        """

    def copied(self, taken: Taken) -> None:
        """Takes note that the columns of a batch were copied, as of `BufferTable`."""
        self.tables[0].copied(taken)

    def release(self, taken: Taken) -> None:
        """Takes note that a batch was used, as of `BufferTable`."""
        self.tables[0].release(taken)

    def release_returned(self, batch_id: int) -> bool:
        """Takes note that a batch of this learner that was given back was used all the same.

        Returns:
            Whether anything was released.

        Raises:
            InvalidRequestError: Others share what it names, and this rank is none of them.
        """
        return self.tables[0].release_returned(self.rank, self.world_size, batch_id, self._learner)

    def had(self, batch_id: int) -> bool:
        """Tells whether a batch was given back that this learner had."""
        lending = self.tables[0].lending
        if lending is None:
            return False
        return lending.had(self.rank, self.world_size, batch_id, self._learner)

    def give_back(self, taken: Taken) -> None:
        """Takes note that a batch was not used, as of `BufferTable`."""
        self.tables[0].give_back(taken)


class TableFeed(Feed):
    """Batches of one table.

    Args:
        table: The table.
        batch_size: Transitions or episodes in a batch; 0 for whole rollouts.
        where: What a transition must be to be in a batch; None for anything.
        rank: Which of `world_size` learners this is.
        world_size: How many learners there are.
        learner: Id of the client.

    Raises:
        InvalidRequestError: The table never serves such batches; the message names the field.
    """

    def __init__(
        self,
        table: BufferTable,
        batch_size: int,
        where: Where | None = None,
        rank: int = 0,
        world_size: int = 1,
        learner: str = "",
    ) -> None:
        super().__init__((table,), where, rank, world_size, learner)
        self._table = table
        self._batch_size = batch_size
        self.check(batch_size)
        if table.queue is not None and world_size > 1:
            raise InvalidRequestError(
                f"world_size {world_size}: table '{table.name}' is a queue, which any number of "
                "learners may empty; ask for 1"
            )

    def check(self, batch_size: int) -> None:
        """Checks that the table serves batches of a size at some time; see `Feed.check`."""
        _check(self._table, batch_size, self._where)

    async def next(self, patience_s: float = 0.0, *, batch_size: int = 0) -> Taken:
        """Waits for a batch; see `Feed.next`.

        Raises:
            UnavailableError: Another rank has not used its share for `producer_timeout_s`, and no
                rollout is complete before it has; reason `RANK_SILENT`, the message names it.
        """
        timeout_s = self._table.producers.timeout_ns / 1e9 if self.world_size > 1 else None
        take = partial(self._take, batch_size or self._batch_size)
        while True:
            try:
                return await self._table.rendezvous.wait_for(take, timeout_s, patience_s=patience_s)
            except DeadlineExceededError:
                lending, said = self._table.lending, None
                if isinstance(lending, RolloutLending):
                    said = lending.awaited(self.rank, self.world_size)
                if said is not None:
                    raise UnavailableError(
                        f"table '{self._table.name}': {said}", reason=RANK_SILENT
                    ) from None

    def _take(self, batch_size: int) -> Taken | None:
        return self._table.take(
            batch_size or None,
            self._where,
            rank=self.rank,
            world_size=self.world_size,
            learner=self._learner,
        )


class MixedFeed(Feed):
    """Batches with rows of several tables, each a fixed number; those of one table lie together.

    Args:
        fractions: The part of a batch that comes from each table.
        batch_size: Transitions in a batch.
        where: What a transition must be to be in a batch; None for anything.
        rank: As of `TableFeed`.
        world_size: As of `TableFeed`.

    Raises:
        InvalidRequestError: There can be no such batches; the message names the field.
    """

    def __init__(
        self,
        fractions: Sequence[tuple[BufferTable, float]],
        batch_size: int,
        where: Where | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__([table for table, _ in fractions], where, rank, world_size)
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise InvalidRequestError(f"fractions: expected each table once, got {names}")
        for table in self.tables:
            if not table.samples_transitions:
                raise InvalidRequestError(
                    f"fractions: table '{table.name}' does not sample single transitions"
                )
        self._fractions = [fraction for _, fraction in fractions]
        self._batch_size = batch_size
        self.check(batch_size)
        lengths = {table.sampler.length for table in self.tables}
        if len(lengths) > 1:
            raise InvalidRequestError(
                f"fractions: expected sequences of one length, got {sorted(lengths)}"
            )

    def check(self, batch_size: int) -> None:
        """Checks that each table serves its part of such batches at some time; see `Feed.check`."""
        for table, count in self._counts(batch_size):
            _check(table, count, self._where)

    def _counts(self, batch_size: int) -> list[tuple[BufferTable, int]]:
        names = [table.name for table in self.tables]
        counts = split_batch_size(self._fractions, batch_size, names)
        return list(zip(self.tables, counts, strict=True))

    async def next(self, patience_s: float = 0.0, *, batch_size: int = 0) -> Taken:
        """Waits until every table has its part; see `Feed.next`."""
        wanted = self._counts(batch_size or self._batch_size)
        while True:
            lacking = [part for part in wanted if not part[0].offers(part[1], self._where)]
            if not lacking:
                break
            table, count = lacking[0]
            await table.rendezvous.wait_for(
                partial(self._offered, table, count), patience_s=patience_s
            )
        parts = []
        for table, count in wanted:
            taken = table.take(count, self._where, rank=self.rank, world_size=self.world_size)
            assert taken is not None  # it was offered, and nothing has run since
            parts.append(taken)
        batch = _mixed([table.name for table in self.tables], parts)
        for table, part in zip(self.tables, parts, strict=True):
            table.copied(part)  # but the memory of the batch is counted by its parts
        return batch

    def _offered(self, table: BufferTable, count: int) -> bool | None:
        return table.offers(count, self._where) or None


def _check(table: BufferTable, batch_size: int, where: Where | None) -> None:
    """Checks that a table can serve such batches at some time."""
    name = table.name
    if where is not None and not table.samples_transitions:
        raise InvalidRequestError(f"where: table '{name}' does not sample single transitions")
    if table.serves_rollouts:
        if batch_size:
            raise InvalidRequestError(
                f"batch_size {batch_size}: table '{name}' sends whole rollouts, ask for 0"
            )
        return
    if batch_size < 1:
        raise InvalidRequestError(f"table '{name}' needs a batch_size of at least 1")
    if batch_size > table.capacity:
        raise InvalidRequestError(
            f"batch_size {batch_size}: table '{name}' never holds more than {table.capacity} "
            "(buffer.capacity)"
        )
    limiter, length = table.limiter, table.sampler.length
    if limiter is not None and batch_size * length > limiter.most_at_once:
        key = "error_buffer" if limiter.queue_size is None else "queue_size"
        raise InvalidRequestError(
            f"batch_size {batch_size}: buffer.rate_limiter.{key} of table '{name}' allows at most "
            f"{math.floor(limiter.most_at_once / length)} at once, or both sides would wait for "
            "each other"
        )


def split_batch_size(
    fractions: Sequence[float], batch_size: int, names: Sequence[str]
) -> list[int]:
    """Returns how many rows of a batch come from each table; they add up to the batch.

    What does not divide goes to the largest remainders, the first of equal ones.

    Raises:
        InvalidRequestError: The fractions are no parts of 1, or one is less than a row.
    """
    for name, fraction in zip(names, fractions, strict=True):
        if not (math.isfinite(fraction) and 0 < fraction <= 1):
            raise InvalidRequestError(
                f"fractions: expected more than 0 and at most 1, got {fraction:g} of table '{name}'"
            )
    if abs(sum(fractions) - 1) > 1e-6:
        raise InvalidRequestError(f"fractions: expected a sum of 1, got {sum(fractions):g}")
    exact = [fraction * batch_size for fraction in fractions]
    # 0.1 * 30 is a little more than 3, 0.29 * 100 a little less than 29.
    counts = [math.floor(round(share, 6)) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - round(exact[i], 6))
    for i in by_rest[: batch_size - sum(counts)]:
        counts[i] += 1
    for name, fraction, count in zip(names, fractions, counts, strict=True):
        if not count:
            raise InvalidRequestError(
                f"fractions: {fraction:g} of a batch_size of {batch_size} is no row of table "
                f"'{name}'; ask for larger batches"
            )
    return counts


def _mixed(names: Sequence[str], parts: Sequence[Taken]) -> Taken:
    """Joins the parts of a batch; its metadata tell which row is of which table."""
    columns = [dict(part.sample) for part in parts]
    sizes = [len(next(iter_arrays(part["reward"]))) for part in columns]
    for name in ("policy_action", *_PRIORITISED):
        if any(name in part for part in columns):
            for part, size in zip(columns, sizes, strict=True):
                part.setdefault(name, _default(name, part, size))
    return Taken(
        sum(part.transitions for part in parts),
        {
            "tables": list(names),
            "table_index": np.repeat(np.arange(len(names), dtype=np.int32), sizes),
        },
        sample=_joined(names, columns),
        nbytes=sum(part.nbytes for part in parts),
        units=sum(part.units for part in parts),
        parts=parts,
    )


def _default(name: str, part: Mapping[str, Any], size: int) -> Any:
    if name == "policy_action":  # without a column of its own, it was executed
        return part["action"]
    return np.ones(size, np.float32) if name == "sample_weight" else np.full(size, -1, np.int64)


def _joined(names: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the rows of several tables, one after the other.

    Raises:
        PreconditionError: The tables hold different columns.
    """
    layouts = {name: Layout.of_value(value, name, lead=1) for name, value in columns[0].items()}
    leaves: dict[str, list[list[Any]]] = {name: [] for name in layouts}
    for table, part in zip(names, columns, strict=True):
        if part.keys() != layouts.keys():
            differ = sorted(part.keys() ^ layouts.keys())
            raise PreconditionError(
                f"fractions: tables '{names[0]}' and '{table}' differ in the columns {differ}"
            )
        for name, value in part.items():
            said = layouts[name].difference(Layout.of_value(value, name, lead=1))
            if said:
                raise PreconditionError(
                    f"fractions: tables '{names[0]}' and '{table}' do not mix: {said}"
                )
            lead = (len(next(iter_arrays(value))),)
            leaves[name].append(layouts[name].flatten(value, lead))
    return {
        name: layout.unflatten([np.concatenate(same) for same in zip(*leaves[name], strict=True)])
        for name, layout in layouts.items()
    }
