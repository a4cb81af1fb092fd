"""Tables, rate limiters and ranks on several buffer servers that are one buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, ReplayBuffer
from rlightning.buffer.sharded_client import ShardedSampleClient
from rlightning.errors import ConfigError, InvalidRequestError, PreconditionError
from tests.integration.buffer.harness import (
    FAST,
    Buffers,
    act,
    acting,
    buffer_process,
    buffer_server,
    check_rollout,
    inserting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

REPLAY: dict[str, Any] = {"type": "ReplayBuffer", "auto_truncate_episode": True, "capacity": 100}
TABLES: dict[str, Any] = {"short": {"capacity": 20}, "long": {}}


def env(number: int, length: int = 1, rows: int = 2) -> ScriptedEnv:
    return ScriptedEnv(rows, lambda row, episode: (length, True), env_id=f"env-{number}")


@asynccontextmanager
async def shards(**buffer: Any) -> AsyncIterator[tuple[list[Buffers], BufferConfig]]:
    """Two buffer servers, and the section that names them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(buffer_server(**buffer)) for _ in range(2)]
        storage = {"type": "sharded", "addresses": [server.address for server in servers]}
        yield servers, BufferConfig(**{**buffer, "storage": storage})


async def test_one_table_of_all_servers_is_sampled() -> None:
    async with shards(**REPLAY, tables=TABLES) as (servers, config):
        for number, server in enumerate(servers):
            one = env(number)
            async with inserting(server.address, one.meta, tables=["short", "long"]) as writer:
                await act(writer, one, 30)
                await writer.flush(10)
        async with ShardedSampleClient(config, table="short", batch_size=32, rpc=FAST) as client:
            batch = await client.next_batch(10)  # more than one server holds
            assert check_transitions(batch.columns) == 32
            assert batch.metadata["shards"].keys() == {server.address for server in servers}
            assert batch.columns["step"].shape == (32,)
        async with ShardedSampleClient(config, table="long", batch_size=100, rpc=FAST) as client:
            assert check_transitions((await client.next_batch(10)).columns) == 100
        with pytest.raises(ConfigError, match="fractions: only one buffer server mixes tables"):
            ShardedSampleClient(config, fractions={"short": 0.5, "long": 0.5}, batch_size=8)


async def test_inserts_and_samples_of_each_server_wait_for_each_other() -> None:
    limit = {"min_size": 10, "samples_per_insert": 2, "error_buffer": 20}
    async with shards(**REPLAY, rate_limiter=limit) as (servers, config), AsyncExitStack() as stack:
        writers = []
        for number, server in enumerate(servers):
            one = env(number, rows=1)
            writer = inserting(server.address, one.meta, window_items=2)
            writers.append((await stack.enter_async_context(writer), one))
        await stack.enter_async_context(acting(*writers))
        async with ShardedSampleClient(config, batch_size=16, rpc=FAST) as client:
            for _ in range(30):
                assert check_transitions((await client.next_batch(10)).columns) == 16
        for server in servers:
            limiter = server.table.limiter
            assert limiter.sampled > 100
            assert 0 <= limiter.surplus <= 40 + 2
        too_large = ShardedSampleClient(config, batch_size=39, rpc=FAST)
        with pytest.raises(InvalidRequestError, match="batch_size 39: buffer.rate_limiter"):
            await too_large.start(10)
        await too_large.close()


