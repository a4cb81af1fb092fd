"""What a buffer server knows of a writer, and what a message of it brings."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rendezvous import Rendezvous
from rlightning.errors import InvalidRowError, RLightningError
from rlightning.rpc.protocol import Arrival
from rlightning.rpc.session import Session
from rlightning.utils.memory import MemoryPool
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.v1.session_pb2 import ErrorStatus
from rlightning.wire import Reader, read_env_ret, read_policy_response


@dataclass
class WaitingInsert:
    """An insert that waits for its turn, or for room.

    Attributes:
        tables: Where it goes.
        items: What it brings.
        refusal: Why it cannot be stored; None while it may be.
        data: The message itself.
        arrival: Its stamps.
        nbytes: What it takes in memory, in bytes.
    """

    tables: tuple[BufferTable, ...]
    items: list[Item]
    refusal: RLightningError | None
    data: bytes
    arrival: Arrival
    nbytes: int


@dataclass
class Writer:
    """What the server knows of one writer, also after its session.

    Attributes:
        writer_id: Its id.
        env_id: Id of the env whose rows it writes.
        tables: Where they go.
        next_seq: Number of the next message to be stored; 0 if whatever comes first is taken.
        session: The session that it writes in; None after it.
        waiting: Messages that came and are not stored, in order.
        refused: Messages that were refused, by number, which the client was not told of yet.
        tasks: Those that work for it: one that acks, and one that stores what waits.
        unacked: Items done with since the last ack.
        alarm: Sets `progress` for those; None if there are none.
        progress: Set when it is time to ack.
        moved: Set when less is waiting.
        arrival: Stamps of the last message since the last ack; None if there is none.
        held_by: Of the table that has no room for what waits; None if nothing does.
        told: How often that table was blocked when the client was told of it last.
    """

    writer_id: str
    env_id: str
    tables: tuple[BufferTable, ...]
    next_seq: int = 1
    session: Session | None = None
    waiting: deque[WaitingInsert] = field(default_factory=deque)
    refused: dict[int, ErrorStatus] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    unacked: int = 0
    alarm: asyncio.TimerHandle | None = None
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    arrival: Arrival | None = None
    held_by: Rendezvous | None = None
    told: int = 0

    @property
    def transit(self) -> MemoryPool:
        """Memory for its messages that wait."""
        return self.tables[0].transit


def items_of(env_id: str, reader: Reader[pb.InsertRequest]) -> list[Item]:
    """Returns the items of a message of an env.

    Raises:
        InvalidRowError: One lacks its EnvRet, or is of another env.
        CodecError: One cannot be read.
    """
    items = []
    for position, item in enumerate(reader.message.insert.items):
        if not item.HasField("env_ret"):
            raise InvalidRowError(f"items[{position}].env_ret: missing")
        env_ret = read_env_ret(item.env_ret, reader)
        if env_ret.env_id != env_id:
            raise InvalidRowError(
                f"items[{position}].env_ret.env_id: expected {env_id!r}, got {env_ret.env_id!r}"
            )
        response = None
        if item.HasField("response"):
            response = read_policy_response(item.response, reader)
        items.append(Item(env_ret, response, item.new_segment, tuple(item.cut_rows)))
    return items
