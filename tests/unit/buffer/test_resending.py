"""What a learner gets again after a cut."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlightning.buffer.parts import pieces_of
from rlightning.buffer.remote_buffer import SampleClient
from rlightning.services.buffer_server.chunks import sample_responses
from rlightning.services.buffer_server.samples import SampleHandler
from rlightning.testing import assert_eventually
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


class Learner:
    """A client whose server is the test."""

    def __init__(self, **options: Any) -> None:
        self.client = SampleClient("127.0.0.1:1", **options)
        self.sent: list[pb.SampleRequest] = []
        self.session = SimpleNamespace(
            settled=self._settled,
            send=self._send,
            send_now=self._send,
            new_request=pb.SampleRequest,
            connected=True,
            resumed=True,
        )
        self.client._session = self.session

    async def _settled(self) -> None:
        pass

    async def _send(self, data: bytes) -> None:
        self.sent.append(pb.SampleRequest.FromString(data))

    @property
    def acks(self) -> list[int]:
        return [one.ack.batch_id for one in self.sent if one.HasField("ack")]

    @property
    def credits(self) -> list[tuple[int, int]]:
        asked = (one.credit for one in self.sent if one.HasField("credit"))
        return [(one.batches, one.batch_size) for one in asked]

    async def resume(self) -> None:
        await self.client._on_welcome(Reader(pb.SampleResponse, b""))
        self.sent.clear()

    def arrive(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self.client._on_message(Reader(pb.SampleResponse, chunk))

    async def close(self) -> None:
        self.client._session = None
        await self.client.close()


def deliver(batch_id: int) -> list[bytes]:
    columns = {"reward": np.full(2**19, batch_id, np.float32)}  # more than a chunk
    pieces = pieces_of(Batch(batch_id, columns, {}))
    chunks = list(sample_responses(batch_id, pieces, stays=False))
    assert len(chunks) > 1
    return chunks


@pytest.mark.parametrize("came", [0, 1])
async def test_a_batch_that_was_acked_before_it_came_again_is_not_handed_out_twice(
    came: int,
) -> None:
    learner = Learner(prefetch=1)
    learner.arrive(deliver(1))
    assert (await learner.client.next_batch(5)).batch_id == 1
    await learner.resume()  # the server does not know what came before the cut
    again = deliver(1)
    learner.arrive(again[:came])
    await learner.client.ack()
    learner.arrive(again[came:])
    learner.arrive(deliver(2))
    assert (await learner.client.next_batch(5)).batch_id == 2
    assert learner.acks == [1]
    assert learner.credits == [(1, 0)]  # the one ahead
    await learner.close()


@pytest.mark.parametrize(("prefetch", "size"), [(1, 0), (0, 0), (0, 5)])
async def test_a_batch_that_is_lent_anew_is_acked_again_and_another_one_asked_for(
    prefetch: int, size: int
) -> None:
    learner = Learner(prefetch=prefetch)
    learner.arrive(deliver(1))
    await learner.client.next_batch(5)
    await learner.client.ack()
    await learner.resume()
    asking = asyncio.create_task(learner.client.next_batch(20, batch_size=size))
    await asyncio.sleep(0)
    learner.sent.clear()
    learner.arrive(deliver(1))  # for its credit
    await assert_eventually(lambda: learner.acks == [1] and learner.credits == [(1, size)])
    learner.arrive(deliver(2))
    assert (await asking).batch_id == 2
    await learner.close()


async def test_a_batch_that_a_cancelled_caller_never_saw_is_for_the_next_call() -> None:
    learner = Learner(prefetch=1)
    learner.session.renew = lambda error: None
    learner.arrive(deliver(1))

    async def send(data: bytes) -> None:
        await asyncio.Event().wait()

    learner.session.send = send  # the line is slow
    asking = asyncio.create_task(learner.client.next_batch(20))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    learner.session.send = learner._send
    await learner.resume()
    assert (await learner.client.next_batch(5)).batch_id == 1
    assert learner.acks == []
    await learner.close()


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
