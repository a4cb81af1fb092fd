"""Clients of a buffer server: insert, sample, and everything else."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from rlightning.buffer.insert_client import SERVICE, InsertClient, items_per_message
from rlightning.buffer.parts import read_batch, split
from rlightning.buffer.sample_client import SampleClient
from rlightning.errors import (
    CodecError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
)
from rlightning.latency import ClockOffset
from rlightning.rpc.channel import connect, unary, unary_stream
from rlightning.rpc.protocol import measure, stamp
from rlightning.rpc.status import NO_DATA_DIR
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, ChunkJoiner, Reader, read_value

__all__ = [
    "SERVICE",
    "BufferClient",
    "BufferStatus",
    "Checkpoint",
    "InsertClient",
    "SampleClient",
    "TableStatus",
    "items_per_message",
]

_CALL_TIMEOUT_S = 30.0
_CHECKPOINT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class TableStatus:
    """The state of one table.

    Attributes:
        name: Its name.
        size: Stored transitions.
        capacity: How many it can hold.
        writers: Writers with an open session.
        inserted_total: Transitions stored since the start.
        sampled_total: Transitions handed to learners since the start.
    """

    name: str
    size: int
    capacity: int
    writers: int
    inserted_total: int
    sampled_total: int


@dataclass(frozen=True)
class BufferStatus:
    """What a buffer server holds.

    Attributes:
        library_version: Of the server.
        storage_id: Another one than before means that nothing of before is there.
        tables: The tables by name.
        stats: Counters, and latency figures {count, mean, p50, p90, p99, max} in seconds, by name.
    """

    library_version: str
    storage_id: str
    tables: Mapping[str, TableStatus]
    stats: Mapping[str, Any]


class Checkpoint(NamedTuple):
    """A checkpoint on the disk of a buffer server.

    Attributes:
        name: Its name, for `buffer.restore`.
        nbytes: Its size in bytes.
    """

    name: str
    nbytes: int


class BufferClient:
    """Asks a buffer server what it holds, reads rows and drops them. Belongs to one event loop.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        max_batch_bytes: How large an answer of `get` may be.
        rpc: Limits and times.
        auth: Token and certificates.

    Attributes:
        offset: The server's clock against this one, as far as `describe` tells.
    """

    def __init__(
        self,
        address: str,
        *,
        max_batch_bytes: int = 2**31 - 1,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        self.offset = ClockOffset()
        self._channel = connect(address, rpc=rpc, auth=auth)
        self._max_batch_bytes = max_batch_bytes

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._channel.address

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def describe(
        self, *, table: str = "", timeout_s: float = _CALL_TIMEOUT_S
    ) -> BufferStatus:
        """Returns what the server holds.

        Args:
            table: Which table; empty means all.
            timeout_s: How long to wait, in seconds.

        Raises:
            NotFoundError: There is no such table.
            UnavailableError: The server could not be reached.
        """
        request = pb.BufferServiceDescribeRequest(table=table)
        stamp(request)
        response = await unary(
            self._channel,
            f"/{SERVICE}/Describe",
            request,
            pb.BufferServiceDescribeResponse,
            timeout=timeout_s,
        )
        measure(self.offset, request, response)
        reader = Reader(pb.BufferServiceDescribeResponse, response.SerializeToString())
        return BufferStatus(
            response.library_version,
            response.storage_id,
            {
                held.name: TableStatus(
                    held.name,
                    held.size,
                    held.capacity,
                    held.writers,
                    held.inserted_total,
                    held.sampled_total,
                )
                for held in response.tables
            },
            read_value(reader.message.stats, reader),
        )

    async def clear(self, table: str = "", *, timeout_s: float = _CALL_TIMEOUT_S) -> int:
        """Drops the stored rows of a table; open episodes stay. Returns how many they were.

        Raises:
            NotFoundError: There is no such table.
            UnavailableError: The server could not be reached.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/Clear",
            pb.ClearRequest(table=table),
            pb.ClearResponse,
            timeout=timeout_s,
        )
        return response.cleared

    async def update_priorities(
        self,
        indices: npt.ArrayLike,
        priorities: npt.ArrayLike,
        generations: npt.ArrayLike = (),
        table: str = "",
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> int:
        """Sets priorities of transitions; returns of how many.

        Args:
            indices: Which: the column `sample_index` of a batch, int [n].
            priorities: Finite and not negative, float [n].
            generations: The column `sample_generation`: rows whose place another has taken since
                are left alone. Empty: whatever is there.
            table: Which table; empty means `default`.
            timeout_s: How long to wait, in seconds.

        Raises:
            NotFoundError: There is no such table.
            InvalidRequestError: Nothing is stored at an index, a priority is not allowed, or the
                arguments differ in length; nothing was changed.
            PreconditionError: The table has no priorities.
            UnavailableError: The server could not be reached.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/UpdatePriorities",
            pb.UpdatePrioritiesRequest(
                table=table,
                indices=np.asarray(indices, np.int64).tolist(),
                generations=np.asarray(generations, np.int64).tolist(),
                priorities=np.asarray(priorities, np.float64).tolist(),
            ),
            pb.UpdatePrioritiesResponse,
            timeout=timeout_s,
        )
        return response.updated

    async def checkpoint(
        self, keep: Sequence[str] | None = None, *, timeout_s: float = _CHECKPOINT_TIMEOUT_S
    ) -> Checkpoint | None:
        """Writes everything that the server holds to its disk, while it goes on.

        Args:
            keep: Names of older checkpoints that the caller refers to, as it will to this one: none
                of them is removed before the next call that has this argument. None: nobody refers
                to this one, and it goes when it is not among the newest.
            timeout_s: How long it may take, in seconds.

        Returns:
            What was written; None if the server keeps nothing on disk: it has no `buffer.data_dir`.

        Raises:
            ResourceExhaustedError: Its disk is full; what was there before still is.
            UnavailableError: The server could not be reached.
        """
        try:
            response = await unary(
                self._channel,
                f"/{SERVICE}/Checkpoint",
                pb.CheckpointRequest(hold=keep is not None, keep=keep or ()),
                pb.CheckpointResponse,
                timeout=timeout_s,
            )
        except PreconditionError as error:
            if error.reason != NO_DATA_DIR:
                raise
            return None
        return Checkpoint(response.name, response.total_bytes)

    async def truncate(
        self, env_ids: Sequence[str], table: str = "", *, timeout_s: float = _CALL_TIMEOUT_S
    ) -> int:
        """Ends the open episodes of envs from outside; returns how many there were.

        Raises:
            NotFoundError: There is no such table.
            PreconditionError: No data of one of the envs ever came; the reason is `UNKNOWN_ENV`.
            UnavailableError: The server could not be reached.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/Truncate",
            pb.TruncateRequest(table=table, env_ids=env_ids),
            pb.TruncateResponse,
            timeout=timeout_s,
        )
        return response.truncated

    async def discard_episode(
        self,
        env_id: str,
        table: str = "",
        *,
        request_id: str = "",
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> int:
        """Removes the open episode of an env, or the last that was stored if none is open.

        Of an env with several rows, those of all rows; what was inserted and is not acked may come
        after it. Each episode is removed once.

        Args:
            env_id: Id of the env.
            table: Which table; empty means `default`.
            request_id: Names this request, up to 128 characters: a call that failed is repeated
                with the same one, and nothing is removed twice. Default: a random one.
            timeout_s: How long to wait, in seconds.

        Returns:
            How many transitions were removed; those that were overwritten do not count.

        Raises:
            NotFoundError: There is no such table.
            PreconditionError: No data of the env ever came, and the reason is `UNKNOWN_ENV`; or the
                table serves rollouts.
            InvalidRequestError: `request_id` was that of another request.
            UnavailableError: The server could not be reached.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/DiscardEpisode",
            pb.DiscardEpisodeRequest(
                table=table, env_id=env_id, request_id=request_id or uuid.uuid4().hex
            ),
            pb.DiscardEpisodeResponse,
            timeout=timeout_s,
        )
        return response.discarded

    async def pages(
        self, limit: int, table: str = "", *, timeout_s: float = _CALL_TIMEOUT_S
    ) -> AsyncIterator[Any]:
        """Yields all that is stored in pages, as `get` returns them.

        What is stored or removed meanwhile may be missing, or come twice.

        Args:
            limit: Transitions or episodes in a page.
            table: Which table; empty means `default`.
            timeout_s: How long each page may take, in seconds.

        Raises:
            ValueError: `limit` is less than 1.
            RemoteError: As of `get`.
        """
        if limit < 1:
            raise ValueError(f"limit: expected at least 1, got {limit}")
        first, size = 0, 1
        while first < size:
            request = pb.GetRequest(table=table, all=True, first=first, limit=limit)
            page = await self._get(request, timeout_s)
            size = page.metadata["size"]
            if first < size:
                yield _rows(page)
            first += limit

    async def get(
        self,
        indices: Sequence[int] | None = None,
        table: str = "",
        *,
        first: int = 0,
        limit: int = 0,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> Any:
        """Returns stored transitions: columns by name, leaves [n, ...], read-only.

        Of a table of episodes [n, T, ...], or a list of n dicts where they differ in length.

        Args:
            indices: Which; negative ones count from the end. None: all, or a page.
            table: Which table; empty means `default`.
            first: Without indices: the first of a page; a negative one counts from the end.
            limit: Without indices: how many from there on at most; 0 means all.
            timeout_s: How long it may take, in seconds.

        Raises:
            NotFoundError: There is no such table.
            InvalidRequestError: Nothing is stored at an index, or there is a page beside them.
            ResourceExhaustedError: They are more than `max_batch_bytes`, or more than the server
                has memory to send: get them in `pages`.
            UnavailableError: The server could not be reached.
        """
        request = pb.GetRequest(
            table=table, indices=indices or (), all=indices is None, first=first, limit=limit
        )
        return _rows(await self._get(request, timeout_s))

    async def _get(self, request: pb.GetRequest, timeout_s: float) -> Batch:
        responses = unary_stream(
            self._channel, f"/{SERVICE}/Get", request, pb.GetResponse, timeout=timeout_s
        )
        joiner: ChunkJoiner | None = None
        whole: memoryview | None = None
        async with aclosing(responses):
            async for response in responses:
                if joiner is None:
                    self._check_size(response.total_bytes)
                    joiner = ChunkJoiner(response.total_bytes, max_bytes=self._max_batch_bytes)
                try:
                    whole = joiner.add(response.offset, response.data)
                except CodecError as error:
                    raise RemoteError(f"sent bad parts: {error}", peer=self.address) from error
        if whole is None:
            raise RemoteError("the answer ended early", peer=self.address)
        return read_batch(whole, self._max_batch_bytes)

    def _check_size(self, total_bytes: int) -> None:
        if total_bytes > self._max_batch_bytes:
            raise ResourceExhaustedError(
                f"an answer of {total_bytes} bytes passes max_batch_bytes, "
                f"{self._max_batch_bytes}: raise it, or get them in pages",
                peer=self.address,
            )


def _rows(batch: Batch) -> Any:
    lengths = batch.metadata.get("lengths")
    return batch.columns if lengths is None else split(batch.columns, lengths)
