"""A message that is put together by hand is what protobuf would have made."""

from __future__ import annotations

import numpy as np
import pytest

from rlightning.buffer.insert_message import InsertMessage
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_ret
from tests.unit.buffer.scripted import ScriptedEnv


@pytest.mark.parametrize("table", ["", "images"])
@pytest.mark.parametrize("frozen", [False, True])
def test_it_is_valid_protobuf_of_a_known_size(table: str, frozen: bool) -> None:
    env = ScriptedEnv(2)
    message, expected = InsertMessage(), pb.InsertRequest()
    message.table = table
    for number in range(2):  # it is used again and again
        expected.Clear()
        expected.insert.seq, expected.insert.epoch, expected.insert.table = 300 + number, 2, table
        expected.timing.sent_ns = 17
        for _ in range(3):
            env_ret = env.reset()
            env_ret.extra = np.arange(10_000)  # large enough not to be copied by protobuf
            plain, spliced = Writer(splice_bytes=2**30), Writer()
            fill_env_ret(expected.insert.items.add().env_ret, env_ret, plain)
            item = pb.InsertItem()
            fill_env_ret(item.env_ret, env_ret, spliced)
            pieces = spliced.pieces(item)
            message.add(pieces, sum(memoryview(piece).nbytes for piece in pieces), 9)
            if frozen:
                message.freeze()
                env_ret.extra[:] = 0
        assert (message.items, message.leaves) == (3, 27)
        most = message.item_bytes + message.envelope_bytes
        data = message.take(pb.InsertRequest(timing=expected.timing), 300 + number, 2)
        assert pb.InsertRequest.FromString(data) == expected
        assert most - 256 <= len(data) <= most
        assert (message.items, message.leaves, message.item_bytes) == (0, 0, 0)
