"""Several buffer servers as one: a batch is put together from all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from typing_extensions import Self

from rlightning.buffer.parts import joined, split
from rlightning.buffer.remote_buffer import BufferClient, SampleClient, TableStatus
from rlightning.buffer.rendezvous import PRODUCER_SILENT
from rlightning.buffer.shards import Split, merge, pack, split_counts
from rlightning.buffer.utils.layout import iter_arrays
from rlightning.buffer.where import Where
from rlightning.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRowError,
    RemoteError,
    ReplayError,
    UnavailableError,
)
from rlightning.utils.config import BufferConfig, ClientAuthConfig, RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.wire import Batch

logger = logging.getLogger(__name__)

SHARD_MISSING = "SHARD_MISSING"
"""Reason of the error that tells a learner of a buffer server that is away."""

_START_TIMEOUT_S = 30.0
_CONNECT_S = 5.0
_POLL_S = 0.1
_DESCRIBE_S = 1.0


class _Shard:
    """One buffer server of several, as a learner sees it.

    Args:
        index: Its number.
        client: Asks it.
        samples: Samples it.

    Attributes:
        status: Its table when it was asked last; None before, and if it did not answer.
        told: Whether its absence was logged.
    """

    def __init__(self, index: int, client: BufferClient, samples: SampleClient) -> None:
        self.index = index
        self.client = client
        self.samples = samples
        self.status: TableStatus | None = None
        self.told = False
        self._begun_ns = time.monotonic_ns()
        self._connecting: asyncio.Task[None] | None = None
        self._started = False

    @property
    def address(self) -> str:
        """Address of the server."""
        return self.client.address

    @property
    def away_s(self) -> float:
        """For how long there has been no connection, in seconds; 0 while there is one."""
        if not self._started:
            return (time.monotonic_ns() - self._begun_ns) / 1e9
        return self.samples.away_s

    @property
    def started(self) -> bool:
        """Whether there has been a session."""
        return self._started

    def connect(self) -> None:
        """Begins to open the session, however long that takes; returns at once."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        while True:
            try:
                await self.samples.start(_CONNECT_S)
            except (UnavailableError, DeadlineExceededError):
                await asyncio.sleep(_POLL_S)
            else:
                self._started = True
                return

    def check(self) -> None:
        """Raises why there never will be a session, if that is so."""
        task = self._connecting
        if task is not None and task.done() and not task.cancelled() and task.exception():
            raise task.exception() or ReplayError("unreachable")

    def describe_absence(self) -> str:
        """Returns which server is away, and since when."""
        since = datetime.now().astimezone() - timedelta(seconds=self.away_s)
        return (
            f"shard {self.index}, the buffer server at {self.address}, is away since "
            f"{since:%Y-%m-%d %H:%M:%S%z} ({self.away_s:.1f} s)"
        )

    async def close(self) -> None:
        """Ends the connections."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        await asyncio.gather(self.samples.close(), self.client.close())


class ShardedSampleClient:
    """Takes batches that are put together from several buffer servers; as `SampleClient`.

    Of transitions, each server gives a part whose size goes with what it holds, or the same as the
    others (`storage.split`); rows of one server lie side by side. `sample_index` says which server
    a row is of (`shards.unpack`). Of rollouts, each server that has writers gives one, and their
    rows lie side by side. A server that is away is waited for, and after `storage.missing_after_s`
    is an error or is left out (`storage.missing_shards`); when it is back, it takes part again by
    itself. Belongs to one event loop.

    Args:
        config: Section `buffer`: `storage` says where the servers are and what to do.
        table: As of `SampleClient`.
        batch_size: Transitions in a batch; 0 for whole rollouts.
        where: As of `SampleClient`; every server has to have such transitions.
        prefetch: Batches that are fetched ahead, at most 1.
        rpc: Limits and times.
        auth: Token and certificates.
        options: As of `SampleClient`, but for `fractions`.

    Raises:
        ConfigError: Batches shall mix several tables, which one buffer server does by itself.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        table: str = "",
        batch_size: int = 0,
        where: Where | None = None,
        prefetch: int = 1,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        **options: Any,
    ) -> None:
        if options.get("fractions"):
            raise ConfigError(
                "fractions: only one buffer server mixes tables; with sharded storage, sample one "
                "table"
            )
        storage = config.storage
        self._storage = storage
        self._table = table or "default"
        config = config.tables.get(self._table, config)
        self._split: Split = storage.split
        self._silent_s = config.producer_timeout_s
        self._batch_size = batch_size
        self._rollouts = config.type == "RolloutBuffer"
        # No server can be asked for more of a batch, which may be more than each of them holds.
        largest = max(1, min(batch_size, config.capacity))
        self._prefetch = prefetch
        self._rng = np.random.default_rng(None if config.sampler is None else config.sampler.seed)
        # Rollouts come one ahead from each server; other parts are asked for by their size.
        ahead = prefetch if self._rollouts else 0
        self._shards = [
            _Shard(
                index,
                BufferClient(address, rpc=rpc, auth=auth),
                SampleClient(
                    address,
                    table=table,
                    batch_size=0 if self._rollouts else largest,
                    where=where,
                    prefetch=ahead,
                    rpc=rpc,
                    auth=auth,
                    **options,
                ),
            )
            for index, address in enumerate(storage.addresses)
        ]
        self._described_ns = 0
        self._batches = 0
        self._next: asyncio.Task[Batch] | None = None
        self._next_size = 0
        self._pulls: dict[int, asyncio.Task[Batch]] = {}

    @property
    def address(self) -> str:
        """Addresses of the servers."""
        return ", ".join(self._storage.addresses)

    @property
    def missing(self) -> dict[str, float]:
        """The servers that are away: for how long, in seconds, by address."""
        return {shard.address: shard.away_s for shard in self._shards if self._is_missing(shard)}

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Opens the sessions. May be called again after it failed.

        Returns once all are open; where `storage.missing_shards` is `skip`, also when one is and
        the others have had `storage.missing_after_s`.

        Raises:
            InvalidRequestError: The tables cannot serve such batches.
            UnavailableError: A server did not answer in time; says which.
        """
        deadline = time.monotonic() + timeout_s
        for shard in self._shards:
            shard.connect()
        while True:
            for shard in self._shards:
                shard.check()
            absent = [shard for shard in self._shards if not shard.started]
            if not absent:
                return
            skip = self._storage.missing_shards == "skip" and len(absent) < len(self._shards)
            if skip and all(self._is_missing(shard) for shard in absent):
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    "; ".join(shard.describe_absence() for shard in absent), reason=SHARD_MISSING
                )
            await asyncio.sleep(_POLL_S / 4)

    async def close(self) -> None:
        """Ends the sessions and closes the connections."""
        tasks = [*self._pulls.values(), *([] if self._next is None else [self._next])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(shard.close() for shard in self._shards))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def next_batch(self, timeout_s: float | None = None, *, batch_size: int = 0) -> Batch:
        """Waits for the next batch; the one before it is acked by that.

        Args:
            timeout_s: How long, in seconds; None: for ever.
            batch_size: Transitions in this batch; 0 for as many as the client was made for.

        Returns:
            The batch. Its metadata have `shards`, the rows of each server by address, and
            `missing`, by address for how many seconds the servers that were left out have been
            away.

        Raises:
            DeadlineExceededError: There was none in time.
            UnavailableError: A server is away, with the reason `SHARD_MISSING`; or a producer is
                silent, with `PRODUCER_SILENT`. The next call waits on.
            PreconditionError: Inserts and samples of a server wait for each other, with the reason
                `BLOCKED`. The next call waits on.
            RemoteError: A session ended for good.
        """
        size = batch_size or self._batch_size
        task = self._next
        if task is not None and self._next_size != size:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            task = None
        if task is None:
            task = self._begin(size)
        try:
            await wait_within(asyncio.wait({task}), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceededError(
                f"no batch within {timeout_s:g} s", peer=self.address
            ) from None
        self._next = None
        batch = task.result()
        if self._prefetch and not self._rollouts:
            self._begin(size)
        return batch

    async def ack(self) -> None:
        """Tells the servers that the last batch was used. Safe to repeat."""
        await asyncio.gather(*(shard.samples.ack() for shard in self._shards))

    def _begin(self, size: int) -> asyncio.Task[Batch]:
        draw = self._draw_rollout() if self._rollouts else self._draw(size)
        self._next, self._next_size = asyncio.create_task(draw), size
        # Nobody may ask for its outcome any more.
        self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._next

    # Which servers take part.

    def _is_missing(self, shard: _Shard) -> bool:
        return shard.away_s > self._storage.missing_after_s

    def _present(self) -> list[_Shard]:
        """Returns the servers that are here, or are not away for long.

        Raises:
            UnavailableError: One is away and may not be left out, or all are.
        """
        present = []
        for shard in self._shards:
            shard.check()
            if not self._is_missing(shard):
                if shard.told:
                    logger.warning("shard %d, %s, is back", shard.index, shard.address)
                shard.told = False
                present.append(shard)
            elif not shard.told:
                shard.told = True
                logger.warning("%s", shard.describe_absence())
        if len(present) < len(self._shards) and (
            self._storage.missing_shards == "error" or not present
        ):
            absent = [shard.describe_absence() for shard in self._shards if shard not in present]
            raise UnavailableError("; ".join(absent), reason=SHARD_MISSING)
        return present

    async def _describe(self, shards: Sequence[_Shard]) -> None:
        """Asks servers what they hold, unless that was done just before."""
        now = time.monotonic_ns()
        fresh = now - self._described_ns < _POLL_S * 1e9
        if fresh and all(shard.status is not None for shard in shards):
            return
        await asyncio.gather(*(self._ask(shard) for shard in shards))
        self._described_ns = time.monotonic_ns()

    async def _ask(self, shard: _Shard) -> None:
        try:
            status = await shard.client.describe(table=self._table, timeout_s=_DESCRIBE_S)
        except (UnavailableError, DeadlineExceededError):
            shard.status = None
        else:
            shard.status = status.tables[self._table]

    # Batches of transitions.

    async def _draw(self, batch_size: int) -> Batch:
        parts: list[tuple[_Shard, Batch]] = []
        left, progress, since = batch_size, -1, time.monotonic()
        while left > 0:
            shards = self._present()
            await self._describe(shards)
            here = [shard for shard in shards if shard.status is not None]
            sizes = [shard.status.size if shard.status else 0 for shard in here]
            if sum(sizes) < left or not here:
                if sum(sizes) != progress:
                    progress, since = sum(sizes), time.monotonic()
                elif time.monotonic() - since > self._silent_s:
                    raise UnavailableError(
                        f"{progress} transitions in {len(here)} buffer servers are too few for a "
                        f"batch of {batch_size}, and none came for {self._silent_s:g} s",
                        reason=PRODUCER_SILENT,
                    )
                await asyncio.sleep(_POLL_S)
                continue
            counts = split_counts(left, sizes, self._split, self._rng)
            for shard, batch in await self._parts(
                [(shard, count) for shard, count in zip(here, counts, strict=True) if count]
            ):
                parts.append((shard, batch))
                left -= _units(batch)
        return self._merged(parts)

    async def _parts(self, wanted: Sequence[tuple[_Shard, int]]) -> list[tuple[_Shard, Batch]]:
        """Returns the parts of those servers that do not go away meanwhile."""
        tasks = {asyncio.create_task(self._part(*one)): one[0] for one in wanted}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return [
                (shard, batch)
                for task, shard in tasks.items()
                if (batch := task.result()) is not None
            ]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _part(self, shard: _Shard, count: int) -> Batch | None:
        while not self._is_missing(shard):
            try:
                return await shard.samples.next_batch(_POLL_S, batch_size=count)
            except DeadlineExceededError:
                continue
        return None

    # Rollouts.

    async def _draw_rollout(self) -> Batch:
        while True:
            present = self._present()
            for shard in present:
                if shard.started and shard.index not in self._pulls:
                    pull = asyncio.create_task(shard.samples.next_batch())
                    self._pulls[shard.index] = pull
            pending = [pull for pull in self._pulls.values() if not pull.done()]
            if pending:
                await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            elif not self._pulls:
                await asyncio.sleep(_POLL_S)
            ready = [shard for shard in present if await self._has_rollout(shard)]
            waits = [shard for shard in present if shard not in ready]
            if ready and waits:
                await self._describe(waits)
                waits = [shard for shard in waits if shard.status and shard.status.writers]
            if ready and not waits:
                return self._merged(
                    [(shard, self._pulls.pop(shard.index).result()) for shard in ready], axis=1
                )

    async def _has_rollout(self, shard: _Shard) -> bool:
        pull = self._pulls.get(shard.index)
        if pull is None or not pull.done():
            return False
        error = pull.exception()
        if error is None:
            return True
        del self._pulls[shard.index]
        if isinstance(error, UnavailableError) and error.reason == PRODUCER_SILENT:
            await asyncio.gather(*(self._ask(one) for one in self._shards))
            writers = [one.status.writers if one.status else 0 for one in self._shards]
            if not writers[shard.index] and any(writers):
                return False  # no env writes to this one, and nobody waits for it
        raise error

    # Parts.

    def _merged(self, parts: Sequence[tuple[_Shard, Batch]], axis: int = 0) -> Batch:
        parts = sorted(parts, key=lambda part: part[0].index)
        columns = [self._marked(shard, batch) for shard, batch in parts]
        metadata: dict[str, Any] = {}
        try:
            if axis == 0:
                whole, metadata = joined(merge(_weighed(columns, [b for _, b in parts])))
            else:
                whole = merge(columns, axis)
                for name in ("env_ids", "rows"):
                    metadata[name] = [
                        one for _, batch in parts for one in batch.metadata.get(name, ())
                    ]
        except InvalidRowError as error:
            raise RemoteError(f"batches do not fit together: {error}", peer=self.address) from error
        counts: dict[str, int] = {}
        for shard, batch in parts:
            counts[shard.address] = counts.get(shard.address, 0) + _units(batch, axis)
        metadata |= {"shards": counts, "missing": self.missing}
        self._batches += 1
        return Batch(self._batches, whole, metadata)

    def _marked(self, shard: _Shard, batch: Batch) -> Any:
        columns = batch.columns
        lengths = batch.metadata.get("lengths")
        if lengths is not None:
            return split(columns, lengths)
        if "sample_index" in columns:
            columns = {**columns, "sample_index": pack(shard.index, columns["sample_index"])}
        return columns


def _units(batch: Batch, axis: int = 0) -> int:
    lengths = batch.metadata.get("lengths")
    if lengths is not None:
        return len(lengths)
    rewards: Any = next(iter_arrays(batch.columns["reward"]))  # each agent has its own
    return int(rewards.shape[axis])


def _weighed(columns: Sequence[Any], batches: Sequence[Batch]) -> list[Any]:
    """Makes weights comparable: each divided by the largest of the whole batch."""
    if len(batches) < 2 or not all("weight_scale" in batch.metadata for batch in batches):
        return list(columns)
    scales = [float(batch.metadata["weight_scale"]) for batch in batches]
    highest = max(scales)
    return [
        {**part, "sample_weight": part["sample_weight"] * np.float32(scale / highest)}
        for part, scale in zip(columns, scales, strict=True)
    ]
