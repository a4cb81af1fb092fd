"""Chunks of a batch as messages, without protobuf copying what they carry.

Setting a `bytes` field and encoding it copies the data twice, into fresh memory each time, which
takes longer than sending it (measured for 0.6 MB: 1.1 ms against 0.06 ms).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlightning.rpc.protocol import stamp
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import split_pieces

_SAMPLE_CHUNK = pb.SampleResponse.CHUNK_FIELD_NUMBER << 3 | 2
_SAMPLE_DATA = pb.SampleChunk.DATA_FIELD_NUMBER << 3 | 2
_GET_DATA = pb.GetResponse.DATA_FIELD_NUMBER << 3 | 2


def sample_responses(
    batch_id: int, pieces: Sequence[Any], *, stays: bool = False
) -> Iterator[bytes]:
    """Yields the encoded and stamped `SampleResponse`s that carry the pieces of a batch.

    Args:
        batch_id: Number of the batch.
        pieces: The encoded batch.
        stays: Whether its rows stay in the buffer.
    """
    total = _size(pieces)
    for offset, part in split_pieces(pieces):
        envelope = pb.SampleResponse()
        stamp(envelope)
        small = pb.SampleChunk(batch_id=batch_id, total_bytes=total, offset=offset, stays=stays)
        length = _size(part)
        chunk = small.SerializeToString() + _head(_SAMPLE_DATA, length)
        head = _head(_SAMPLE_CHUNK, len(chunk) + length)
        yield b"".join((envelope.SerializeToString(), head, chunk, *part))


def get_responses(pieces: Sequence[Any]) -> Iterator[bytes]:
    """Yields the encoded `GetResponse`s that carry the pieces of a batch."""
    total = _size(pieces)
    for offset, part in split_pieces(pieces):
        small = pb.GetResponse(total_bytes=total, offset=offset)
        yield b"".join((small.SerializeToString(), _head(_GET_DATA, _size(part)), *part))


def _size(pieces: Sequence[Any]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def _head(tag: int, length: int) -> bytes:
    """Returns tag and length of a length-delimited field."""
    encoded = bytearray((tag,))
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)
