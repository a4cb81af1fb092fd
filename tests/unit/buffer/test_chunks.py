from __future__ import annotations

import pytest

from rlightning.services.buffer_server.chunks import get_responses, sample_responses
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import CHUNK_BYTES, split_batch


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * 10**6])
def test_chunks_are_what_protobuf_reads(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    parts = list(split_batch(data))
    sampled = [pb.SampleResponse.FromString(message) for message in sample_responses(7, data)]
    for response, (offset, part) in zip(sampled, parts, strict=True):
        assert response.timing.sent_ns
        assert response.chunk == pb.SampleChunk(
            batch_id=7, total_bytes=size, offset=offset, data=bytes(part)
        )
    got = [pb.GetResponse.FromString(message) for message in get_responses(data)]
    assert b"".join(response.data for response in got) == data
    assert [response.offset for response in got] == [offset for offset, _ in parts]
    assert all(len(message) < 2**20 for message in sample_responses(7, data))
