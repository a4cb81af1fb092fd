"""DiscardEpisode: each request is done once, however often it comes."""

from __future__ import annotations

from collections import OrderedDict

from rlightning.errors import InvalidRequestError, NotFoundError
from rlightning.rpc.handlers import Context
from rlightning.v1 import buffer_service_pb2 as pb

from .tables import Tables

_MAX_ID = 128
# Requests whose answer is known if they come again.
_MAX_KNOWN = 4096


class Discards:
    """Removes episodes, and remembers which requests it has done.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._done: OrderedDict[str, tuple[pb.DiscardEpisodeRequest, int]] = OrderedDict()

    async def discard(
        self, request: pb.DiscardEpisodeRequest, context: Context
    ) -> pb.DiscardEpisodeResponse:
        """Answers the call.

        Raises:
            InvalidRequestError: `request_id` is missing, too long, or that of another request.
            NotFoundError: There is no such table, or no data of the env ever came.
            ReplayError: The table serves rollouts.
        """
        request_id = request.request_id
        if not 0 < len(request_id) <= _MAX_ID:
            raise InvalidRequestError(
                f"request_id: expected 1 to {_MAX_ID} characters, got {len(request_id)}"
            )
        if request_id in self._done:
            before, discarded = self._done[request_id]
            if before != request:
                raise InvalidRequestError(
                    f"request_id: {request_id} was that of table '{before.table}' and env "
                    f"{before.env_id!r}"
                )
            return pb.DiscardEpisodeResponse(discarded=discarded)
        table = self._tables.named(request.table)
        if request.env_id not in table.buffer.env_ids:
            raise NotFoundError(f"env_id: no data of {request.env_id!r} ever came")
        discarded = table.buffer.discard_episode(request.env_id)
        table.changed()
        self._done[request_id] = request, discarded
        if len(self._done) > _MAX_KNOWN:
            self._done.popitem(last=False)
        return pb.DiscardEpisodeResponse(discarded=discarded)
