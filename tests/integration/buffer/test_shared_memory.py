"""Rows that a buffer server on the same host reads from shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer.remote_buffer import InsertClient, SampleClient
from rlightning.errors import ResourceExhaustedError
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.v1.tensor_pb2 import DTYPE_UINT8
from tests.integration.buffer.harness import (
    FAST,
    Buffers,
    buffer_server,
    inserting,
    raw_writer,
    sampling,
)

ROWS, LENGTH = 4, 4
PICTURE = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
META = EnvMeta("env", gym.spaces.Discrete(2), PICTURE, ROWS)
BYTES = ROWS * 64 * 64 * 3
OFF = FAST.model_copy(update={"shared_memory_bytes": 0})
# Room for some items less than the window has.
NARROW = FAST.model_copy(update={"shared_memory_bytes": 5 * BYTES})


def picture_server(**options: Any) -> Any:
    return buffer_server(**{"rollout_length": LENGTH, "max_rollouts": 2, **options})


def step(value: int) -> tuple[EnvRet, PolicyResponse]:
    flags = np.zeros(ROWS, bool)
    pictures = np.full((ROWS, *PICTURE.shape), value % 256, np.uint8)
    env_ret = EnvRet("env", pictures, np.zeros(ROWS, np.float32), flags, flags)
    return env_ret, PolicyResponse("env", action=np.full(ROWS, value))


@asynccontextmanager
async def writing(client: InsertClient) -> AsyncIterator[None]:
    """Inserts step after step meanwhile, into an array that changes once it is inserted."""

    async def write() -> None:
        value = 0
        while True:
            env_ret, response = step(value)
            await client.insert(env_ret, response)
            env_ret.observation[:] = 99
            value += 1

    task = asyncio.create_task(write())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def check_rollouts(learner: SampleClient, count: int, first: int = 0) -> None:
    """Asserts that each step has its pictures, and that none is missing or comes twice."""
    for rollout in range(first, first + count):
        columns = (await learner.next_batch(20)).columns
        values = rollout * LENGTH + np.arange(LENGTH)
        assert (columns["action"] == values[:, None]).all()
        for name, later in (("observation", 0), ("next_observation", 1)):
            expected = (values + later) % 256
            assert (columns[name] == expected[:, None, None, None, None]).all(), name


def shared_by(server: Buffers) -> int:
    return server.service._writers.shared_bytes


async def test_pictures_are_stored_as_they_were_whatever_lies_in_their_place_later() -> None:
    async with (
        picture_server() as server,
        inserting(server.address, META, rpc=NARROW) as client,
        sampling(server.address) as learner,
        writing(client),
    ):
        await check_rollouts(learner, 12)
        assert shared_by(server) >= 12 * LENGTH * BYTES // 2


async def test_what_was_unacked_at_a_cut_comes_again_by_itself() -> None:
    async with picture_server() as server, FaultProxy(server.address) as proxy:
        async with (
            inserting(proxy.address, META) as client,
            sampling(server.address) as learner,
            writing(client),
        ):
            # The buffer is full, and so is the window: with messages that refer to memory.
            await assert_eventually(lambda: client.acked >= 2 * LENGTH and client.unacked == 8)
            before = client._window.memory
            assert before is not None
            assert any(sent.keys for sent in client._window)
            proxy.reset()
            await assert_eventually(lambda: client._window.memory not in (None, before))
            await check_rollouts(learner, 3)
            seen = shared_by(server)
            await check_rollouts(learner, 5, first=3)
            assert client.resent > 0
            await assert_eventually(lambda: shared_by(server) > seen)


async def test_a_server_that_shares_nothing_gets_the_rows_that_were_meant_for_one_that_did() -> (
    None
):
    async with picture_server() as old:
        context = inserting(old.address, META)
        client = await context.__aenter__()
        for value in range(3):
            await client.insert(*step(value))
        await client.flush(5)
        address = old.address
        await assert_eventually(lambda: shared_by(old) == 3 * BYTES)
        await client.insert(*step(3))  # may wait for others, or be on its way
    async with picture_server(rpc=OFF, listen=address, max_rollouts=1000) as new:
        for value in range(4, 12):
            await client.insert(*step(value))
        await client.flush(10)
        assert client._window.memory is None
        assert client.acked == 12
        assert shared_by(new) == 0
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize("durability", ["none", "process"])
async def test_a_journal_gets_messages_that_have_everything(
    tmp_path: Path, durability: str
) -> None:
    options = {"type": "ReplayBuffer", "capacity": 100, "auto_truncate_episode": True}
    options |= {"data_dir": str(tmp_path), "durability": durability}
    async with buffer_server(**options) as server:
        async with inserting(server.address, META) as client:
            for value in range(5):
                await client.insert(*step(value))
            await client.flush(10)
        assert shared_by(server) == (5 * BYTES if durability == "none" else 0)


async def test_an_item_that_cannot_be_sent_leaves_its_place() -> None:
    async with picture_server() as server, inserting(server.address, META) as client:
        env_ret, response = step(0)
        env_ret.info = {"map": np.zeros(2 * 2**20, np.uint8)}
        for _ in range(3):
            with pytest.raises(ResourceExhaustedError, match="info_budget_bytes"):
                await client.insert(env_ret, response)
        await client.insert(*step(1))
        await client.flush(5)
        assert client._window.memory is not None
        assert not client._window.memory._held


async def test_what_lies_in_shared_memory_counts_towards_the_cap_of_the_session() -> None:
    async with picture_server() as server, inserting(server.address, META) as client:
        assert client._window.memory is not None
        client._cap = 2**30  # a client that does not care
        env_ret, response = step(0)
        env_ret.info = {"map": np.zeros(2 * 2**20, np.uint8)}
        client._window.memory._min_bytes = 2**20
        await client.insert(env_ret, response)
        with pytest.raises(ResourceExhaustedError, match="lies in shared memory"):
            await client.flush(5)
        await client.insert(*step(1))  # the session lives on
        await client.flush(5)


async def test_a_reference_to_what_is_not_shared_is_refused_and_the_session_lives_on() -> None:
    async with picture_server() as server, raw_writer(server.address, META) as writer:
        await writer.hello()
        request = pb.InsertRequest()
        request.insert.seq, request.insert.epoch = 1, writer.epoch
        bad = request.insert.items.add().env_ret
        bad.env_id = "env"
        tensor = bad.observation.tensor_value
        tensor.dtype, tensor.shared_offset = DTYPE_UINT8, 64
        tensor.shape.extend([ROWS, *PICTURE.shape])
        await writer.call.write(request.SerializeToString())
        ack = (await writer.read()).ack
        assert "observation: refers to shared memory, and none was agreed on" in ack.error.message
        await writer.insert(2, *step(0))
        await writer.acked(2)
