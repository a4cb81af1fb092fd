from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rlightning.services.buffer_server.chunks import get_responses, sample_responses
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import (
    CHUNK_BYTES,
    Batch,
    batch_pieces,
    encode_batch,
    split_batch,
    split_pieces,
)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * 10**6])
def test_chunks_are_what_protobuf_reads(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    parts = list(split_batch(data))
    # As a batch comes: small pieces between large ones.
    cuts = [0, *sorted({size // 5, min(3, size), size // 2, size - size // 7}), size]
    pieces = [data[start:stop] for start, stop in pairwise(cuts)]
    sampled = [
        pb.SampleResponse.FromString(message) for message in sample_responses(7, pieces, stays=True)
    ]
    for response, (offset, part) in zip(sampled, parts, strict=True):
        assert response.timing.sent_ns
        assert response.chunk == pb.SampleChunk(
            batch_id=7, total_bytes=size, offset=offset, data=bytes(part), stays=True
        )
    got = [pb.GetResponse.FromString(message) for message in get_responses(pieces)]
    assert b"".join(response.data for response in got) == data
    assert [response.offset for response in got] == [offset for offset, _ in parts]
    assert all(len(message) < 2**20 for message in sample_responses(7, pieces))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "complex64", "bool", "int64"])
def test_pieces_of_any_dtype_are_cut(dtype: str) -> None:
    columns = {
        "large": np.ones((3, 70_000), dtype),
        "small": np.arange(3),
        "none": np.zeros((0, 2)),
    }
    batch = Batch(3, columns, {})
    parts = list(split_pieces(batch_pieces(batch), 9_999))
    whole = encode_batch(batch)
    assert [offset for offset, _ in parts] == list(range(0, len(whole), 9_999))
    assert b"".join(b"".join(part) for _, part in parts) == whole
