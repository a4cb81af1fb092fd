"""Inserts and samples that wait for each other, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlightning.buffer import Where
from rlightning.buffer.local_buffer import LocalBuffer
from rlightning.errors import DeadlineExceededError, InvalidRequestError, PreconditionError
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually
from rlightning.utils.config import BufferConfig
from tests.integration.buffer.harness import (
    act,
    acting,
    asking,
    buffer_server,
    inserting,
    keep_acting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

REPLAY: dict[str, Any] = {"type": "ReplayBuffer", "auto_truncate_episode": True, "capacity": 1000}


def env(length: int = 1, rows: int = 1) -> ScriptedEnv:
    return ScriptedEnv(rows, lambda row, episode: (length, True))


async def test_inserts_wait_for_samples_and_samples_for_inserts() -> None:
    one = env()
    limit = {"min_size": 20, "samples_per_insert": 4, "error_buffer": 40}
    async with (
        buffer_server(**REPLAY, rate_limiter=limit) as buffers,
        inserting(buffers.address, one.meta, window_items=2) as writer,
        asking(buffers.address) as asker,
        acting((writer, one)),
    ):
        limiter = buffers.table.limiter
        await assert_eventually(lambda: buffers.table.producers["env"].held_by is not None)
        assert limiter.inserted == 30  # 4 * 20 + 40, each worth 4
        await asyncio.sleep(0.2)
        assert limiter.inserted == 30
        async with sampling(buffers.address, batch_size=8, prefetch=0) as learner:
            for _ in range(50):
                assert check_transitions((await learner.next_batch(5)).columns) == 8
                assert limiter.inserted <= 30 + limiter.sampled / 4 + 1
            assert limiter.sampled == 400
            await assert_eventually(lambda: limiter.inserted == 130)
            stats = (await asker.describe()).stats["tables"]["default"]["limiter"]
            assert stats == {
                "inserted": 130,
                "sampled": 400,
                "size": 130,
                "min_size": 20,
                "samples_per_insert": 4.0,
                "surplus": 120.0,
                "least_surplus": 40.0,
                "most_surplus": 120.0,
            }


async def test_a_learner_that_outpaces_the_actors_waits() -> None:
    one = env()
    limit = {"min_size": 10, "samples_per_insert": 1, "error_buffer": 10}
    async with (
        buffer_server(**REPLAY, rate_limiter=limit) as buffers,
        inserting(buffers.address, one.meta, window_items=2) as writer,
        sampling(buffers.address, batch_size=4, prefetch=0) as learner,
    ):
        await act(writer, one, 9)
        with pytest.raises(DeadlineExceededError):
            await learner.next_batch(0.2)
        await act(writer, one, 1)
        await writer.flush(5)
        for _ in range(2):
            await learner.next_batch(5)
        with pytest.raises(DeadlineExceededError):  # 8 of 10 were sampled
            await learner.next_batch(0.2)
        await act(writer, one, 2)
        await learner.next_batch(5)
        assert buffers.table.limiter.state() == {"inserted": 12, "sampled": 12}


async def test_a_queue_hands_each_transition_out_once_and_holds_its_writers() -> None:
    one = env(5)
    async with (
        buffer_server(**REPLAY, rate_limiter={"queue_size": 16}) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, one.meta, window_items=2) as writer,
        acting((writer, one)),
    ):
        await assert_eventually(lambda: buffers.table.producers["env"].waiting > 0)
        assert 16 <= buffers.table.buffer.size() < 16 + 5
        seen: list[tuple[int, int]] = []

        def see(columns: dict[str, Any]) -> None:
            assert check_transitions(columns) == 8
            pairs = zip(columns["episode_id"].tolist(), columns["step"].tolist(), strict=True)
            seen.extend(pairs)

        async with sampling(proxy.address, batch_size=8) as learner:
            for number in range(20):
                if number % 5 == 4:
                    proxy.cut()
                see((await learner.next_batch(10)).columns)
        # It closed with a batch in its hands, and perhaps one ahead: they are for the next one.
        async with sampling(buffers.address, batch_size=8) as learner:
            again = (await learner.next_batch(5)).columns
            first = (int(again["episode_id"][0]), int(again["step"][0]))
            assert first == seen[-8]
            del seen[-8:]
            see(again)
            for _ in range(5):
                see((await learner.next_batch(5)).columns)
        first_episode = seen[0][0]
        assert seen == [(first_episode + n // 5, n % 5) for n in range(len(seen))]


async def test_what_was_used_before_a_session_was_lost_does_not_come_again() -> None:
    one = env(4)
    async with (
        buffer_server(**REPLAY, rate_limiter={"queue_size": 8}) as buffers,
        inserting(buffers.address, one.meta, window_items=2) as writer,
        acting((writer, one)),
    ):
        async with sampling(buffers.address, batch_size=4, prefetch=0) as learner:
            first = await learner.next_batch(5)
            await learner.ack()
            await assert_eventually(lambda: buffers.table.queue.taken == 0)
        async with sampling(buffers.address, batch_size=4, prefetch=0) as learner:
            second = await learner.next_batch(5)
        assert second.columns["episode_id"][0] == first.columns["episode_id"][0] + 1


@pytest.mark.parametrize(
    ("limit", "batch_size", "message"),
    [
        (None, 1001, r"batch_size 1001: table 'default' never holds more than 1000"),
        ({"queue_size": 16}, 17, r"rate_limiter\.queue_size of table 'default' allows at most 16"),
        (
            {"samples_per_insert": 2, "error_buffer": 8},
            15,
            r"rate_limiter\.error_buffer of table 'default' allows at most 14 at once",
        ),
    ],
)
async def test_a_batch_that_can_never_be_is_refused(
    limit: dict[str, Any] | None, batch_size: int, message: str
) -> None:
    async with buffer_server(**REPLAY, rate_limiter=limit) as buffers:
        with pytest.raises(InvalidRequestError, match=message):
            async with sampling(buffers.address, batch_size=batch_size):
                pass
        async with sampling(buffers.address, batch_size=batch_size - 1):
            pass


async def test_both_sides_are_told_when_they_wait_for_each_other() -> None:
    one = env()
    limit = {"min_size": 5, "samples_per_insert": 1, "error_buffer": 10}
    async with (
        buffer_server(**REPLAY, rate_limiter=limit) as buffers,
        inserting(buffers.address, one.meta, window_items=2) as writer,
        sampling(buffers.address, batch_size=4, where=Where(min_version=100)) as learner,
    ):
        acting_task = asyncio.create_task(keep_acting(writer, one))
        with pytest.raises(PreconditionError) as sampled:
            await learner.next_batch(10)
        with pytest.raises(PreconditionError) as inserted:
            await asyncio.wait_for(acting_task, 30)
        for error in (sampled.value, inserted.value):
            assert error.reason == "BLOCKED"
            for part in ("inserted 15", "sampled 0", "size 15", "samples_per_insert 1"):
                assert part in str(error)
        with pytest.raises(DeadlineExceededError):
            await learner.next_batch(0.2)  # told once, then it waits on
        async with sampling(buffers.address, batch_size=4, prefetch=0) as other:
            for _ in range(3):
                await other.next_batch(5)
        await writer.flush(5)  # nothing of what waited was lost
        assert buffers.table.limiter.inserted >= 15 + writer.acked - 16
        assert buffers.table.rendezvous.blocked_total == 1


async def test_a_full_table_that_nobody_samples_holds_another_that_somebody_waits_for() -> None:
    one = env()
    tables = {"mine": {}, "full": {"rate_limiter": {"queue_size": 4}, "sampler": None}}
    async with (
        buffer_server(**REPLAY, tables=tables) as buffers,
        inserting(buffers.address, one.meta, tables=["mine", "full"], window_items=2) as writer,
        sampling(buffers.address, table="mine", batch_size=8) as learner,
    ):
        acting_task = asyncio.create_task(keep_acting(writer, one))
        message = r"table 'mine': .*table 'full' has inserted 4, sampled 0, size 4, queue_size 4"
        with pytest.raises(PreconditionError, match=message):
            await learner.next_batch(10)
        with pytest.raises(PreconditionError, match=message):
            await asyncio.wait_for(acting_task, 30)


async def test_the_two_sides_of_one_process_are_told_as_well() -> None:
    one = env()
    config = BufferConfig.from_dict(
        {**REPLAY, "rate_limiter": {"samples_per_insert": 1, "error_buffer": 4}}
    )
    buffer = LocalBuffer(config)
    writer = buffer.writer(one.meta)

    async def write() -> None:
        env_ret = one.reset()
        while True:
            await writer.insert(env_ret, answer(env_ret))
            env_ret = one.step()

    writing = asyncio.create_task(write())
    with pytest.raises(PreconditionError, match="neither can go on"):
        await buffer.next_batch(10, batch_size=9)
    with pytest.raises(PreconditionError, match="inserted 5, sampled 0"):
        await asyncio.wait_for(writing, 30)
    assert buffer.table.buffer.size() == 5
