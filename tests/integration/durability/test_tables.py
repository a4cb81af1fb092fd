"""Several tables, rate limits, ranks, discards and functions of the user come back too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.buffer.durable import state as dumping
from rlightning.buffer.utils.postprocess import default_postprocess_fn
from rlightning.errors import ConfigError, InvalidRequestError, RLightningError
from rlightning.testing.ports import free_address
from tests.integration.buffer.harness import act, asking, inserting
from tests.integration.durability.test_restarts import durable, ends, folder, inserting_later
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

__all__ = ["folder"]  # the fixture
TABLES = {"all": {"sampler": {"type": "prioritised", "seed": 3}}, "some": {"capacity": 30}}
SAMPLER = {"type": "uniform", "seed": 7}


def drawn(table: Any, count: int) -> list[dict[str, Any]]:
    """The next batches of two learners."""
    return [
        table.take(6, rank=rank, world_size=2).columns() for _ in range(count) for rank in (0, 1)
    ]


def assert_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name, column in one.items():
            np.testing.assert_array_equal(column, other[name])


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_writer_goes_on_in_all_its_tables(folder: Path, checkpoint: bool) -> None:
    env, address = ScriptedEnv(2), free_address()
    options: dict[str, Any] = {"tables": TABLES, "sampler": SAMPLER}
    async with inserting_later(address, env, tables=["all", "some"]) as started:
        async with durable(folder, listen=address, **options) as buffers:
            writer = await started()
            env_ret = env.reset()
            for number in range(10):
                table = "some" if number == 9 else ""  # the last is for one of them
                await writer.insert(env_ret, answer(env_ret), table=table)
                env_ret = env.step()
            await writer.flush(10)
            if checkpoint:
                async with asking(buffers.address) as asked:
                    await asked.checkpoint()
        async with durable(folder, listen=address, **options) as buffers:
            for _ in range(5):
                await writer.insert(env_ret, answer(env_ret))
                env_ret = env.step()
            await writer.flush(20)
            assert writer.rebased == 0
            tables = buffers.service._tables
            assert [tables[name].buffer.counters.segments for name in TABLES] == [1, 0]
            async with asking(buffers.address) as asked:
                for name, count in (("all", 2 * (8 + 4)), ("some", 2 * 14)):
                    await asked.truncate([env.env_id], name)
                    assert check_transitions(await asked.get(table=name)) == count


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_learners_draw_what_they_would_have_drawn(folder: Path, checkpoint: bool) -> None:
    options: dict[str, Any] = {"tables": TABLES, "sampler": SAMPLER}
    env = ScriptedEnv(2, ends)
    async with durable(folder, **options) as buffers:
        tables = buffers.service._tables
        async with (
            asking(buffers.address) as asked,
            inserting(buffers.address, env.meta, tables=["all", "some"]) as writer,
        ):
            await act(writer, env, 40)
            await writer.flush(10)
            for name in TABLES:
                drawn(tables[name], 2)
            if checkpoint:
                await asked.checkpoint()
        for name in TABLES:
            drawn(tables[name], 3)
        states = [dumping.dump_sampler(tables[name].sampler)["streams"] for name in TABLES]
        assert all(len(one) == 2 for one in states)
        totals = [tables[name].sampled_total for name in TABLES]
        contents = [tables[name].buffer.get_all() for name in TABLES]
    async with durable(folder, **options) as buffers:
        tables = buffers.service._tables
        assert [dumping.dump_sampler(tables[name].sampler)["streams"] for name in TABLES] == states
        assert [tables[name].sampled_total for name in TABLES] == totals
        assert_same(contents, [tables[name].buffer.get_all() for name in TABLES])


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_rate_limit_goes_on_where_it_was(folder: Path, checkpoint: bool) -> None:
    limiter = {"min_size": 10, "samples_per_insert": 2.0, "error_buffer": 20.0}
    env = ScriptedEnv(2, ends)
    async with durable(folder, rate_limiter=limiter) as buffers:
        async with inserting(buffers.address, env.meta) as writer:
            await act(writer, env, 8)
            await writer.flush(10)
            assert buffers.table.take(8) is not None
            if checkpoint:
                async with asking(buffers.address) as asked:
                    await asked.checkpoint()
            assert buffers.table.take(7) is not None
            told = buffers.table.stats()["limiter"]
        told = buffers.table.stats()["limiter"]
    assert told["sampled"] == 15
    async with durable(folder, rate_limiter={**limiter, "error_buffer": 30.0}) as buffers:
        again = buffers.table.stats()["limiter"]
        for name in ("inserted", "sampled", "size", "surplus"):
            assert again[name] == told[name]
    with pytest.raises(ConfigError, match=r"buffer\.rate_limiter\.samples_per_insert: 3\.0, but"):
        async with durable(folder, rate_limiter={**limiter, "samples_per_insert": 3.0}):
            pass


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_discard_is_done_once_across_restarts(folder: Path, checkpoint: bool) -> None:
    env = ScriptedEnv(1, lambda row, episode: (4, True))
    async with durable(folder) as buffers, asking(buffers.address) as asked:
        async with inserting(buffers.address, env.meta) as writer:
            await act(writer, env, 20)
            await writer.flush(10)
            await asked.discard_episode(env.env_id, request_id="open")
            assert await asked.discard_episode(env.env_id, request_id="one") == 4
            if checkpoint:
                await asked.checkpoint()
                assert await asked.discard_episode(env.env_id, request_id="two") == 0
            before = buffers.table.buffer.get_all()
    async with durable(folder) as buffers, asking(buffers.address) as asked:
        assert_same([before], [buffers.table.buffer.get_all()])
        async with inserting(buffers.address, env.meta) as writer:
            await act(writer, env, 4)
            await writer.flush(10)
            size = buffers.table.buffer.size()
            assert await asked.discard_episode(env.env_id, request_id="one") == 4
            assert buffers.table.buffer.size() == size
            with pytest.raises(InvalidRequestError, match="request_id: one was that of table"):
                await asked.discard_episode("other", request_id="one")


def picky(episode: Any) -> dict[str, Any]:
    """A postprocess function that does not like short episodes."""
    columns = default_postprocess_fn(episode)
    if len(columns["reward"]) < 4:
        raise RuntimeError("too short")
    return columns


async def test_what_a_function_refused_is_refused_again(folder: Path) -> None:
    functions = {"postprocess_fn": f"{__name__}:picky"}
    env = ScriptedEnv(1, lambda row, episode: (3 + episode % 3, True))
    refused = 0
    async with durable(folder, functions=functions) as buffers, asking(buffers.address) as asked:
        async with inserting(buffers.address, env.meta) as writer:
            env_ret = env.reset()
            for _ in range(28):
                try:
                    await writer.insert(env_ret, answer(env_ret))
                    await writer.flush(10)
                except InvalidRequestError as error:
                    refused += "too short" in str(error)
                env_ret = env.step()
            assert refused
            with pytest.raises(RLightningError):  # it is called for what is open, too
                await asked.truncate([env.env_id])
        before, counters = buffers.table.buffer.get_all(), buffers.table.buffer.counters.to_dict()
    assert len(before["reward"]) >= 9
    async with durable(folder, functions=functions) as buffers:
        assert_same([before], [buffers.table.buffer.get_all()])
        assert buffers.table.buffer.counters.to_dict() == counters
    with pytest.raises(ConfigError, match=r"buffer\.functions\.postprocess_fn: None, but"):
        async with durable(folder):
            pass
