"""A buffer in the process of its writers and its learner: no network, the same table."""

from __future__ import annotations

import uuid

from rlightning.buffer.arguments import check_shards, refuse_data_dir
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rendezvous import BLOCKED
from rlightning.buffer.taken import Taken
from rlightning.errors import ConfigError, PreconditionError, ReplayError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig
from rlightning.wire import Batch


class LocalBuffer:
    """What a buffer server does, for actors and a learner of the same event loop.

    Args:
        config: Section `buffer` of the configuration.

    Attributes:
        table: The table that it keeps.

    Raises:
        ConfigError: The section has several tables or a data directory, or asks for what the buffer
            does not offer.
    """

    def __init__(self, config: BufferConfig) -> None:
        refuse_data_dir(config)
        if config.tables:
            raise ConfigError("buffer.tables: only a buffer server has several tables")
        check_shards(config)
        self.table = BufferTable("default", config)
        self._lent: Taken | None = None
        self._batches = 0

    def writer(self, meta: EnvMeta) -> LocalWriter:
        """Returns where an actor puts what one group of rows sees and is answered.

        Raises:
            ConfigError: The env has no id, or a space that cannot be stored.
        """
        if not meta.env_id:
            raise ConfigError("a writer needs the id of its env")
        return LocalWriter(self.table, meta)

    async def next_batch(
        self, timeout_s: float | None = None, *, batch_size: int | None = None
    ) -> Batch:
        """Waits for the next batch; the one before it is given up by that.

        Args:
            timeout_s: How long, in seconds; None: for ever.
            batch_size: Transitions in a batch of a buffer that does not serve rollouts.

        Returns:
            The batch; the columns of a rollout are read-only, and valid until the next call.

        Raises:
            DeadlineExceededError: There was none in time.
            UnavailableError: A producer is silent; the message names it.
        """
        self.ack()
        taken = self._lent = await self.table.next(timeout_s, batch_size=batch_size)
        self._batches += 1
        return Batch(self._batches, taken.columns(), dict(taken.metadata))

    def ack(self) -> None:
        """Gives up the last batch: a rollout makes room for others. Safe to repeat."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self.table.release(lent)


class LocalWriter:
    """Stores what one group of rows saw and was answered. `LocalBuffer.writer` makes it."""

    def __init__(self, table: BufferTable, meta: EnvMeta) -> None:
        self._table = table
        self._env_id = meta.env_id or ""
        self._writer_id = uuid.uuid4().hex
        table.open_writer(meta, self._writer_id)

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        """Stores one item, once there is room for it.

        Args:
            env_ret: What the env returned.
            response: The policy's answer to it; None closes the rows that it ends.
            new_segment: Nothing before this item is joined to it.

        Raises:
            InvalidRowError: It does not fit; the message names the field. Later items are not
                joined to earlier ones.
            ValueError: The response is of another env; likewise.
            TypeError: Either is of another type; likewise.
            PreconditionError: Inserts wait for samples, and samples for inserts; the message has
                the counters. The item was not stored.
        """
        items = [Item(env_ret, response, new_segment)]
        table, place = self._table, self._table.rendezvous
        producer = table.producers.of(self._env_id, self._writer_id)
        if producer is None:
            raise ReplayError(f"the writer of env {self._env_id!r} was closed, or has a successor")
        try:
            while not table.try_insert(self._env_id, items):
                place.hold(self._env_id, self._writer_id, 1, place)
                if place.blocked:
                    raise PreconditionError(place.blocked, reason=BLOCKED)
                await place.wait_room()
        except (ReplayError, TypeError, ValueError):
            table.refuse(self._env_id)
            raise
        finally:
            place.hold(self._env_id, self._writer_id, 0, None)

    def close(self) -> None:
        """Says that nothing more comes: nobody waits for these rows any more."""
        self._table.close_writer(self._env_id, self._writer_id)
