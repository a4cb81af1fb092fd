"""One buffer in an event loop: writers that wait for room, learners that wait for batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlightning.buffer.episodes import EpisodeGroup
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.sampled_table import SampledTable
from rlightning.buffer.utils.storage import Prepared
from rlightning.errors import (
    ConfigError,
    InvalidRowError,
    ReplayError,
    StorageFullError,
)
from rlightning.types import EnvMeta


class BufferTable(SampledTable):
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
            except (ConfigError, StorageFullError):
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
        """Drops what is stored; returns how many transitions. The limiter begins anew."""
        before = self.buffer.num_transitions()
        self.buffer.clear()
        if (limiter := self._counted()) is not None:
            limiter.restore({"inserted": 0, "sampled": 0})
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
