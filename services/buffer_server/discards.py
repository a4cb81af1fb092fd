"""DiscardEpisode: each request is done once, however often it comes."""

from __future__ import annotations

from rlightning.buffer.durable.store import DurableStore
from rlightning.errors import InvalidRequestError, PreconditionError
from rlightning.rpc.handlers import Context
from rlightning.rpc.status import UNKNOWN_ENV
from rlightning.v1 import buffer_service_pb2 as pb

from .tables import Tables

_MAX_ID = 128


class Discards:
    """Removes episodes, and remembers which requests it has done.

    Args:
        tables: The tables.
        store: Keeps which requests were done.
    """

    def __init__(self, tables: Tables, store: DurableStore) -> None:
        self._tables = tables
        self._store = store

    async def discard(
        self, request: pb.DiscardEpisodeRequest, context: Context
    ) -> pb.DiscardEpisodeResponse:
        """Answers the call.

        Raises:
            InvalidRequestError: `request_id` is missing, too long, or that of another request.
            NotFoundError: There is no such table.
            PreconditionError: No data of the env ever came.
            ReplayError: The table serves rollouts.
            ResourceExhaustedError: The server's disk is full.
        """
        request_id = request.request_id
        if not 0 < len(request_id) <= _MAX_ID:
            raise InvalidRequestError(
                f"request_id: expected 1 to {_MAX_ID} characters, got {len(request_id)}"
            )
        self._store.check()
        table = self._tables.named(request.table)
        done = self._store.discards.get(request_id)
        if done is None:
            if request.env_id not in table.buffer.env_ids:
                raise PreconditionError(
                    f"env_id: no data of {request.env_id!r} ever came", reason=UNKNOWN_ENV
                )
            discarded = table.discard(request.env_id)
            self._store.discard(request_id, table.name, request.env_id, discarded)
        elif (done.table, done.env_id) != (table.name, request.env_id):
            raise InvalidRequestError(
                f"request_id: {request_id} was that of table '{done.table}' and env {done.env_id!r}"
            )
        else:
            discarded = done.discarded
        await self._store.settled()
        return pb.DiscardEpisodeResponse(discarded=discarded)
