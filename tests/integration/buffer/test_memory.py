"""What a client can make the server allocate: up to its caps, and then a refusal by name."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import ResourceExhaustedError
from rlightning.rpc.session import Session
from rlightning.testing.waiting import assert_eventually
from rlightning.types import PolicyResponse
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_meta
from tests.integration.buffer.harness import (
    FORGETFUL,
    act,
    asking,
    buffer_server,
    inserting,
    raw_writer,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, meta

MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "space"),
    [
        (2**20, None),
        (1, gym.spaces.Box(0, 255, (2000, 2000), np.uint8)),
        (2**20, gym.spaces.Box(0, 255, (0, 2**20), np.uint8)),
    ],
)
async def test_an_env_too_large_for_the_memory_is_refused_at_hello(rows: int, space: Any) -> None:
    env = ScriptedEnv(2)
    async with buffer_server(max_bytes=4 * MIB) as buffers:
        spec = meta(rows, "large", space)
        with pytest.raises(
            ResourceExhaustedError, match=r"'large'.*buffer\.max_bytes allows 4194304"
        ):
            async with inserting(buffers.address, spec):
                pass
        assert not buffers.table.producers
        assert not buffers.table.buffer.env_ids
        async with inserting(buffers.address, env.meta) as client:
            await act(client, env, 8)
            await client.flush(5)


async def test_names_that_are_kept_are_short() -> None:
    async with buffer_server() as buffers:
        for spec, writer_id, said in (
            (
                meta(1, "e" * 129),
                "w",
                "hello needs a spec.env_id of at most 128 characters, got 129",
            ),
            (meta(1), "w" * 129, "hello needs a writer_id of at most 128 characters, got 129"),
        ):
            async with raw_writer(buffers.address, spec, writer_id) as writer:
                request = pb.InsertRequest()
                request.hello.writer_id = writer_id
                request.hello.session.protocol_version = 1
                request.hello.session.client_id = "client"
                codec = Writer()
                fill_env_meta(request.hello.session.spec, spec, codec)
                await writer.call.write(codec.finish(request))
                with pytest.raises(grpc.aio.AioRpcError, match=said):
                    await writer.call.read()
        assert not buffers.service._insert._writers


async def test_first_rows_too_large_for_the_memory_are_refused_by_their_ack() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(max_bytes=MIB) as buffers,
        raw_writer(buffers.address, env.meta) as writer,
    ):
        await writer.hello()
        env_ret = env.reset()
        large = PolicyResponse(
            env.env_id, action=np.zeros(2, np.int64), hidden=np.zeros((2, 10_000), np.float32)
        )
        await writer.insert(1, env_ret, large)
        error = (await writer.read()).ack.error
        assert error.reason == "FULL"
        assert "24 steps of 2 rows of 400" in error.message
        assert "buffer.max_bytes allows 1048576" in error.message
        await writer.insert(2, env_ret, answer(env_ret))
        await writer.acked(2)


async def test_memory_is_free_again_once_a_writer_is_gone() -> None:
    async with buffer_server(rpc=FORGETFUL, max_bytes=MIB) as buffers:
        for number in range(4):
            env = ScriptedEnv(200, env_id=f"env-{number}")
            async with inserting(buffers.address, env.meta, rpc=FORGETFUL) as client:
                await act(client, env, 8)
                await client.flush(5)
            await assert_eventually(lambda: not buffers.table.producers)
            taken = buffers.table.take()
            assert taken is not None
            buffers.table.release(taken)


async def test_what_waits_for_room_is_bounded_over_all_writers() -> None:
    async with buffer_server(rollout_length=1, max_rollouts=1, max_bytes=64 * 2**10) as buffers:
        refused = 0
        for number in range(12):
            env = ScriptedEnv(8, env_id=f"env-{number}")
            async with raw_writer(buffers.address, env.meta, writer_id=f"w-{number}") as writer:
                await writer.hello()
                env_ret = env.reset()
                try:
                    for seq in range(1, 40):
                        await writer.insert(seq, env_ret, answer(env_ret))
                        env_ret = env.step()
                    await asyncio.sleep(0.05)
                except Exception:
                    refused += 1
                transit = buffers.table.transit
                assert transit.used <= transit.max_bytes == 32 * 2**10
        await assert_eventually(lambda: buffers.table.transit.used == 0)


async def test_refusals_that_are_not_read_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ScriptedEnv(1)
    async with (
        buffer_server() as buffers,
        raw_writer(buffers.address, env.meta) as writer,
    ):
        await writer.hello()

        async def unread(*args: object) -> bool:
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(Session, "send", unread)
        for seq in range(1, 300):
            await writer.insert(seq, None)
        state = buffers.service._insert._writers["raw"]
        await assert_eventually(lambda: len(state.refused) == 64)
        await asyncio.sleep(0.2)
        assert len(state.refused) == 64


@pytest.mark.parametrize("kind", ["RolloutBuffer", "ReplayBuffer"])
async def test_get_sends_no_more_than_there_is_memory_for(kind: str) -> None:
    env = ScriptedEnv(2, lambda row, episode: (4, True))
    async with (
        buffer_server(
            type=kind, capacity=100, auto_truncate_episode=True, max_bytes=256 * 2**10
        ) as buffers,
        inserting(buffers.address, env.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, env, 8)
        await client.flush(5)
        assert len((await asker.get([0] * 10))["reward"]) == 10
        with pytest.raises(
            ResourceExhaustedError, match=r"indices: 5000 transitions of .*max_bytes"
        ):
            await asker.get([0] * 5000)
        with pytest.raises(ResourceExhaustedError, match="GetRequest of .* bytes; 2097152"):
            await asker.get([0] * 2**21)
        assert buffers.table.transit.used == 0
        assert len((await asker.get([0] * 10))["reward"]) == 10


async def test_a_sample_too_large_for_the_memory_is_refused() -> None:
    env = ScriptedEnv(16, lambda row, episode: (4, True))
    async with (
        buffer_server(
            type="ReplayBuffer", capacity=512, auto_truncate_episode=True, max_bytes=256 * 2**10
        ) as buffers,
        inserting(buffers.address, env.meta) as client,
    ):
        await act(client, env, 32)
        await client.flush(5)
        table = buffers.table
        table.transit.max_bytes = 20_000
        with pytest.raises(ResourceExhaustedError, match=r"batch_size: 512 transitions"):
            async with sampling(buffers.address, batch_size=512) as learner:
                await learner.next_batch(5)
        async with sampling(buffers.address, batch_size=16) as learner:
            for _ in range(20):  # more than fit at once
                assert len((await learner.next_batch(5)).columns["reward"]) == 16
                await learner.ack()
        await assert_eventually(lambda: table.transit.used == 0)
