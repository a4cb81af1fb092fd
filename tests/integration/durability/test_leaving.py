"""What a queue and rollouts hand out is used once, also when their server starts again meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlightning.buffer.remote_buffer import InsertClient, SampleClient
from rlightning.errors import ConfigError, DeadlineExceededError, PreconditionError
from rlightning.testing import assert_eventually
from rlightning.testing.ports import free_address
from tests.integration.buffer.harness import FAST, act, asking, inserting, sampling
from tests.integration.durability.test_restarts import BRIEF, durable, ends, folder
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions

__all__ = ["folder"]  # the fixture
KINDS: dict[str, dict[str, Any]] = {
    "queue": {"rate_limiter": {"queue_size": 100}},
    "rollouts": {"type": "RolloutBuffer", "rollout_length": 4, "max_rollouts": 6},
}
SIZES = {"queue": 8, "rollouts": 0}  # both kinds of batches have 8 transitions


def steps_of(columns: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Row, episode and step of each transition."""
    assert check_transitions(columns) == 8
    numbers = columns["observation"].reshape(-1, 3).astype(int).tolist()
    return [tuple(step) for step in numbers]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_batch_is_used_once_across_restarts(
    folder: Path, kind: str, checkpoint: bool
) -> None:
    address, env, options = free_address(), ScriptedEnv(2, ends), KINDS[kind]
    learner = SampleClient(address, batch_size=SIZES[kind], prefetch=2, rpc=FAST)
    used: list[tuple[int, int, int]] = []
    try:
        async with durable(folder, listen=address, **options) as buffers:
            async with inserting(address, env.meta) as writer:
                await act(writer, env, 24)
                await writer.flush(10)
                await learner.start()
                for _ in range(2):
                    used += steps_of((await learner.next_batch(10)).columns)
                if checkpoint:
                    async with asking(address) as asked:
                        await asked.checkpoint()
                used += steps_of((await learner.next_batch(10)).columns)
                assert len(buffers.table.lending.lent) > 1  # in use, and ahead
        async with durable(folder, listen=address, **options) as buffers:
            for _ in range(3):
                used += steps_of((await learner.next_batch(20)).columns)
            with pytest.raises(DeadlineExceededError):
                await learner.next_batch(0.2)
            await assert_eventually(lambda: not buffers.table.lending.lent)
        assert len(used) == len(set(used)) == 48
        async with durable(folder, listen=address, **options) as buffers:
            assert buffers.table.buffer.size() == 0
            assert buffers.table.sampled_total == 48
    finally:
        await learner.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_lent_is_for_others_after_a_lease(folder: Path, kind: str) -> None:
    env, options = ScriptedEnv(2, ends), KINDS[kind]
    async with durable(folder, **options) as buffers:
        learner = SampleClient(buffers.address, batch_size=SIZES[kind], prefetch=0, rpc=FAST)
        async with inserting(buffers.address, env.meta) as writer:
            await act(writer, env, 8)
            await writer.flush(10)
        await learner.start()
        first = steps_of((await learner.next_batch(10)).columns)
    await learner.close()  # while the server is away
    async with (
        durable(folder, rpc=BRIEF, **options) as buffers,
        sampling(buffers.address, batch_size=SIZES[kind]) as other,
    ):
        second = steps_of((await other.next_batch(10)).columns)
        assert second != first
        assert buffers.table.lending.lent  # it is kept for the one that had it
        assert steps_of((await other.next_batch(10)).columns) == first


async def test_each_rank_gets_the_shares_that_it_has_not_used(folder: Path) -> None:
    address, env, options = free_address(), ScriptedEnv(2, ends), KINDS["rollouts"]
    learners = [SampleClient(address, rank=rank, world_size=2, rpc=FAST) for rank in (0, 1)]
    seen: dict[int, list[int]] = {0: [], 1: []}

    async def see(rank: int, count: int) -> None:
        for _ in range(count):
            columns = (await learners[rank].next_batch(20)).columns
            assert set(columns["observation"][..., 0].ravel()) == {rank}
            seen[rank] += (columns["episode_id"] * 100 + columns["step"]).ravel().tolist()

    try:
        async with durable(folder, listen=address, **options):
            async with inserting(address, env.meta) as writer:
                await act(writer, env, 16)
                await writer.flush(10)
            for learner in learners:
                await learner.start()
            await see(0, 3)
            await see(1, 1)
        async with durable(folder, listen=address, **options) as buffers:
            await see(0, 1)
            await see(1, 3)
            for learner in learners:
                await learner.ack()
            await assert_eventually(lambda: buffers.table.buffer.rollouts.held == 0)
        for numbers in seen.values():
            assert len(numbers) == len(set(numbers)) == 16
    finally:
        for learner in learners:
            await learner.close()


async def test_shares_of_rows_that_no_longer_divide_keep_no_server_from_its_start(
    folder: Path,
) -> None:
    address, options = free_address(), KINDS["rollouts"]
    envs = [ScriptedEnv(1, ends, f"env-{number}") for number in (0, 1)]
    writers = [InsertClient(address, spec=env.meta, rpc=FAST) for env in envs]
    learner = SampleClient(address, rank=0, world_size=2, rpc=FAST)
    try:
        async with durable(folder, listen=address, **options) as buffers:
            for writer in writers:
                await writer.start()
            for writer, env in zip(writers, envs, strict=True):
                await act(writer, env, 4)
                await writer.flush(10)
            await learner.start()
            await learner.next_batch(10)
            await writers[1].close()
            await assert_eventually(lambda: buffers.table.rollout_rows == 1)
        async with durable(folder, listen=address, **options) as buffers:
            assert list(buffers.table.lending.lent) == [(0, 1)]
            with pytest.raises(PreconditionError, match="the 1 rows of a rollout do not divide"):
                await learner.next_batch(20)
    finally:
        for client in (*writers, learner):
            await client.close()


async def test_another_storage_lends_to_anybody(folder: Path) -> None:
    """After `restore` of a checkpoint nobody acks what was lent when it was made."""
    env, options = ScriptedEnv(2, ends), KINDS["queue"]
    async with durable(folder, **options) as buffers, asking(buffers.address) as asked:
        async with inserting(buffers.address, env.meta) as writer:
            await act(writer, env, 8)
            await writer.flush(10)
        async with sampling(buffers.address, batch_size=8, prefetch=0) as learner:
            first = steps_of((await learner.next_batch(10)).columns)
            made = await asked.checkpoint()
            assert made is not None
    for _ in range(2):  # the second time from the journal that has the first
        async with (
            durable(folder, restore=made.name, **options) as buffers,
            sampling(buffers.address, batch_size=8, prefetch=0) as learner,
        ):
            assert steps_of((await learner.next_batch(10)).columns) == first
    async with durable(folder, **options) as buffers:
        assert buffers.table.buffer.size() == 16


async def test_what_leaves_has_to_be_configured_as_before(folder: Path) -> None:
    async with durable(folder, **KINDS["queue"]):
        pass
    async with durable(folder, rate_limiter={"queue_size": 50}):
        pass
    with pytest.raises(ConfigError, match=r"buffer\.rate_limiter\.queue_size: None, but"):
        async with durable(folder, sampler={"type": "all"}):
            pass
    other = folder.with_name("other")
    async with durable(other, **KINDS["rollouts"]):
        pass
    with pytest.raises(ConfigError, match=r"buffer\.rollout_length: 5, but"):
        async with durable(other, **{**KINDS["rollouts"], "rollout_length": 5}):
            pass
