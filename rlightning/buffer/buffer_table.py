"""One buffer in an event loop: writers that wait for room, learners that wait for batches."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlightning.buffer.arguments import check_table
from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.batch_memory import LEAST_BYTES, BatchMemory
from rlightning.buffer.builder import build_data_buffer
from rlightning.buffer.episodes import EpisodeGroup
from rlightning.buffer.lending import Lending, QueueLending, RolloutLending
from rlightning.buffer.limiter import RateLimiter
from rlightning.buffer.parts import joined
from rlightning.buffer.pipeline import Item
from rlightning.buffer.producers import Producers
from rlightning.buffer.rendezvous import Rendezvous
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.sampler import AllDataSampler, PrioritisedSampler, Sampler
from rlightning.buffer.take_once import TakeOnce
from rlightning.buffer.taken import Taken
from rlightning.buffer.utils.storage import Prepared
from rlightning.buffer.where import Where
from rlightning.errors import (
    InvalidRequestError,
    InvalidRowError,
    ReplayError,
    ResourceExhaustedError,
    StorageFullError,
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

    def used(self, rank: int, batch_id: int, *, returned: bool) -> None:
        """It was used, perhaps after it was given back."""

    def given_back(self, taken: Taken) -> None:
        """It was given back."""


class BufferTable:
    """A named buffer that writers and learners of one event loop share.

    Args:
        name: Its name.
        config: Section `buffer` of the configuration.

    Attributes:
        name: Its name.
        buffer: The buffer itself.
        limiter: Lets inserts and samples wait for each other; None if they do not.
        queue: Hands transitions out once; None if they are sampled again and again.
        lending: What is known of batches that leave the table; None if they stay.
        producers: The writers by env id.
        sampled_total: Transitions handed to learners.
        transit: Memory for what is on its way: messages that wait for room, and sampled batches.
        rendezvous: Where both sides wait.
        journal: Is told what happens, so that it can be done again; None for nobody.

    Raises:
        ConfigError: The configuration asks for what the buffer does not offer.
    """

    def __init__(self, name: str, config: BufferConfig) -> None:
        self.name = name
        check_table(config)
        self.buffer: DataBuffer = build_data_buffer(_own_buffer(config))
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

    @property
    def max_items(self) -> int:
        """How many items of an env can be stored together at most; 0 means any number."""
        limits = [storage.max_items for storage in self.buffer.storages.values()]
        return min(filter(None, limits), default=0)

    @property
    def capacity(self) -> int:
        """How many transitions it can hold; for rollouts, of the envs that there are now."""
        if isinstance(self.buffer, RolloutBuffer):
            rollouts = self.buffer.rollouts
            return self.rollout_rows * rollouts.length * rollouts.max_rollouts
        return self.buffer.config.capacity

    @property
    def rollout_rows(self) -> int:
        """How many rows a rollout of the envs that there are now has; 0 without rollouts."""
        if not isinstance(self.buffer, RolloutBuffer):
            return 0
        return sum(group.rows for group in self.buffer.rollouts.groups.values())

    def stats(self) -> dict[str, Any]:
        """Returns counters and the state of each producer, for people."""
        stats: dict[str, Any] = {
            **self.buffer.counters.to_dict(),
            "transitions": self.buffer.num_transitions(),
            "producers": self.producers.stats(),
            "readers": self.rendezvous.readers,
        }
        if isinstance(self.buffer, RolloutBuffer):
            rollouts = self.buffer.rollouts
            stats |= {
                "rollouts_total": rollouts.formed,
                "rollouts_ready": rollouts.ready,
                "rollouts_held": rollouts.held,
            }
        if (limiter := self._counted()) is not None:
            stats["limiter"] = limiter.describe(self.buffer.size())
            stats["blocked_total"] = self.rendezvous.blocked_total
        if self.queue is not None:
            stats["queue_unacked"] = self.queue.taken
        return stats

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

    def limiter_state(self) -> dict[str, int] | None:
        """Returns what the limiter has to know after a restart; None if there is none."""
        limiter = self._counted()
        return None if limiter is None else limiter.state()

    def restore_limiter(self, state: Mapping[str, int] | None) -> None:
        """Lets the limiter go on from a state, with what is stored now; None if there was none."""
        if self.limiter is not None and state is not None:
            self.limiter.restore(state)
            self._pushed = self.buffer.storages[0].container.pushed_units

    # Writing.

    def open_writer(self, meta: EnvMeta, writer_id: str) -> None:
        """Lets a writer bring the rows of an env; it takes over from the one before it.

        What comes is not joined to what came before, unless it is the same writer.

        Raises:
            ConfigError: A space of the env cannot be stored.
            StorageFullError: Its rows need more memory than there is left.
        """
        env_id = meta.env_id or ""
        producer = self.producers.get(env_id)
        if producer is None or producer.writer_id != writer_id:
            if self.journal is not None:
                self.journal.opens(meta, writer_id)
            try:
                self.buffer.open_group(meta)
            except StorageFullError:
                if producer is not None:  # what it had made room for this one
                    self.close_writer(env_id, producer.writer_id)
                raise
            self.producers.add(env_id, writer_id)

    def close_writer(self, env_id: str, writer_id: str) -> None:
        """Takes note that a writer will not come back: nobody waits for its rows any more."""
        if self.producers.of(env_id, writer_id) is not None:
            if self.journal is not None:
                self.journal.closes(env_id, writer_id)
            self.producers.remove(env_id)
            self.buffer.close_group(env_id)
            self.changed()

    def truncate(self, env_id: str) -> int:
        """Ends the open episodes of the rows of an env; returns how many there were.

        Raises:
            KeyError: No data of this env ever came.
        """
        if self.journal is not None:
            self.journal.cuts(env_id)
        count = self.buffer.truncate_group(env_id)
        self.changed()
        return count

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items of one env.

        Raises:
            InvalidRowError: One does not fit; the message names the field.
            StorageFullError: There is no memory for them, or a queue never has room for so many.
        """
        try:
            prepared = self.buffer.prepare(env_id, items)
        except (ReplayError, TypeError, ValueError):
            raise
        except Exception as error:
            raise self._blamed(error, env_id) from error
        count = self._pushes(prepared)
        if self.queue is not None and count > self.capacity:
            raise StorageFullError(
                f"env {env_id!r}: episodes of {count} transitions have ended; buffer.capacity "
                f"allows {self.capacity}"
            )
        return prepared

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether checked items can be stored now, rather than once somebody has sampled."""
        limiter = self._counted()
        if limiter is not None and not limiter.may_insert(self.buffer.size()):
            return False
        if self.queue is not None and not self.queue.has_room(self._pushes(prepared)):
            return False
        return self.buffer.has_room(prepared)

    def check_full(self, prepared: Prepared) -> None:
        """Checks that a storage that does not overwrite has room for what ends with these items.

        Raises:
            StorageFullError: It has not.
        """
        container = self.buffer.storages[0].container
        if container.mode == "fixed" and (count := self._pushes(prepared)) > container.room:
            raise StorageFullError(
                f"table '{self.name}': {count} transitions for a storage that has room for "
                f"{container.room} of {container.capacity}"
            )

    @staticmethod
    def _pushes(prepared: Prepared) -> int:
        group = prepared.group
        return group.pushes(prepared.steps) if isinstance(group, EpisodeGroup) else 0

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items.

        Raises:
            StorageFullError: The storage does not overwrite, and is full.
            InvalidRowError: A function of the user raised; the episode that ended is lost.
        """
        env_id = prepared.group.env_id
        try:
            self.buffer.commit(prepared)
        except (ReplayError, TypeError, ValueError):
            raise
        except Exception as error:
            raise self._blamed(error, env_id) from error
        self.producers[env_id].heard_ns = time.monotonic_ns()
        self.rendezvous.moved(ready=self._has_batch())

    def _blamed(self, error: Exception, env_id: str) -> Exception:
        """Returns an error of a function of the user as one that its writer is told."""
        if not self._has_functions:
            return error
        said = f"{type(error).__name__}: {error}"
        return InvalidRowError(f"env {env_id!r}: a function of buffer.functions raised {said}")

    def try_insert(self, env_id: str, items: Sequence[Item]) -> bool:
        """Stores items of one env, all or none.

        Returns:
            False if there is no room for them yet.

        Raises:
            InvalidRowError: One does not fit; the message names the field.
            StorageFullError: The storage does not overwrite, and is full.
        """
        return insert_into((self,), env_id, items) is None

    def _has_batch(self) -> bool:
        return not isinstance(self.buffer, RolloutBuffer) or self.buffer.rollouts.ready > 0

    def refuse(self, env_id: str) -> None:
        """Takes note that an item of an env was not stored: nothing is joined across it."""
        self.buffer.break_group(env_id)

    # Sampling.

    def offers(self, batch_size: int | None, where: Where | None = None) -> bool:
        """Tells whether a batch can be taken now, of a table that does not serve rollouts.

        Raises:
            InvalidRequestError: The transitions have no such column as `where` needs.
            ResourceExhaustedError: So large a sample never fits into the memory for batches.
        """
        buffer = self.buffer
        self._short_of_memory = False
        count = self._units(batch_size)
        if self._available(where) < max(1, batch_size or 1):
            return False
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
        count = 0 if self.serves_rollouts else self._units(batch_size)
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
        return self._on_its_way(replace(taken, sample=columns))

    def _sampled(
        self, batch_size: int | None, where: Where | None, count: int, rank: int, world_size: int
    ) -> Taken:
        with self.sampler.stream(rank, world_size):
            batch = self._drawn(batch_size, where, count)
        columns, metadata = joined(batch)
        if isinstance(self.sampler, PrioritisedSampler):  # for who merges several servers'
            metadata["weight_scale"] = self.sampler.scale
        return self._on_its_way(
            Taken(columns["reward"].size, metadata, sample=columns, units=count)
        )

    def _on_its_way(self, taken: Taken) -> Taken:
        """Returns a batch whose memory is counted for as long as it is there."""
        needed = self.transit_bytes(taken.units)
        transitions = self.buffer.config.storage.unit == "transition" and not taken.leaves
        taken = replace(
            taken, nbytes=needed // 2, reusable=transitions and needed // 2 >= LEAST_BYTES
        )
        if self.transit.take(needed):  # there was room; but perhaps not for one of before a restart
            weakref.finalize(taken, self._sent, needed).atexit = False
        return taken

    def _drawn(self, batch_size: int | None, where: Where | None, count: int) -> Any:
        """Draws a sample, into memory that was used before if there is some."""
        memory = self._memory.take(count)
        if memory is not None:
            try:
                return self.buffer.sample(batch_size, where=where, out=[memory])[0]
            except InvalidRowError:
                pass  # what is stored looks otherwise now
        return self.buffer.sample(batch_size, where=where)[0]

    def copied(self, taken: Taken) -> None:
        """Takes note that the columns of a batch were copied: a sample's are written anew."""
        if taken.reusable:
            self._memory.give_back(len(taken.sample["reward"]), dict(taken.sample), taken.nbytes)
            taken.sample.clear()

    def _units(self, batch_size: int | None) -> int:
        """Returns how many units a batch is made of."""
        if batch_size is None:
            return self.buffer.size() if self.queue is None else self.queue.waiting
        whole = self.queue is None and isinstance(self.sampler, AllDataSampler)
        return self.buffer.size() if whole else batch_size

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
        """Returns how many transitions a sample of so many units has at most."""
        buffer = self.buffer
        longest = self.sampler.length
        if buffer.config.storage.unit == "episode":
            registries = (s.container.episode_registry for s in buffer.storages.values())
            longest = max(int(registry.lengths.max(initial=0)) for registry in registries)
        return count * longest

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
            self.journal.used(taken.rank, taken.batch_id, returned=False)
        self.lending.release(taken)
        self.changed()

    def release_returned(self, rank: int, batch_id: int) -> None:
        """Takes note that a batch that was given back was used all the same."""
        if self.lending is not None and self.lending.release_returned(rank, batch_id):
            if self.journal is not None:
                self.journal.used(rank, batch_id, returned=True)
            self.changed()

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

    def orphan(self) -> None:
        """Takes note that the clients of before are gone: nobody acks what they have."""
        self.producers.orphan()
        if self.lending is not None:
            for taken in reversed(tuple(self.lending.lent.values())):
                self.give_back(taken)

    def update_priorities(self, indices: Any, priorities: Any, generations: Any) -> int:
        """Sets priorities of transitions; see `DataBuffer.update_priorities`."""
        updated = self.buffer.update_priorities(indices, priorities, generations)
        if self.journal is not None:
            self.journal.prioritised(indices, priorities, generations)
        return updated

    def discard(self, env_id: str) -> int:
        """Removes an episode of an env, as `DataBuffer.discard_episode`; its caller writes it down.

        Raises:
            KeyError: No data of this env ever came.
            ReplayError: The env makes rollouts.
        """
        discarded = self.buffer.discard_episode(env_id)
        self.changed()
        return discarded

    def clear(self) -> int:
        """Drops what is stored; returns how many transitions."""
        before = self.buffer.num_transitions()
        self.buffer.clear()
        if self.journal is not None:
            self.journal.cleared()
        self.changed()
        return before - self.buffer.num_transitions()

    def reset(self) -> None:
        """Makes the table as it was at first: nothing is stored, and nobody writes."""
        self.buffer.init()
        self._set_lending()
        self.sampled_total = self._pushed = 0
        if self.limiter is not None:
            self.limiter.restore({"inserted": 0, "sampled": 0})
        self.producers.clear()

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


def insert_into(
    tables: Sequence[BufferTable],
    env_id: str,
    items: Sequence[Item],
    on_fit: Callable[[], None] | None = None,
    *,
    again: bool = False,
) -> BufferTable | None:
    """Stores items of one env in several tables, in all or in none.

    Args:
        tables: The tables.
        env_id: Id of the env.
        items: The items.
        on_fit: Called when it is known that there is room for them, and nothing of them is stored.
        again: Whether there was room for them once, which is not asked for again.

    Returns:
        None if they are stored; else a table that has no room for them yet.

    Raises:
        InvalidRowError: One does not fit; the message names the field.
        StorageFullError: A storage does not overwrite, and is full.
    """
    prepared = [table.prepare(env_id, items) for table in tables]
    for table, checked in zip(tables, prepared, strict=True):
        if not (again or table.has_room(checked)):
            return table
    if len(tables) > 1:
        for table, checked in zip(tables, prepared, strict=True):
            table.check_full(checked)
    if on_fit is not None:
        on_fit()
    for table, checked in zip(tables, prepared, strict=True):
        table.commit(checked)
    return None
