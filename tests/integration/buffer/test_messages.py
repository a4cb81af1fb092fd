"""Several items in one message: fewer messages, and each item still stored once and in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.errors import ResourceExhaustedError
from rlightning.services.env_server.group_actor import window_of
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually
from rlightning.utils.config import BufferConfig
from tests.integration.buffer.harness import (
    act,
    acting,
    buffer_server,
    check_rollout,
    inserting,
    raw_writer,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions


async def test_items_that_come_quickly_share_messages() -> None:
    env = ScriptedEnv(2, lambda row, episode: (5, True))
    async with (
        buffer_server(max_rollouts=1000) as buffers,
        inserting(buffers.address, env.meta) as client,
    ):
        await act(client, env, 200)
        await client.flush(5)
        assert client.acked == 201
        # 51 full ones, and some of fewer where the machine stood still.
        assert buffers.service._insert.counts.messages_total < 120
        columns = buffers.table.buffer.get_all()
        assert check_transitions(columns) == 400
        for row in range(2):
            mine = columns["observation"][:, 0] == row
            np.testing.assert_array_equal(columns["step"][mine], np.arange(200) % 5)


async def test_an_item_that_comes_alone_is_not_kept_waiting() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = env.reset()
        for count in (1, 2, 3):
            await client.insert(env_ret, answer(env_ret))
            await assert_eventually(lambda count=count: client.acked == count)
            env_ret = env.step()


async def test_what_an_item_was_made_of_may_change_at_once() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = env.reset()
        for _ in range(8):
            response = answer(env_ret)
            await client.insert(env_ret, response)
            env_ret.observation[:] = -1
            response.action[:] = -1
            env_ret = env.step()
        await client.flush(5)
        assert check_transitions(buffers.table.buffer.get_all()) == 14


async def test_large_items_are_sent_at_once_and_alone() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = env.reset()
        for _ in range(6):
            response = answer(env_ret)
            response.logits = np.ones((2, 2**14))  # 256 KiB
            await client.insert(env_ret, response)
            response.logits[:] = 0
            env_ret = env.step()
        await client.flush(5)
        assert buffers.service._insert.counts.messages_total == 6
        columns = buffers.table.buffer.get_all()
        assert check_transitions(columns) == 10
        assert (columns["logits"] == 1).all()


async def test_a_message_has_no_more_values_than_a_reader_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ScriptedEnv(2)
    monkeypatch.setattr("rlightning.buffer.insert_client._MAX_LEAVES", 1)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        await act(client, env, 8)
        await client.flush(5)
        assert buffers.service._insert.counts.messages_total == 9
        assert check_transitions(buffers.table.buffer.get_all()) == 16


async def test_cuts_lose_repeat_and_mix_nothing() -> None:
    env = ScriptedEnv(2, lambda row, episode: (7, row == 0))
    rng = np.random.default_rng(3)
    async with (
        buffer_server(max_rollouts=10_000) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(proxy.address, env.meta, window_items=16) as client,
        acting((client, env)),
    ):
        counts = buffers.service._insert.counts
        for number in range(6):
            before = client.acked
            await assert_eventually(lambda before=before: client.acked > before + 20, 60)
            await asyncio.sleep(rng.uniform(0, 0.005))  # anywhere in a message, or between two
            proxy.cut() if number % 2 else proxy.reset()
        await assert_eventually(lambda: client.resent > 0, 60)
        before = client.acked
        await assert_eventually(lambda: client.acked > before + 20, 60)
        columns = buffers.table.buffer.get_all()
        check_transitions(columns)
        for row in range(2):
            mine = columns["observation"][:, 0] == row
            np.testing.assert_array_equal(columns["step"][mine], np.arange(mine.sum()) % 7)
        counters = buffers.table.buffer.counters
        assert (counters.lost, counters.segments, client.rebased) == (0, 0, 0)
        assert counts.messages_total - counts.duplicates_total < client.acked / 2


@pytest.mark.parametrize("max_rollouts", [1, 2])
async def test_a_rollout_that_ends_within_a_message_is_complete_at_once(max_rollouts: int) -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=6, max_rollouts=max_rollouts) as buffers,
        inserting(buffers.address, env.meta) as client,
        sampling(buffers.address, prefetch=0) as learner,
        acting((client, env)),
    ):
        rollouts = buffers.table.buffer.rollouts
        for number in range(8):
            # Nobody has released one: all that may be kept are here, and not more.
            await assert_eventually(lambda: rollouts.held == max_rollouts)
            batch = await learner.next_batch(5)
            assert batch.metadata["rollout"] == number
            check_rollout(batch, 6, 2)
            np.testing.assert_array_equal(batch.columns["step"][:, 0], number * 6 + np.arange(6))
            await learner.ack()
        assert buffers.table.buffer.counters.lost == 0


async def test_where_storing_may_fail_items_come_one_by_one() -> None:
    """So that nothing is stored of a message of which something does not fit."""
    env = ScriptedEnv(1, lambda row, episode: (2, True))
    storage = {"mode": "fixed"}
    async with buffer_server(
        type="ReplayBuffer", capacity=6, storage=storage, auto_truncate_episode=True
    ) as buffers:
        async with raw_writer(buffers.address, env.meta) as writer:
            assert (await writer.hello()).max_items == 1
        async with inserting(buffers.address, ScriptedEnv(1, env_id="x").meta) as client:
            mine = ScriptedEnv(1, lambda row, episode: (2, True), env_id="x")

            async def insert():
                await act(client, mine, 20)
                await client.flush(5)

            with pytest.raises(ResourceExhaustedError, match="room for 0 of 6"):
                await insert()
        assert buffers.service._insert.counts.refused_total >= 1
        assert check_transitions(buffers.table.buffer.get_all()) == 6


@pytest.mark.parametrize("length", [1, 2, 3, 6, 8, 16, 128])
def test_what_is_under_way_fits_into_one_rollout(length: int) -> None:
    from rlightning.buffer.remote_buffer import items_per_message

    window = window_of(BufferConfig(type="RolloutBuffer", capacity=9, rollout_length=length))
    assert 1 <= window <= 32
    if length > 2:
        assert window + items_per_message(window) - 1 + 2 <= length


async def test_samples_that_stay_are_not_acked(monkeypatch: pytest.MonkeyPatch) -> None:
    env, acks = ScriptedEnv(2, lambda row, episode: (2, True)), []
    ack = SampleClient._ack
    monkeypatch.setattr(SampleClient, "_ack", lambda *args: acks.append(args[2]) or ack(*args))
    replay = {"type": "ReplayBuffer", "capacity": 100, "auto_truncate_episode": True}
    for buffer, expected in ((replay, []), ({"max_rollouts": 4}, [1, 2])):
        async with (
            buffer_server(**buffer) as buffers,
            inserting(buffers.address, env.meta) as client,
            sampling(buffers.address, batch_size=3 if buffer is replay else 0) as learner,
        ):
            await act(client, env, 30)
            await client.flush(5)
            for _ in range(3):
                await learner.next_batch(5)
        assert acks == expected
