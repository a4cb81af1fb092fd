"""What a learner gets again after a cut."""

import asyncio
from types import SimpleNamespace

from rlightning.services.buffer_server.samples import SampleHandler


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
