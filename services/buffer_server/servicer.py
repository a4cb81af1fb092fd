"""Keeps the tables of a buffer server and answers for them."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from rlightning.buffer.parts import joined
from rlightning.buffer.remote_buffer import SERVICE
from rlightning.errors import (
    InvalidRequestError,
    InvalidRowError,
    NotFoundError,
    PreconditionError,
    ReplayError,
    ResourceExhaustedError,
)
from rlightning.latency import LatencyStats
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, unary_stream, unary_unary
from rlightning.rpc.protocol import LIBRARY_VERSION
from rlightning.rpc.session import SessionMethod, SessionRegistry
from rlightning.utils.config import MainConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Writer, batch_pieces, fill_value

from .chunks import get_responses
from .discards import Discards
from .inserts import InsertHandler
from .samples import SampleHandler
from .tables import Tables


class BufferService:
    """`rlightning.v1.BufferService` over tables in memory.

    Args:
        config: Sections `buffer` and `services.buffer`.

    Raises:
        ConfigError: The section asks for what the buffer does not offer.
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
        "Describe": "learner",
    }

    def __init__(self, config: MainConfig) -> None:
        rpc = config.services.buffer.rpc
        self._storage_id = uuid.uuid4().hex
        self._tables = Tables(config.buffer)
        self._discards = Discards(self._tables)
        self._insert = InsertHandler(self._tables, self._storage_id)
        self._sample = SampleHandler(
            self._tables,
            self._storage_id,
            producer_timeout_s=config.buffer.producer_timeout_s,
            lease_s=rpc.lease_s,
        )
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
            "Describe": unary_unary(pb.BufferServiceDescribeRequest, self._describe),
        }

    async def start(self) -> None:
        """Returns at once: tables in memory begin empty."""

    async def drain(self, deadline_s: float) -> None:
        """Returns at once: what is acked is stored, and what waits for room is sent again."""

    async def close(self) -> None:
        """Returns at once: the tables go with the process."""

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
            pieces = await asyncio.to_thread(batch_pieces, batch)
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
            raise NotFoundError(f"env_ids: no data of {', '.join(unknown)} ever came")
        truncated = sum(table.buffer.truncate_group(env_id) for env_id in request.env_ids)
        table.changed()
        return pb.TruncateResponse(truncated=truncated)

    async def _update_priorities(
        self, request: pb.UpdatePrioritiesRequest, context: Context
    ) -> pb.UpdatePrioritiesResponse:
        buffer = self._tables.named(request.table).buffer
        indices = np.array(request.indices, np.intp)
        generations = np.array(request.generations, np.int64) if request.generations else None
        try:
            updated = buffer.update_priorities(
                indices, np.array(request.priorities, np.float64), generations
            )
        except IndexError as error:
            raise InvalidRequestError(f"indices: {error}") from error
        except InvalidRowError as error:
            raise InvalidRequestError(str(error)) from error
        except ReplayError as error:
            raise PreconditionError(str(error)) from error
        return pb.UpdatePrioritiesResponse(updated=updated)

    async def _clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:
        return pb.ClearResponse(cleared=self._tables.named(request.table).clear())

    async def _describe(self, request: pb.BufferServiceDescribeRequest, context: Context) -> bytes:
        response = pb.BufferServiceDescribeResponse(
            library_version=LIBRARY_VERSION, storage_id=self._storage_id
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
        return writer.finish(response)

    def _stats(self) -> dict[str, Any]:
        latency = LatencyStats()
        latency.merge(self._insert.latency)
        latency.merge(self._sample.latency)
        return {
            **dataclasses.asdict(self._insert.counts),
            "batches_total": self._sample.batches_total,
            "sessions": describe_sessions(self._writers.sessions),
            "tables": {name: table.stats() for name, table in self._tables.items()},
            "latency": latency.summary(),
        }


def _page(request: pb.GetRequest) -> slice:
    """Returns which positions a request for all, or for a page of it, asks for."""
    stop = request.first + request.limit if request.limit else None
    if request.first < 0 and stop is not None and stop >= 0:
        stop = None  # it reaches the end, which 0 would not mean
    return slice(request.first, stop)