async def test_each_rank_has_its_rows_of_all_servers() -> None:
    rollouts = {"type": "RolloutBuffer", "capacity": 1000, "rollout_length": 4}
    async with shards(**rollouts) as (servers, config), AsyncExitStack() as stack:
        writers = []
        for number, server in enumerate(servers):
            one = env(number)
            writers.append(
                (await stack.enter_async_context(inserting(server.address, one.meta)), one)
            )
        await stack.enter_async_context(acting(*writers))
        learners = [
            await stack.enter_async_context(
                ShardedSampleClient(config, rank=rank, world_size=2, rpc=FAST)
            )
            for rank in range(2)
        ]
        for _ in range(3):
            mine, theirs = await asyncio.gather(*(one.next_batch(10) for one in learners))
            for batch in (mine, theirs):
                check_rollout(batch, 4, 2)
                assert batch.metadata["env_ids"] == ["env-0", "env-1"]
                assert batch.metadata["rows"] == [1, 1]
            assert (mine.columns["observation"] != theirs.columns["observation"]).any()
    async with shards(**rollouts) as (servers, config):
        one = env(0, rows=3)
        async with inserting(servers[0].address, one.meta):
            client = ShardedSampleClient(config, rank=0, world_size=2, rpc=FAST)
            with pytest.raises(PreconditionError, match="the 3 rows of a rollout do not divide"):
                await client.start(10)
            await client.close()


async def test_a_credit_names_the_size_of_a_mixed_batch() -> None:
    limit = {"samples_per_insert": 1, "error_buffer": 12}
    tables = {"a": {"sampler": {"type": "prioritised"}}, "b": {"rate_limiter": limit}}
    async with buffer_server(**REPLAY, tables=tables) as buffers:
        one = env(0)
        options: dict[str, Any] = {"fractions": {"a": 0.75, "b": 0.25}, "prefetch": 0}
        async with inserting(buffers.address, one.meta, tables=["a", "b"]) as writer:
            await act(writer, one, 6)
            await writer.flush(10)
            async with sampling(buffers.address, batch_size=4, **options) as learner:
                for size, counts in ((16, [12, 4]), (0, [3, 1]), (16, [12, 4]), (8, [6, 2])):
                    batch = await learner.next_batch(10, batch_size=size)
                    assert check_transitions(batch.columns) == sum(counts)
                    assert np.bincount(batch.metadata["table_index"]).tolist() == counts
                    assert (batch.columns["sample_index"] < 0).sum() == counts[1]
                with pytest.raises(InvalidRequestError, match="0.25 of a batch_size of 1 is no ro"):
                    await learner.next_batch(10, batch_size=1)
            async with sampling(buffers.address, batch_size=4, **options) as learner:
                with pytest.raises(InvalidRequestError, match="batch_size 24: buffer.rate_limiter"):
                    await learner.next_batch(10, batch_size=96)


async def test_memory_that_is_used_again_never_mixes_what_tables_gave() -> None:
    async with buffer_server(**REPLAY, tables={"a": {}, "b": {}}) as buffers:
        for number, table in enumerate(("a", "b")):
            one = env(number)
            async with inserting(buffers.address, one.meta, tables=table) as writer:
                await act(writer, one, 20)
                await writer.flush(10)
        fractions = {"a": 0.5, "b": 0.5}
        async with sampling(buffers.address, fractions=fractions, batch_size=16) as learner:
            kept = [await learner.next_batch(10) for _ in range(6)]
            before = [batch.columns["observation"].copy() for batch in kept]
            kept += [await learner.next_batch(10) for _ in range(6)]
        for batch in kept:
            assert check_transitions(batch.columns) == 16
        for batch, observation in zip(kept, before, strict=False):
            np.testing.assert_array_equal(batch.columns["observation"], observation)


def test_an_episode_on_a_server_is_discarded(tmp_path: Path) -> None:
    server, address = buffer_process(tmp_path, **REPLAY)
    with server:
        server.address(60)
        storage = {"type": "sharded", "addresses": [address]}
        buffer = ReplayBuffer(BufferConfig(**{**REPLAY, "storage": storage}), rpc=FAST)
        one = env(0, length=3)
        buffer.init([one.meta])
        try:
            env_ret = one.reset()
            for _ in range(5):
                buffer.add_transition(one.env_id, env_ret, answer(env_ret))
                env_ret = one.step()
            assert buffer.size() == 6
            assert buffer.discard_episode(one.env_id) == 2  # the open one: a step of each row
            assert buffer.size() == 6
            assert buffer.discard_episode(one) == 6
            assert buffer.size() == 0
            with pytest.raises(KeyError):
                buffer.discard_episode("stranger")
        finally:
            buffer.close()
