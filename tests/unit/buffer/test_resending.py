"""What a learner gets again after a cut."""

import asyncio
from collections import deque
from types import SimpleNamespace

import numpy as np

from rlightning.buffer.parts import pieces_of
from rlightning.buffer.remote_buffer import SampleClient
from rlightning.services.buffer_server.chunks import sample_responses
from rlightning.services.buffer_server.samples import SampleHandler
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Batch, Reader


async def test_a_batch_that_is_acked_while_another_is_sent_again_is_not_sent() -> None:
    learner = SimpleNamespace(
        unacked={1: "one", 2: "two"}, credits=[], credited=asyncio.Event(), feed=None
    )
    sent, done = [], asyncio.Event()

    async def send(session, batch_id, again, feed):
        sent.append(batch_id)
        learner.unacked.pop(2)
        done.set()

    handler = SimpleNamespace(_again=lambda learner, sent: sent, _send=send)
    sending = asyncio.create_task(SampleHandler._send_batches(handler, learner, None))
    await asyncio.wait_for(done.wait(), 20)
    await asyncio.sleep(0)
    assert not sending.done()
    sending.cancel()
    assert sent == [1]


async def test_a_batch_that_was_acked_before_it_came_again_is_not_handed_out_twice() -> None:
    sent = []

    async def settled():
        pass

    async def send(data):
        sent.append(pb.SampleRequest.FromString(data))

    session = SimpleNamespace(
        settled=settled, send=send, new_request=pb.SampleRequest, connected=True
    )
    client = SampleClient("127.0.0.1:1", prefetch=1)
    client._session = session

    def deliver(batch_id: int) -> list[bytes]:
        columns = {"reward": np.full(2**19, batch_id, np.float32)}  # more than a chunk
        pieces = pieces_of(Batch(batch_id, columns, {}))
        return list(sample_responses(batch_id, pieces, stays=False))

    def arrive(chunks: list[bytes]) -> None:
        for chunk in chunks:
            client._on_message(Reader(pb.SampleResponse, chunk))

    arrive(deliver(1))
    assert (await client.next_batch(5)).batch_id == 1
    again = deliver(1)
    assert len(again) > 1
    arrive(again[:1])  # the connection was cut, and the server does not know what came
    await client.ack()
    arrive(again[1:])
    arrive(deliver(1))
    arrive(deliver(2))
    assert (await client.next_batch(5)).batch_id == 2
    assert [one.ack.batch_id for one in sent if one.HasField("ack")] == [1]
    client._session = None
    await client.close()


async def test_a_batch_that_was_used_before_it_is_free_again_is_not_sent() -> None:
    """Its ack came while another learner had it."""
    batches = [SimpleNamespace(leaves=True, batch_id=number) for number in (1, 2)]
    released, sent, done = [], [], asyncio.Event()
    learner = SimpleNamespace(
        unacked={},
        credits=deque([0]),
        credited=asyncio.Event(),
        early=[1],
        feed=SimpleNamespace(release=lambda taken: released.append(taken.batch_id)),
    )

    async def next_batch(learner, session):
        return batches.pop(0)

    async def settled():
        pass

    async def send(session, batch_id, sent_batch, feed):
        sent.append(batch_id)
        done.set()

    handler = SimpleNamespace(
        _next=next_batch, _send=send, _store=SimpleNamespace(settled=settled), batches_total=0
    )
    sending = asyncio.create_task(SampleHandler._send_batches(handler, learner, None))
    await asyncio.wait_for(done.wait(), 20)
    sending.cancel()
    assert (released, sent) == ([1], [2])
    assert list(learner.unacked) == [2]
    assert not learner.credits
