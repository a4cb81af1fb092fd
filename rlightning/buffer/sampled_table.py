"""What learners see of a table: batches, and who waits for them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, Protocol

from rlightning.buffer.arguments import check_table
from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.batch_memory import LEAST_BYTES, BatchMemory
from rlightning.buffer.builder import build_data_buffer
from rlightning.buffer.lending import Lending, QueueLending, RolloutLending
from rlightning.buffer.limiter import RateLimiter
from rlightning.buffer.parts import joined
from rlightning.buffer.producers import Producers
from rlightning.buffer.rendezvous import Rendezvous
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.sampler import AllDataSampler, PrioritisedSampler, Sampler
from rlightning.buffer.take_once import TakeOnce
from rlightning.buffer.taken import Taken
from rlightning.buffer.utils.layout import iter_arrays
from rlightning.buffer.where import Where
from rlightning.errors import (
    InvalidRequestError,
    InvalidRowError,
    ResourceExhaustedError,
)
from rlightning.types import EnvMeta
from rlightning.utils.config import BufferConfig, DurabilityConfig
from rlightning.utils.memory import MemoryPool


class Journal(Protocol):
    """Writes down what happens to a table, apart from what the requests of clients tell."""

    def opens(self, meta: EnvMeta, writer_id: str) -> None:
        """A writer will bring the rows of an env, unless that fails."""

    def closes(self, env_id: str, writer_id: str) -> None:
        """It will not bring any more."""

    def cuts(self, env_id: str) -> None:
        """The open episodes of an env are about to be ended from outside."""

    def cleared(self) -> None:
        """The table was emptied."""

    def prioritised(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Priorities were set."""

    def drawn(self, rank: int, world_size: int) -> None:
        """A batch that stays was drawn, for one of several learners."""

    def lent(self, taken: Taken) -> None:
        """A batch that leaves was lent to a learner."""

    def used(self, rank: int, world_size: int, batch_id: int, *, returned: bool) -> None:
        """It was used, perhaps after it was given back."""

    def given_back(self, taken: Taken) -> None:
        """It was given back."""


