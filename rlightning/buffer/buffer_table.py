"""One buffer in an event loop: writers that wait for room, learners that wait for batches."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlightning.buffer.base_buffer import DataBuffer
from rlightning.buffer.builder import build_data_buffer
from rlightning.buffer.parts import joined
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.rollouts import Rollout
from rlightning.buffer.sampler import AllDataSampler
from rlightning.buffer.utils.layout import iter_arrays
from rlightning.buffer.where import Where
from rlightning.errors import (
    BufferEmptyError,
    DeadlineExceededError,
    InvalidRequestError,
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
)
from rlightning.types import EnvMeta
from rlightning.utils.config import BufferConfig
from rlightning.utils.memory import MemoryPool
from rlightning.utils.waiting import wait_within

PRODUCER_SILENT = "PRODUCER_SILENT"
"""Reason of the error that tells a learner of a producer that sends nothing."""

# A loop that wakes so much later than it wanted to has not run meanwhile.
_STOOD_STILL_NS = 10**9


@dataclass
class Producer:
    """A writer and when it was last heard.

    Attributes:
        env_id: Id of the env whose rows it writes.
        writer_id: Id of the writer.
        heard_ns: When something of it came last, by the monotonic clock.
        waiting: Messages of it that wait for room.
    """

    env_id: str
    writer_id: str
    heard_ns: int = field(default_factory=time.monotonic_ns)
    waiting: int = 0


@dataclass(frozen=True)
class Taken:
    """A batch on its way to a learner.

    Attributes:
        transitions: Number of transitions in it.
        metadata: What it is made of.
        rollout: The rollout that it is; None if it is a sample, and its rows stay where they are.
        sample: The columns of a sample.
        nbytes: Size of the columns in bytes.
    """

    transitions: int
    metadata: Mapping[str, Any]
    rollout: Rollout | None = None
    sample: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    def columns(self) -> dict[str, Any]:
        """Returns the columns; for a rollout as `Rollout.columns` does, from any thread."""
        return dict(self.sample) if self.rollout is None else self.rollout.columns()


class BufferTable:
    """A named buffer that writers and learners of one event loop share.

    Args:
        name: Its name.
        config: Section `buffer` of the configuration.

    Attributes:
        name: Its name.
        buffer: The buffer itself.
        sampled_total: Transitions handed to learners.
        transit: Memory for what is on its way: messages that wait for room, and sampled batches.

    Raises:
        ConfigError: The configuration asks for what the buffer does not offer.
    """

    def __init__(self, name: str, config: BufferConfig) -> None:
        self.name = name
        self.buffer: DataBuffer = build_data_buffer(config)
        self.buffer.init()
        self.sampled_total = 0
        self.transit = MemoryPool(self.buffer.max_bytes // 2)
        self._timeout_ns = int(config.producer_timeout_s * 1e9)
        self._producers: dict[str, Producer] = {}
        # Who wrote last when nobody does any more.
        self._last = Producer("", "")
        self._room = asyncio.Event()
        self._ready = asyncio.Event()

    @property
    def serves_rollouts(self) -> bool:
        """Whether batches are whole rollouts, which leave the buffer."""
        return isinstance(self.buffer, RolloutBuffer)

    @property
    def samples_transitions(self) -> bool:
        """Whether batches are drawn from single transitions, of which `where` can choose."""
        return not self.serves_rollouts and self.buffer.config.storage.unit == "transition"

    @property
    def producers(self) -> Mapping[str, Producer]:
        """The writers by env id."""
        return self._producers

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
            rows = sum(group.rows for group in rollouts.groups.values())
            return rows * rollouts.length * rollouts.max_rollouts
        return self.buffer.config.capacity

    def stats(self) -> dict[str, Any]:
        """Returns counters and the state of each producer, for people."""
        now = time.monotonic_ns()
        stats: dict[str, Any] = {
            **self.buffer.counters.to_dict(),
            "producers": {
                env_id: {
                    "writer_id": producer.writer_id,
                    "heard_s": (now - producer.heard_ns) / 1e9,
                    "waiting": producer.waiting,
                }
                for env_id, producer in self._producers.items()
            },
        }
        if isinstance(self.buffer, RolloutBuffer):
            rollouts = self.buffer.rollouts
            stats |= {
                "rollouts_total": rollouts.formed,
                "rollouts_ready": rollouts.ready,
                "rollouts_held": rollouts.held,
            }
        return stats

    # Writing.

    def open_writer(self, meta: EnvMeta, writer_id: str) -> None:
        """Lets a writer bring the rows of an env; it takes over from the one before it.

        What comes is not joined to what came before, unless it is the same writer.

        Raises:
            ConfigError: A space of the env cannot be stored.
            StorageFullError: Its rows need more memory than there is left.
        """
        env_id = meta.env_id or ""
        producer = self._producers.get(env_id)
        if producer is None or producer.writer_id != writer_id:
            try:
                self.buffer.open_group(meta)
            except StorageFullError:
                if producer is not None:  # what it had made room for this one
                    self.close_writer(env_id, producer.writer_id)
                raise
            self._producers[env_id] = Producer(env_id, writer_id)

    def close_writer(self, env_id: str, writer_id: str) -> None:
        """Takes note that a writer will not come back: nobody waits for its rows any more."""
        producer = self._producers.get(env_id)
        if producer is not None and producer.writer_id == writer_id:
            self._last = self._producers.pop(env_id)
            self.buffer.close_group(env_id)
            self._changed()

    def try_insert(self, env_id: str, items: Sequence[Item]) -> bool:
        """Stores items of one env, all or none.

        Returns:
            False if there is no room for them yet.

        Raises:
            InvalidRowError: One does not fit; the message names the field.
            StorageFullError: The storage does not overwrite, and is full.
        """
        prepared = self.buffer.prepare(env_id, items)
        if not self.buffer.has_room(prepared):
            return False
        self.buffer.commit(prepared)
        self._producers[env_id].heard_ns = time.monotonic_ns()
        if self._has_batch():
            self._ready.set()
        return True

    def _has_batch(self) -> bool:
        return not isinstance(self.buffer, RolloutBuffer) or self.buffer.rollouts.ready > 0

    async def wait_room(self) -> None:
        """Returns when there may be more room than now."""
        self._room.clear()
        await self._room.wait()

    def refuse(self, env_id: str) -> None:
        """Takes note that an item of an env was not stored: nothing is joined across it."""
        self.buffer.break_group(env_id)

    # Sampling.

    def take(self, batch_size: int | None = None, where: Where | None = None) -> Taken | None:
        """Returns a batch if there is one.

        Args:
            batch_size: Transitions in it, for a buffer that does not serve rollouts.
            where: What a transition of it must be, for a buffer that samples transitions.

        Raises:
            InvalidRequestError: The transitions have no such column as `where` needs.
            ResourceExhaustedError: So large a sample never fits into the memory for batches.
        """
        buffer = self.buffer
        if isinstance(buffer, RolloutBuffer):
            rollout = buffer.rollouts.take()
            if rollout is None:
                return None
            metadata = {
                "env_ids": rollout.env_ids,
                "rows": rollout.rows,
                "rollout": rollout.index,
            }
            taken = Taken(rollout.transitions, metadata, rollout, nbytes=rollout.nbytes)
        else:
            if self._available(where) < max(1, batch_size or 1):
                return None
            whole = batch_size is None or isinstance(buffer.sampler, AllDataSampler)
            count = buffer.size() if whole else batch_size or 0
            needed = self.transit_bytes(count)
            if needed > self.transit.max_bytes:
                raise ResourceExhaustedError(
                    f"batch_size: {self._most_transitions(count)} transitions of "
                    f"{buffer.row_bytes} bytes need {needed} bytes to be sent; "
                    f"half of buffer.max_bytes allows {self.transit.max_bytes}",
                    reason="BATCH_TOO_LARGE",
                )
            if not self.transit.take(needed):
                return None
            try:
                (batch,) = buffer.sample(batch_size, where=where)
            except BufferEmptyError:  # nothing is long enough for a sequence yet
                self.transit.give_back(needed)
                return None
            columns, metadata = joined(batch)
            leaves = list(iter_arrays(columns))
            nbytes = sum(leaf.nbytes for leaf in leaves)
            taken = Taken(columns["reward"].size, metadata, None, columns, nbytes)
            weakref.finalize(taken, self._sent, needed).atexit = False
        self.sampled_total += taken.transitions
        return taken

    def _available(self, where: Where | None) -> int:
        """Returns how many units a batch can be drawn from."""
        if where is None or not self.buffer.size():
            return self.buffer.size()
        try:
            return int(where.allowed(self.buffer.storages[0].container).sum())
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def transit_bytes(self, count: int) -> int:
        """Returns the memory for so many units on their way: as columns, and encoded."""
        return 2 * self._most_transitions(count) * self.buffer.row_bytes

    def _most_transitions(self, count: int) -> int:
        """Returns how many transitions a sample of so many units has at most."""
        buffer = self.buffer
        longest = buffer.sampler.length if buffer.sampler is not None else 1
        if buffer.config.storage.unit == "episode":
            registries = (s.container.episode_registry for s in buffer.storages.values())
            longest = max(int(registry.lengths.max(initial=0)) for registry in registries)
        return count * longest

    def _sent(self, nbytes: int) -> None:
        self.transit.give_back(nbytes)
        self._ready.set()  # a learner may wait for the memory

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
            patience_s: For how long a silent producer is not complained about, in seconds.

        Raises:
            DeadlineExceededError: There was none in time.
            UnavailableError: A producer has sent nothing for `producer_timeout_s`, and holds the
                others up; reason `PRODUCER_SILENT`, the message names it.
        """
        begun = time.monotonic_ns()
        deadline = None if timeout_s is None else begun + int(timeout_s * 1e9)
        patient_until = begun + int(patience_s * 1e9)
        while (taken := self.take(batch_size, where)) is None:
            now = time.monotonic_ns()
            if deadline is not None and now >= deadline:
                raise DeadlineExceededError(
                    f"no batch in table '{self.name}' within {timeout_s:g} s"
                )
            alarm = max(self._silent_at(), patient_until)
            if now >= alarm:
                raise UnavailableError(self._silence(now), reason=PRODUCER_SILENT)
            wake = alarm if deadline is None else min(alarm, deadline)
            self._ready.clear()
            try:
                await wait_within(self._ready.wait(), (wake - now) / 1e9)
            except asyncio.TimeoutError:
                if time.monotonic_ns() - wake > _STOOD_STILL_NS:
                    # This process was stopped: what the producers sent has not been read yet.
                    patient_until = time.monotonic_ns() + self._timeout_ns
        return taken

    def release(self, taken: Taken) -> None:
        """Takes note that a learner has a batch: a rollout makes room for others."""
        if taken.rollout is not None and isinstance(self.buffer, RolloutBuffer):
            self.buffer.rollouts.release(taken.rollout)
            self._changed()

    def release_ready(self, index: int) -> None:
        """Takes note that a rollout that was given back was used all the same."""
        if isinstance(self.buffer, RolloutBuffer) and self.buffer.rollouts.release_ready(index):
            self._changed()

    def give_back(self, taken: Taken) -> None:
        """Takes note that nobody has a batch that was taken: a rollout is for the next learner."""
        self.sampled_total -= taken.transitions
        if taken.rollout is not None and isinstance(self.buffer, RolloutBuffer):
            self.buffer.rollouts.give_back(taken.rollout)
            self._ready.set()

    def clear(self) -> int:
        """Drops what is stored; returns how many transitions."""
        before = self.buffer.size()
        self.buffer.clear()
        self._changed()
        return before - self.buffer.size()

    def _changed(self) -> None:
        self._room.set()
        self._ready.set()

    # Producers that fall silent.

    def _silent_at(self) -> int:
        """Returns when there is something to complain about, by the monotonic clock."""
        heard = [producer.heard_ns for producer in self._producers.values() if not producer.waiting]
        if not self._producers:
            since = self._last.heard_ns
        elif not heard or (len(heard) < len(self._producers) and not self.serves_rollouts):
            since = time.monotonic_ns()
        else:
            # Every producer holds a rollout up; samples go on as long as one of them writes.
            since = min(heard) if self.serves_rollouts else max(heard)
        return since + self._timeout_ns

    def _silence(self, now: int) -> str:
        if not self._producers:
            who = (
                f"the last one was {_name(self._last)}, heard {_ago(now, self._last)} ago"
                if self._last.env_id
                else "there has been none since the start"
            )
            return f"no producer writes to table '{self.name}'; {who}"
        silent = [
            f"{_name(producer)}, last heard {_ago(now, producer)} ago"
            for producer in self._producers.values()
            if not producer.waiting and now - producer.heard_ns >= self._timeout_ns
        ]
        return f"table '{self.name}' waits for silent producers: {'; '.join(silent)}"


def _name(producer: Producer) -> str:
    return f"env {producer.env_id!r} (writer {producer.writer_id})"


def _ago(now: int, producer: Producer) -> str:
    return f"{(now - producer.heard_ns) / 1e9:.1f} s"
