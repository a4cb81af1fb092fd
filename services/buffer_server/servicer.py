"""Keeps the tables of a buffer server and answers for them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from rlightning.buffer.durable.space import check_space
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.parts import joined, pieces_of
from rlightning.buffer.pipeline import Item
from rlightning.buffer.remote_buffer import SERVICE
from rlightning.errors import (
    InvalidRequestError,
    InvalidRowError,
    PreconditionError,
    ReplayError,
    ResourceExhaustedError,
)
from rlightning.latency import LatencyStats
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, unary_stream, unary_unary
from rlightning.rpc.health import Health
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.protocol import LIBRARY_VERSION, arrival_of, stamp
from rlightning.rpc.session import SessionMethod, SessionRegistry
from rlightning.rpc.status import UNKNOWN_ENV
from rlightning.utils.config import MainConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Limits, Reader, Writer, fill_value

from .chunks import get_responses
from .discards import Discards
from .inserts import InsertHandler
from .samples import SampleHandler
from .tables import Tables
from .writers import items_of

# What was stored before kept to the limits of its session.
_STORED = Limits(max_bytes=2**31 - 1, max_leaves=10_000_000)


class BufferService:
    """`rlightning.v1.BufferService` over tables in memory, and what of them is kept on disk.

    Args:
        config: Sections `buffer` and `services.buffer`, and `log.latency`.

    Attributes:
        failure: Gets an exception when the disk did not confirm what was written.

    Raises:
        ConfigError: The section asks for what the buffer does not offer, or for more memory or disk
            than there is.
    """

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Insert": "actor",
        "Sample": "learner",
        "Get": "learner",
        "Truncate": "actor",
        "DiscardEpisode": "actor",
        "UpdatePriorities": "learner",
        "Clear": "learner",
        "Checkpoint": "learner",
        "Describe": "learner",
    }

    def __init__(self, config: MainConfig) -> None:
        rpc = config.services.buffer.rpc
        check_space(config.buffer)
        self._tables = Tables(config.buffer)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._store = DurableStore(config.buffer, self._tables, _read_items)
        self._health: Health | None = None
        self._draining = False
        self._lease_s = rpc.resume_window_s
        self._absent: asyncio.TimerHandle | None = None
        self._discards = Discards(self._tables, self._store)
        self._insert = InsertHandler(self._tables, self._store)
        self._sample = SampleHandler(
            self._tables,
            self._store,
            producer_timeout_s=config.buffer.producer_timeout_s,
            lease_s=rpc.lease_s,
        )
        if not config.log.latency:
            self._insert.latency = self._sample.latency = LatencyStats(enabled=False)
        self._writers = SessionRegistry(rpc, f"/{SERVICE}/Insert")
        self._learners = SessionRegistry(rpc, f"/{SERVICE}/Sample")

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handlers; methods without one are UNIMPLEMENTED to who calls them."""
        return {
            "Insert": SessionMethod(self._writers, self._insert),
            "Sample": SessionMethod(self._learners, self._sample),
            "Get": unary_stream(pb.GetRequest, self._get),
            "Truncate": unary_unary(pb.TruncateRequest, self._truncate),
            "DiscardEpisode": unary_unary(pb.DiscardEpisodeRequest, self._discards.discard),
            "UpdatePriorities": unary_unary(pb.UpdatePrioritiesRequest, self._update_priorities),
            "Clear": unary_unary(pb.ClearRequest, self._clear),
            "Checkpoint": unary_unary(pb.CheckpointRequest, self._checkpoint),
            "Describe": unary_unary(pb.BufferServiceDescribeRequest, self._describe),
        }

    def use_health(self, health: Health) -> None:
        """Takes the health service, to be not ready while nothing can be written to the disk."""
        self._health = health

    async def start(self) -> None:
        """Returns once what `buffer.restore` names is loaded.

        Raises:
            ConfigError: It cannot be, or the data directory cannot be used.
            CorruptError: What the data directory has is damaged.
        """
        await asyncio.to_thread(self._store.open)
        await self._store.begin(on_full=self._disk_full, on_lost=self._disk_lost)
        self._insert.take_over()
        self._sample.take_over()
        if any(table.producers for table in self._tables.values()):
            loop = asyncio.get_running_loop()
            self._absent = loop.call_later(self._lease_s, self._insert.close_absent)

    def _disk_full(self, full: bool) -> None:
        if self._health is not None and not self._draining:
            self._health.set_ready(not full)

    def _disk_lost(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def drain(self, deadline_s: float) -> None:
        """Returns once what is stored is as safe as promised; what waits for room comes again."""
        self._draining = True
        self._insert.leave()
        self._sample.leave()
        await self._store.settled()

    async def close(self) -> None:
        """Closes the data directory; what was acked is in it, if there is one."""
        if self._absent is not None:
            self._absent.cancel()
        await self._store.close()

    async def _get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[bytes]:
        table = self._tables.named(request.table)
        buffer = table.buffer
        if request.all and request.indices:
            raise InvalidRequestError("all: expected no indices beside it")
        if request.limit < 0:
            raise InvalidRequestError(f"limit: expected at least 0, got {request.limit}")
        if not request.all and (request.first or request.limit):
            raise InvalidRequestError("first, limit: expected all beside them")
        size = buffer.size()
        whole = request.all and not request.first and not request.limit
        wanted = range(size)[_page(request)] if request.all else list(request.indices)
        count = len(wanted)
        needed = table.transit_bytes(count)
        if table.serves_rollouts:  # which are joined before anything is taken out of them
            needed += size * buffer.row_bytes
        if not table.transit.take(needed):
            raise ResourceExhaustedError(
                f"{'all' if request.all else 'indices'}: {count} transitions of {buffer.row_bytes} "
                f"bytes need {needed} bytes to be sent; half of buffer.max_bytes allows "
                f"{table.transit.max_bytes}, of which {table.transit.used} are in use: ask for "
                "fewer at once, or raise it",
                reason="BATCH_TOO_LARGE",
            )
        try:
            found: Any = {}
            if whole:
                found = buffer.get_all()
            elif count:
                found = buffer.get(wanted)
            columns, metadata = joined(found)
            batch = Batch(0, columns, {**metadata, "size": size})
            pieces = await asyncio.to_thread(pieces_of, batch)
            for response in get_responses(pieces):
                yield response
        except IndexError as error:
            raise InvalidRequestError(f"indices: {error}") from error
        finally:
            table.transit.give_back(needed)

    async def _truncate(self, request: pb.TruncateRequest, context: Context) -> pb.TruncateResponse:
        table = self._tables.named(request.table)
        unknown = sorted(set(request.env_ids) - set(table.buffer.env_ids))
        if unknown:
            raise PreconditionError(
                f"env_ids: no data of {', '.join(unknown)} ever came", reason=UNKNOWN_ENV
            )
        self._store.check()
        truncated = sum(table.truncate(env_id) for env_id in request.env_ids)
        await self._store.settled()
        return pb.TruncateResponse(truncated=truncated)

    async def _update_priorities(
        self, request: pb.UpdatePrioritiesRequest, context: Context
    ) -> pb.UpdatePrioritiesResponse:
        table = self._tables.named(request.table)
        self._store.check()
        indices = np.array(request.indices, np.intp)
        generations = np.array(request.generations, np.int64) if request.generations else None
        try:
            updated = table.update_priorities(
                indices, np.array(request.priorities, np.float64), generations
            )
        except IndexError as error:
            raise InvalidRequestError(f"indices: {error}") from error
        except InvalidRowError as error:
            raise InvalidRequestError(str(error)) from error
        except ReplayError as error:
            raise PreconditionError(str(error)) from error
        await self._store.settled()
        return pb.UpdatePrioritiesResponse(updated=updated)

    async def _clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        table = self._tables.named(request.table)
        self._store.check()
        cleared = table.clear()
        await self._store.settled()
        return pb.ClearResponse(cleared=cleared)

    async def _checkpoint(
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointResponse:
        name, nbytes = await self._store.checkpoint(request.keep if request.hold else None)
        return pb.CheckpointResponse(name=name, total_bytes=nbytes)

    async def _describe(self, request: pb.BufferServiceDescribeRequest, context: Context) -> bytes:
        arrival = arrival_of(request)
        response = pb.BufferServiceDescribeResponse(
            library_version=LIBRARY_VERSION, storage_id=self._store.storage_id
        )
        tables = [self._tables.named(request.table)] if request.table else self._tables.values()
        for table in tables:
            response.tables.add(
                name=table.name,
                size=table.buffer.size(),
                capacity=table.capacity,
                writers=len(table.producers),
                inserted_total=table.buffer.counters.completed,
                sampled_total=table.sampled_total,
            )
        writer = Writer()
        fill_value(response.stats, self._stats(), writer)
        stamp(response, arrival)
        return writer.finish(response)

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.sessions("Insert", self._writers.sessions)
        metrics.sessions("Sample", self._learners.sessions)
        shared = self._writers.shared_bytes
        text = "Tensors of requests that came through shared memory."
        metrics.counter("shared_memory_bytes_total", text, shared, method="Insert")
        metrics.stages(self._insert.latency)
        metrics.stages(self._sample.latency)
        for table in self._tables.values():
            size, name = table.buffer.size(), table.name
            metrics.gauge("buffer_items", "Transitions or episodes stored.", size, table=name)
            metrics.gauge("buffer_capacity", "Transitions that fit.", table.capacity, table=name)
            storages = table.buffer.storages.values()
            nbytes = sum(storage.nbytes for storage in storages)
            metrics.gauge("buffer_bytes", "Memory for its transitions.", nbytes, table=name)
            for total, text, value in (
                ("rows_total", "Transitions completed.", table.buffer.counters.completed),
                ("sampled_total", "Transitions handed to learners.", table.sampled_total),
            ):
                metrics.counter(f"buffer_{total}", text, value, table=name)
        self._store.measure(metrics)
        waiting = self._insert.waiting
        metrics.gauge("queue_depth", "What waits, by queue.", waiting, queue="inserts")
        counts = self._insert.counts
        for total, text, value in (
            ("insert_total", "Insert messages that came.", counts.messages_total),
            ("insert_duplicate_total", "Those that had come before.", counts.duplicates_total),
            ("insert_gap_total", "Those that came before their turn.", counts.gaps_total),
            ("insert_refused_total", "Those that could not be stored.", counts.refused_total),
            ("sample_batches_total", "Batches sent to learners.", self._sample.batches_total),
        ):
            metrics.counter(total, text, value)

    def _stats(self) -> dict[str, Any]:
        latency = LatencyStats()
        latency.merge(self._insert.latency)
        latency.merge(self._sample.latency)
        return {
            **dataclasses.asdict(self._insert.counts),
            "batches_total": self._sample.batches_total,
            **self._store.stats(),
            "inserts_waiting": self._insert.waiting,
            "shared_bytes": self._writers.shared_bytes,
            "sessions": describe_sessions(self._writers.sessions),
            "learners": describe_sessions(self._learners.sessions),
            "tables": {name: table.stats() for name, table in self._tables.items()},
            "latency": latency.summary(),
            "latency_window_s": latency.WINDOW_S,
        }


def _read_items(env_id: str, data: bytes) -> list[Item]:
    """Returns the items of a message that was stored before."""
    return items_of(env_id, Reader(pb.InsertRequest, data, limits=_STORED))


def _page(request: pb.GetRequest) -> slice:
    """Returns which positions a request for all, or for a page of it, asks for."""
    stop = request.first + request.limit if request.limit else None
    if request.first < 0 and stop is not None and stop >= 0:
        stop = None  # it reaches the end, which 0 would not mean
    return slice(request.first, stop)
