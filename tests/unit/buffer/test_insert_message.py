"""Items of a writer that lie in shared memory, and what becomes of them when that is gone."""

from __future__ import annotations

import numpy as np

from rlightning.buffer.insert_message import InsertMessage
from rlightning.types import EnvRet, PolicyResponse
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_ret, fill_policy_response
from rlightning.wire.shared import SharedMemory

PICTURES = np.arange(2 * 64 * 64 * 3, dtype=np.uint8).reshape(2, 64, 64, 3)


def add(message: InsertMessage, key: int, memory: SharedMemory | None) -> None:
    if memory is not None:
        memory.begin(key)
    writer, item = Writer(memory=memory), pb.InsertItem()
    # The turned one finds no room any more in the second item.
    observation = {"a": PICTURES, "b": PICTURES[:, ::-1]}
    fill_env_ret(item.env_ret, EnvRet("env", observation, ts_env_sent_ns=1), writer)
    fill_policy_response(item.response, PolicyResponse("env", action=np.arange(2) + key), writer)
    pieces = writer.pieces(item)
    message.add(pieces, sum(memoryview(piece).nbytes for piece in pieces), 5)
    if memory is not None:
        message.share(key, memory.held_bytes(key))
    message.freeze()


def test_items_leave_shared_memory_as_if_they_had_never_been_there() -> None:
    memory = SharedMemory(64 + 3 * PICTURES.nbytes, min_bytes=1024)
    message, plain = InsertMessage(), InsertMessage()
    for key in (1, 2):
        add(message, key, memory)
        add(plain, key, None)
    assert message.keys == [1, 2]
    assert message.shared_bytes == 3 * PICTURES.nbytes
    assert PICTURES.nbytes < message.item_bytes < 2 * PICTURES.nbytes
    message.take_out(memory)
    assert (message.keys, message.shared_bytes) == ([], 0)
    assert message.nbytes == message.item_bytes == plain.item_bytes
    request = pb.InsertRequest()
    assert message.take(request, 3, 1) == plain.take(request, 3, 1)
