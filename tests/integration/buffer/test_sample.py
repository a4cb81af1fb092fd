"""Samples over real sockets: two phases, fetched ahead, and silent producers named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.rpc.channel import connect
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually
from rlightning.types import EnvRet, PolicyResponse
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import ChunkJoiner
from tests.integration.buffer.harness import (
    FAST,
    FORGETFUL,
    act,
    acting,
    asking,
    buffer_server,
    check_rollout,
    inserting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions, meta


class RawLearner:
    """A Sample stream message by message."""

    def __init__(self, call: Any, token: str, client_id: str) -> None:
        self.call = call
        self.token = token
        self.client_id = client_id

    async def hello(self) -> pb.SampleWelcome:
        request = pb.SampleRequest()
        request.hello.session.protocol_version = 1
        request.hello.session.client_id = self.client_id
        request.hello.session.resume_token = self.token
        await self.call.write(request.SerializeToString())
        welcome = (await self.read()).welcome
        self.token = welcome.session.resume_token
        return welcome

    async def credit(self, batches: int) -> None:
        request = pb.SampleRequest(credit=pb.SampleCredit(batches=batches))
        await self.call.write(request.SerializeToString())

    async def ack(self, batch_id: int) -> None:
        await self.call.write(
            pb.SampleRequest(ack=pb.SampleAck(batch_id=batch_id)).SerializeToString()
        )

    async def read(self) -> pb.SampleResponse:
        return pb.SampleResponse.FromString(await asyncio.wait_for(self.call.read(), 30))

    async def batch(self) -> tuple[int, bytes]:
        """Reads one batch; returns its number and its bytes."""
        joiner = None
        while True:
            chunk = (await self.read()).chunk
            assert len(chunk.data) < 2**20
            joiner = joiner or ChunkJoiner(chunk.total_bytes, max_bytes=2**30)
            whole = joiner.add(chunk.offset, chunk.data)
            if whole is not None:
                return chunk.batch_id, bytes(whole)


@asynccontextmanager
async def raw_learner(
    address: str, token: str = "", client_id: str = "raw"
) -> AsyncIterator[RawLearner]:
    async with connect(address, rpc=FAST) as channel:
        call = channel.stream_stream("/rlightning.v1.BufferService/Sample")()
        try:
            yield RawLearner(call, token, client_id)
        finally:
            call.cancel()


async def test_an_unacked_batch_comes_again_unchanged() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
    ):
        async with raw_learner(buffers.address) as learner:
            await learner.hello()
            await learner.credit(2)
            first, second = await learner.batch(), await learner.batch()
            assert (first[0], second[0]) == (1, 2)
        async with raw_learner(buffers.address, learner.token) as again:
            assert (await again.hello()).session.resumed
            await again.credit(0)
            assert [await again.batch(), await again.batch()] == [first, second]
            await again.ack(1)
            await again.credit(1)
            assert (await again.batch())[0] == 3
        async with raw_learner(buffers.address, again.token) as last:
            await last.hello()
            await last.ack(2)
            await last.credit(0)
            assert (await last.batch())[0] == 3


async def test_an_ack_is_good_in_another_session_of_its_client_and_for_what_is_ready() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
    ):
        async with raw_learner(buffers.address) as learner:
            await learner.hello()
            await learner.credit(1)
            assert (await learner.batch())[0] == 1
        async with raw_learner(buffers.address, client_id="next") as following:
            await following.hello()
            await following.ack(1)  # while the other may still come back for it
            await following.credit(1)
            assert (await following.batch())[0] == 2
        rollouts = buffers.table.buffer.rollouts
        assert rollouts.oldest == 0
        await assert_eventually(lambda: rollouts.ready == 2)  # the leases have ended
        async with raw_learner(buffers.address, client_id="last") as last:
            await last.hello()
            await last.ack(1)  # which it never had
            await last.credit(1)
            assert (await last.batch())[0] == 1
            await last.ack(1)
        async with raw_learner(buffers.address, client_id="next") as following:
            await following.hello()
            await following.ack(2)
            await following.credit(1)
            assert (await following.batch())[0] == 3
            assert rollouts.oldest >= 2


async def test_what_a_learner_did_not_ack_is_for_the_next_one() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
    ):
        async with sampling(buffers.address) as learner:
            for rollout in range(3):
                assert (await learner.next_batch(5)).metadata["rollout"] == rollout
        async with sampling(buffers.address) as learner:
            batch = await learner.next_batch(5)
            assert batch.metadata["rollout"] == 2
            check_rollout(batch, 8, 2)


async def test_a_dead_learner_keeps_the_next_one_waiting_for_no_longer_than_its_lease() -> None:
    env = ScriptedEnv(2)
    slow = FAST.model_copy(update={"resume_window_s": 600.0})
    async with (
        buffer_server(rpc=slow, max_rollouts=1) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
        sampling(proxy.address) as dead,
    ):
        assert (await dead.next_batch(5)).metadata["rollout"] == 0
        await proxy.refuse()
        async with sampling(buffers.address) as learner:
            with pytest.raises(DeadlineExceededError):
                await learner.next_batch(FAST.lease_s / 2)  # it may come back
            for rollout in range(3):
                assert (await learner.next_batch(10)).metadata["rollout"] == rollout
        await proxy.start()  # it does, but nothing is left of what it had
        assert (await dead.next_batch(10)).metadata["rollout"] == 2


async def test_a_learner_comes_back_after_its_batches_went_to_another_one() -> None:
    """Those that it still has come to it once more, or it would wait for others for ever."""
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
        sampling(proxy.address) as away,
    ):
        rollouts = buffers.table.buffer.rollouts
        assert (await away.next_batch(5)).metadata["rollout"] == 0
        await assert_eventually(lambda: (rollouts.held, rollouts.ready) == (2, 0))  # one is ahead
        async with sampling(buffers.address, prefetch=0) as other:
            await proxy.refuse()
            assert (await other.next_batch(10)).metadata["rollout"] == 0
        await proxy.start()
        # It had the first one: that ack makes room for the third.
        await assert_eventually(lambda: rollouts.formed == 3, 60)
        assert [(await away.next_batch(5)).metadata["rollout"] for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_a_cut_connection_loses_and_repeats_nothing() -> None:
    envs = [ScriptedEnv(2, lambda row, episode: (7, True), env_id=f"cp-{i}") for i in (0, 1)]
    async with (
        buffer_server(rollout_length=4) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(proxy.address, envs[0].meta) as first,
        inserting(proxy.address, envs[1].meta) as second,
        sampling(proxy.address) as learner,
        acting((first, envs[0]), (second, envs[1])),
    ):
        before: dict[int, Any] = {}
        for rollout in range(40):
            if rollout % 5 == 2:
                proxy.reset()
            if rollout % 5 == 4:
                proxy.cut()
            batch = await learner.next_batch(10)
            assert batch.metadata["rollout"] == rollout
            check_rollout(batch, 4, 4)
            for row in range(4):
                last = before.get(row)
                now = {name: batch.columns[name][:, row] for name in ("step", "episode_id")}
                if last is not None:  # the rollouts of a row follow each other without a gap
                    ended = last["done"]
                    assert now["step"][0] == (0 if ended else last["step"] + 1)
                done = batch.columns["terminated"][-1, row]
                before[row] = {"step": now["step"][-1], "done": bool(done)}
        assert first.resent + second.resent > 0
        counters = buffers.table.buffer.counters
        assert (counters.lost, counters.segments) == (0, 0)


async def test_a_silent_producer_is_named_to_the_learner_and_the_stream_lives_on() -> None:
    busy, silent = ScriptedEnv(2, env_id="busy"), ScriptedEnv(2, env_id="silent")
    async with (
        buffer_server(producer_timeout_s=0.4) as buffers,
        inserting(buffers.address, busy.meta) as client,
        inserting(buffers.address, silent.meta) as quiet,
        sampling(buffers.address) as learner,
        acting((client, busy)),
    ):
        with pytest.raises(UnavailableError, match="env 'silent' .* last heard 0") as caught:
            await learner.next_batch(5)
        assert caught.value.reason == "PRODUCER_SILENT"
        assert "busy" not in str(caught.value)
        await act(quiet, silent, 8)
        assert (await learner.next_batch(5)).metadata["env_ids"] == ["busy", "silent"]


async def test_no_producer_at_all_is_said_too() -> None:
    async with (
        buffer_server(producer_timeout_s=0.2) as buffers,
        sampling(buffers.address) as learner,
    ):
        with pytest.raises(UnavailableError, match="no producer writes to table 'default'"):
            await learner.next_batch(5)


async def test_a_producer_that_leaves_for_good_is_not_waited_for() -> None:
    one, two = ScriptedEnv(2, env_id="one"), ScriptedEnv(2, env_id="two")
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, one.meta) as client,
        inserting(buffers.address, two.meta) as other,
        sampling(buffers.address) as learner,
        acting((client, one)),
    ):
        await act(other, two, 3)
        await other.flush(5)
        with pytest.raises(DeadlineExceededError):
            await learner.next_batch(0.2)
        await other.close()
        assert (await learner.next_batch(5)).metadata["env_ids"] == ["one"]
        assert buffers.table.buffer.counters.discarded == 6


async def test_large_batches_come_in_parts_and_within_a_cap() -> None:
    space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    spec = meta(32, observation=space)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (6, 32, 64, 64, 3), np.uint8)

    def item(step: int) -> tuple[EnvRet, PolicyResponse]:
        env_ret = EnvRet("env", frames[step], np.full(32, step), episode_id=np.arange(32))
        env_ret.last_terminated = env_ret.last_truncated = np.zeros(32, bool)
        env_ret.step = np.full(32, step)
        return env_ret, PolicyResponse("env", action=np.full(32, step))

    async with (
        buffer_server(rollout_length=5, rpc=FORGETFUL) as buffers,
        inserting(buffers.address, spec) as client,
    ):
        for step in range(6):
            await client.insert(*item(step))
        async with sampling(buffers.address, max_batch_bytes=2**20) as small:
            with pytest.raises(ResourceExhaustedError, match="max_batch_bytes"):
                await small.next_batch(5)
        async with sampling(buffers.address) as learner:
            # The other one might have come back for it within its resume window.
            batch = await learner.next_batch(5)
            np.testing.assert_array_equal(batch.columns["observation"], frames[:5])
            np.testing.assert_array_equal(batch.columns["next_observation"], frames[1:])
            assert not batch.columns["observation"].flags.writeable


async def test_a_batch_that_a_cut_interrupts_is_told_of_and_comes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = ScriptedEnv(1024)  # so large that the batch comes in parts
    async with (
        buffer_server(rollout_length=64) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, env.meta) as client,
        sampling(proxy.address) as learner,
    ):
        proxy.bytes_per_s = 1e6
        waiting = asyncio.create_task(learner.next_batch(20))
        await act(client, env, 64)
        await assert_eventually(lambda: learner._joiner is not None, 60)
        proxy.bytes_per_s = None
        proxy.reset()
        check_rollout(await waiting, 64, 1024)
    assert "broke in the middle of a batch" in caplog.text


async def test_a_replay_table_samples_again_and_again() -> None:
    env = ScriptedEnv(2, lambda row, episode: (5, True))
    async with (
        buffer_server(type="ReplayBuffer", capacity=100, auto_truncate_episode=True) as buffers,
        inserting(buffers.address, env.meta) as client,
        sampling(buffers.address, batch_size=32) as learner,
    ):
        waiting = asyncio.create_task(learner.next_batch(5))
        await act(client, env, 20)
        for _ in range(5):
            batch = await waiting
            assert check_transitions(batch.columns) == 32
            waiting = asyncio.create_task(learner.next_batch(5))
        await waiting
        assert buffers.table.buffer.size() == 40


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ("RolloutBuffer", {"batch_size": 5}, "sends whole rollouts"),
        ("ReplayBuffer", {}, "needs a batch_size"),
    ],
)
async def test_a_batch_that_the_table_does_not_offer_is_refused(
    table: str, options: dict[str, Any], message: str
) -> None:
    async with buffer_server(type=table) as buffers:
        with pytest.raises(InvalidRequestError, match=message):
            async with sampling(buffers.address, **options):
                pass


async def test_only_one_batch_is_fetched_ahead() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=2, max_rollouts=6) as buffers,
        inserting(buffers.address, env.meta) as client,
        sampling(buffers.address) as learner,
        acting((client, env)),
    ):
        await learner.next_batch(5)
        rollouts = buffers.table.buffer.rollouts
        await assert_eventually(lambda: (rollouts.held, buffers.table.sampled_total) == (6, 8))


async def test_priorities_are_set_over_the_wire() -> None:
    env = ScriptedEnv(2, lambda row, episode: (5, True))
    sampler = {"type": "prioritised", "alpha": 1.0, "seed": 1}
    async with (
        buffer_server(type="ReplayBuffer", auto_truncate_episode=True, sampler=sampler) as buffers,
        inserting(buffers.address, env.meta) as writer,
        asking(buffers.address) as client,
    ):
        await act(writer, env, 10)
        await writer.flush(5)
        async with sampling(buffers.address, batch_size=20) as learner:
            batch = await learner.next_batch(timeout_s=5)
        columns = batch.columns
        check_transitions(columns)
        assert columns["sample_weight"].tolist() == [1.0] * 20
        index, generation = columns["sample_index"], columns["sample_generation"]
        priorities = np.where(index == index[0], 1.0, 0.0)
        assert await client.update_priorities(index, priorities, generation) == 20
        assert await client.update_priorities(index, priorities, generation + 100) == 0
        async with sampling(buffers.address, batch_size=10) as learner:
            again = await learner.next_batch(timeout_s=5)
        assert set(again.columns["sample_index"]) <= {index[0], *set(range(20)) - set(index)}
        for indices, values, generations, message in (
            ([0], [np.nan], [], "priorities: expected finite"),
            ([0], [-1.0], [], "priorities: expected finite"),
            ([0, 1], [1.0], [], "priorities: expected 2"),
            ([0], [1.0], [1, 2], "generations: expected 1"),
            ([99], [1.0], [], "indices: index 99 of 20"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await client.update_priorities(indices, values, generations)
        with pytest.raises(NotFoundError, match="no table"):
            await client.update_priorities([0], [1.0], table="other")


async def test_a_table_without_priorities_says_so() -> None:
    async with (
        buffer_server(type="ReplayBuffer") as buffers,
        asking(buffers.address) as client,
    ):
        with pytest.raises(PreconditionError, match="prioritised"):
            await client.update_priorities([], [])


async def test_sequences_and_episodes_are_sampled_over_the_wire() -> None:
    env = ScriptedEnv(2, lambda row, episode: (4 + row, True))
    options = {"type": "ReplayBuffer", "auto_truncate_episode": True}
    async with (
        buffer_server(**options, sampler={"type": "sequence", "length": 3}) as buffers,
        inserting(buffers.address, env.meta) as writer,
        sampling(buffers.address, batch_size=6) as learner,
    ):
        await act(writer, env, 12)
        await writer.flush(5)
        batch = await learner.next_batch(timeout_s=5)
        assert batch.columns["reward"].shape == (6, 3)
        check_transitions(batch.columns)
    async with (
        buffer_server(**options, storage={"unit": "episode"}) as buffers,
        inserting(buffers.address, env.meta) as writer,
        sampling(buffers.address, batch_size=4) as learner,
        asking(buffers.address) as client,
    ):
        await act(writer, env, 12)
        await writer.flush(5)
        batch = await learner.next_batch(timeout_s=5)
        count = check_transitions(batch.columns)
        lengths = batch.metadata.get("lengths")
        assert count == (sum(lengths) if lengths else 4 * batch.columns["reward"].shape[1])
        both = await client.get([0, 1])
        assert [check_transitions(episode) for episode in both] == [4, 5]


async def test_an_ack_of_a_caller_that_was_cancelled_before_its_turn_is_sent_all_the_same() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(max_rollouts=1) as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
        sampling(buffers.address, prefetch=0) as learner,
    ):
        await learner.next_batch(5)
        assert learner._session is not None
        assert learner._session._stream is not None
        async with learner._session._stream._lock:  # as while a heartbeat is written
            acking = asyncio.create_task(learner.ack())
            await asyncio.sleep(0)
            acking.cancel()
            await asyncio.wait({acking})
        for _ in range(2):
            check_rollout(await learner.next_batch(10), 8, 2)
