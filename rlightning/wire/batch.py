"""Batches of transitions to and from their message."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlightning.errors import CodecError
from rlightning.v1 import buffer_service_pb2
from rlightning.wire.fields import set_int
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.splice import Buffer
from rlightning.wire.value import fill_value, read_mapping


class Batch(NamedTuple):
    """A batch of transitions."""

    batch_id: int
    """Number of the batch within its session."""
    columns: dict[str, Any]
    """Arrays, or nestings of arrays, by name: leaves [B, ...] or, for rollouts, [T, N, ...]."""
    metadata: dict[str, Any]
    """What the batch is made of."""


def encode_batch(batch: Batch) -> bytes:
    """Returns the encoded message of a batch; see `fill_batch`."""
    return b"".join(batch_pieces(batch))


def batch_pieces(batch: Batch, limits: Limits = DEFAULT_LIMITS) -> list[Any]:
    """Returns what `encode_batch` does in pieces, so that large arrays are not copied."""
    w = Writer(limits)
    pb = buffer_service_pb2.Batch()
    fill_batch(pb, batch, w)
    return w.pieces(pb)


def decode_batch(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Batch:
    """Returns the batch of an encoded message; see `read_batch`."""
    r = Reader(buffer_service_pb2.Batch, data, limits=limits)
    return read_batch(r.message, r)


def fill_batch(pb: buffer_service_pb2.Batch, batch: Batch, w: Writer) -> None:
    """Writes a batch into its empty message.

    Args:
        pb: The message to fill.
        batch: What to send; nothing of it may change before `w.finish`.
        w: The writer of the whole message.

    Raises:
        CodecError: Something in it cannot be sent; the path says where.
    """
    set_int(pb, "batch_id", batch.batch_id)
    for name in ("columns", "metadata"):
        try:
            fill_value(getattr(pb, name), getattr(batch, name), w)
        except CodecError as error:
            under(error, name)
            raise


def read_batch(pb: buffer_service_pb2.Batch, r: Reader[Any]) -> Batch:
    """Reads a batch.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        The batch; arrays in it are read-only, see `read_tensor`.

    Raises:
        CodecError: Something in it is not valid or passes a limit; the path says where.
    """
    return Batch(
        pb.batch_id,
        read_mapping(pb.columns, "columns", r),
        read_mapping(pb.metadata, "metadata", r) if pb.HasField("metadata") else {},
    )
