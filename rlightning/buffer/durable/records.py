"""What happened to tables and writers, as records of the journal."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any

_LENGTH = struct.Struct("<I")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Kind(IntEnum):
    """What a record tells."""

    START = 1
    """A process took over; `storage_id` and `config`."""
    WRITER = 2
    """A writer is known; `writer`, `env`, `next` (number of its next message)."""
    OPEN = 3
    """The rows of an env may come; `table`, `writer`, and the encoded EnvMeta."""
    CLOSE = 4
    """They will not; `table`, `env`, `writer`."""
    INSERT = 5
    """A message came in its turn; `tables`, `writer`, `env`, `seq`, and the encoded message."""
    REFUSE = 6
    """A message came in its turn and was not stored; `tables`, `writer`, `env`, `seq`."""
    CUT = 7
    """The open episodes of an env are ended; `table`, `env`."""
    CLEAR = 8
    """A table was emptied; `table`."""
    PRIORITIES = 9
    """Priorities were set; `table`, and the encoded request."""
    DRAWN = 10
    """A batch that stays was drawn; `table`, `rank`, `world_size`, `sampled`, `limiter`: the state
    of the rate limiter, and `rng`: that of the generator after it."""
    DISCARD = 11
    """An episode of an env was discarded; `table`, `env`, `request`, and `discarded` (how many
    transitions)."""
    LEND = 12
    """A batch that leaves was lent; `table`, `count`, `rank`, `world_size`, `learner`."""
    USED = 13
    """It was used; `table`, `rank`, `world_size`, `batch`, and whether it was `returned` before."""
    RETURN = 14
    """It was given back; `table`, `rank`, `batch`."""


def encode(fields: dict[str, Any], data: bytes = b"") -> tuple[bytes, ...]:
    """Returns the payload of a record, in parts.

    Args:
        fields: Its fields.
        data: Bytes that go with them; not copied.
    """
    text = _to_json(fields).encode()
    return (_LENGTH.pack(len(text)) + text, data)


def decode(payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Returns fields and bytes of a record."""
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    return json.loads(bytes(payload[_LENGTH.size : start])), payload[start:]