class SampledTable:
    """A named buffer that learners of one event loop take batches from; see `BufferTable`.

    Args:
        name: Its name.
        config: Section `buffer` of the configuration.

    Raises:
        ConfigError: The configuration asks for what the buffer does not offer.
    """

    def __init__(self, name: str, config: BufferConfig) -> None:
        self.name = name
        check_table(config)
        self.buffer: DataBuffer = build_data_buffer(config.type, _own_buffer(config))
        self.buffer.init()
        self.limiter = None if config.rate_limiter is None else RateLimiter(config.rate_limiter)
        self.queue: TakeOnce | None = None
        self.lending: Lending | None = None
        self._set_lending()
        self.producers = Producers(config.producer_timeout_s, all_needed=self.serves_rollouts)
        self.rendezvous = Rendezvous(
            name,
            self.producers,
            counters=None if self.limiter is None else self._counters,
            may_move=self._awaits_more_than_data,
        )
        self.sampled_total = 0
        self.journal: Journal | None = None
        self.transit = MemoryPool(self.buffer.max_bytes // 2)
        self._memory = BatchMemory(self.buffer.max_bytes // 8)
        self._has_functions = any(config.functions.to_dict().values())
        self._short_of_memory = False
        self._pushed = 0  # what the limiter knows of

    def _set_lending(self) -> None:
        if isinstance(self.buffer, RolloutBuffer):
            self.lending = RolloutLending(self.buffer.rollouts)
        elif self.limiter is not None and self.limiter.queue_size is not None:
            self.queue = TakeOnce(self.buffer.storages[0].container)
            self.lending = QueueLending(self.queue)

    @property
    def serves_rollouts(self) -> bool:
        """Whether batches are whole rollouts, which leave the buffer."""
        return isinstance(self.buffer, RolloutBuffer)

    @property
    def samples_transitions(self) -> bool:
        """Whether batches are drawn from single transitions, of which `where` can choose."""
        unit = self.buffer.config.storage.unit
        return not self.serves_rollouts and self.queue is None and unit == "transition"

    @property
    def sampler(self) -> Sampler:
        """What chooses the rows of a batch."""
        assert self.buffer.sampler is not None  # `init` made it
        return self.buffer.sampler

    def _counters(self) -> str:
        counted = self._counted()
        assert counted is not None
        told = counted.describe(self.buffer.size())
        return ", ".join(f"{name} {value:g}" for name, value in told.items())

    def _awaits_more_than_data(self) -> bool:
        """Tells whether a learner that waits may go on without new data."""
        return self._short_of_memory or (self.queue is not None and self.queue.taken > 0)

    def _counted(self) -> RateLimiter | None:
        """Returns the limiter, once it knows of all that was stored."""
        if self.limiter is not None:
            pushed = self.buffer.storages[0].container.pushed_units
            self.limiter.inserted += pushed - self._pushed
            self._pushed = pushed
        return self.limiter

    def offers(self, batch_size: int | None, where: Where | None = None) -> bool:
        """Tells whether a batch can be taken now, of a table that does not serve rollouts.

        Raises:
            InvalidRequestError: The transitions have no such column as `where` needs.
            ResourceExhaustedError: So large a sample never fits into the memory for batches.
        """
        buffer = self.buffer
        self._short_of_memory = False
        if self._available(where) < max(1, batch_size or 1):
            return False
        count = self._units(batch_size, where)
        if (limiter := self._counted()) is not None and not limiter.may_sample(
            buffer.size(), count
        ):
            return False
        needed = self.transit_bytes(count)
        if needed > self.transit.max_bytes:
            raise ResourceExhaustedError(
                f"batch_size: {self._most_transitions(count)} transitions of "
                f"{buffer.row_bytes} bytes need {needed} bytes to be sent; "
                f"half of buffer.max_bytes allows {self.transit.max_bytes}",
                reason="BATCH_TOO_LARGE",
            )
        self._short_of_memory = self.transit.used + needed > self.transit.max_bytes
        return not self._short_of_memory

    def take(
        self,
        batch_size: int | None = None,
        where: Where | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        learner: str = "",
    ) -> Taken | None:
        """Returns a batch if there is one.

        Args:
            batch_size: Transitions in it, for a buffer that does not serve rollouts.
            where: What a transition of it must be, for a buffer that samples transitions.
            rank: Which of several learners it is for.
            world_size: How many learners there are: each draws for itself, and of a rollout each
                gets an equal part of the rows.
            learner: Id of the client that gets it.

        Raises:
            InvalidRequestError: The transitions have no such column as `where` needs.
            ResourceExhaustedError: So large a sample never fits into the memory for batches.
            PreconditionError: The rows of a rollout do not divide by `world_size`.
        """
        if not self.serves_rollouts and not self.offers(batch_size, where):
            return None
        count = 0 if self.serves_rollouts else self._units(batch_size, where)
        if self.lending is None:
            taken = self._sampled(batch_size, where, count, rank, world_size)
            self._count(taken)
            if self.journal is not None:
                self.journal.drawn(rank, world_size)
            return taken
        lent = self.lend(count, rank, world_size, learner)
        return lent if lent is None or lent.queued is None else self.read_lent(lent)

    def lend(self, count: int, rank: int, world_size: int, learner: str) -> Taken | None:
        """Returns a batch that leaves the table; of a queue without its columns.

        Args:
            count: Transitions in it, where it is no rollout.
            rank: As of `take`.
            world_size: As of `take`.
            learner: As of `take`.

        Raises:
            PreconditionError: The rows of a rollout do not divide by `world_size`.
        """
        assert self.lending is not None
        taken = self.lending.take(count, rank, world_size, learner)
        if taken is not None:
            self._count(taken)
            if self.journal is not None:
                self.journal.lent(taken)
        return taken

    def _count(self, taken: Taken) -> None:
        self.sampled_total += taken.transitions
        if self.limiter is not None:
            self.limiter.sampled += taken.units
        self.rendezvous.moved(room=self.limiter is not None)

    def read_lent(self, taken: Taken) -> Taken:
        """Returns a batch of a queue that is lent with its columns."""
        assert taken.queued is not None
        columns = self.buffer.storages[0].container.read_slots(taken.queued.slots)
        needed = self.transit_bytes(taken.units)
        return self._on_its_way(replace(taken, sample=columns, nbytes=needed // 2), needed)

    def _sampled(
        self, batch_size: int | None, where: Where | None, count: int, rank: int, world_size: int
    ) -> Taken:
        with self.sampler.stream(rank, world_size):
            batch = self._drawn(batch_size, where, count)
        columns, metadata = joined(batch)
        if isinstance(self.sampler, PrioritisedSampler):  # for who merges several servers'
            metadata["weight_scale"] = self.sampler.scale
        needed = self.transit_bytes(count)
        transitions = self.buffer.config.storage.unit == "transition"
        taken = Taken(
            next(iter_arrays(columns["reward"])).size,
            metadata,
            sample=columns,
            nbytes=needed // 2,
            units=count,
            reusable=transitions and needed // 2 >= LEAST_BYTES,
        )
        return self._on_its_way(taken, needed)

    def _on_its_way(self, taken: Taken, needed: int) -> Taken:
        """Counts memory for as long as a batch is there; returns the batch."""
        if self.transit.take(needed):  # there was room; but perhaps not for one of before a restart
            weakref.finalize(taken, self._sent, needed).atexit = False
        return taken

    def _drawn(self, batch_size: int | None, where: Where | None, count: int) -> Any:
        """Draws a sample, into memory that was used before if there is some."""
        memory = self._memory.take(count // self.sampler.length)
        if memory is not None:
            try:
                return self.buffer.sample(batch_size, where=where, out=[memory])[0]
            except InvalidRowError:
                pass  # what is stored looks otherwise now
        return self.buffer.sample(batch_size, where=where)[0]

    def copied(self, taken: Taken) -> None:
        """Takes note that the columns of a batch were copied: a sample's are written anew."""
        if taken.reusable:
            rows = len(next(iter_arrays(taken.sample["reward"])))
            self._memory.give_back(rows, dict(taken.sample), taken.nbytes)
            taken.sample.clear()

    def _units(self, batch_size: int | None, where: Where | None) -> int:
        """Returns how many units a batch has: of a sequence, its transitions."""
        whole = self.queue is None and isinstance(self.sampler, AllDataSampler)
        drawn = self._available(where) if batch_size is None or whole else batch_size
        return drawn * self.sampler.length

    def _available(self, where: Where | None) -> int:
        """Returns how many units a batch can be drawn from."""
        if self.queue is not None:
            return self.queue.waiting
        size = self.buffer.size()
        if not size:
            return 0
        container = self.buffer.storages[0].container
        try:
            allowed = None if where is None else where.allowed(container)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        # Sequences may begin again and again, if only at a few transitions.
        if self.sampler.length > 1 and not self.sampler.choices(container, allowed):
            return 0
        return size if allowed is None else int(allowed.sum())

    def transit_bytes(self, count: int) -> int:
        """Returns the memory for so many units on their way: as columns, and encoded."""
        return 2 * self._most_transitions(count) * self.buffer.row_bytes

    def _most_transitions(self, count: int) -> int:
        """Returns how many transitions so many units have at most."""
        buffer = self.buffer
        if buffer.config.storage.unit != "episode":
            return count
        registries = (s.container.episode_registry for s in buffer.storages.values())
        return count * max(int(registry.lengths.max(initial=0)) for registry in registries)

    def _sent(self, nbytes: int) -> None:
        self.transit.give_back(nbytes)
        self.rendezvous.moved(ready=True)  # a learner may wait for the memory

    async def next(
        self,
        timeout_s: float | None = None,
        *,
        batch_size: int | None = None,
        where: Where | None = None,
        patience_s: float = 0.0,
    ) -> Taken:
        """Waits for a batch.

        Args:
            timeout_s: How long, in seconds; None: for ever.
            batch_size: As in `take`.
            where: As in `take`.
            patience_s: As in `Rendezvous.wait_for`.

        Raises:
            DeadlineExceededError: There was none in time.
            UnavailableError: As `Rendezvous.wait_for`.
            PreconditionError: As `Rendezvous.wait_for`.
        """
        return await self.rendezvous.wait_for(
            lambda: self.take(batch_size, where), timeout_s, patience_s=patience_s
        )

    def release(self, taken: Taken) -> None:
        """Takes note that a learner has used a batch: it leaves the buffer."""
        if self.lending is None:
            return
        if self.journal is not None:
            self.journal.used(taken.rank, taken.world_size, taken.batch_id, returned=False)
        self.lending.release(taken)
        self.changed()

    def release_returned(
        self, rank: int, world_size: int, batch_id: int, learner: str | None
    ) -> bool:
        """Takes note that a batch that was given back was used; see `Lending.release_returned`."""
        lending = self.lending
        if lending is None or not lending.release_returned(rank, world_size, batch_id, learner):
            return False
        if self.journal is not None:
            self.journal.used(rank, world_size, batch_id, returned=True)
        self.changed()
        return True

    def give_back(self, taken: Taken) -> None:
        """Takes note that nobody has a batch that was taken: it is for the next learner."""
        self.sampled_total -= taken.transitions
        if self.limiter is not None:
            self.limiter.sampled -= taken.units
        if self.lending is not None:
            if self.journal is not None:
                self.journal.given_back(taken)
            self.lending.give_back(taken)
        self.rendezvous.moved(ready=True)

    def changed(self) -> None:
        """Takes note that something was stored or removed from outside."""
        self.rendezvous.moved(room=True, ready=True)


def _own_buffer(config: BufferConfig) -> BufferConfig:
    """Returns a section without what is none of the business of the buffer of one table.

    That is what only a table has, which other buffer servers are shards beside this one, and what
    a server keeps on disk of all its tables.
    """
    here: dict[str, Any] = {"type": "unified", "num_shards": None, "addresses": [], "nodes": {}}
    in_memory = {name: field.default for name, field in DurabilityConfig.model_fields.items()}
    return config.model_copy(
        update={
            "storage": config.storage.model_copy(update=here),
            "node_affinity_env": False,
            "node_affinity_train": False,
            "rate_limiter": None,
            "tables": {},
            **in_memory,
        }
    )
