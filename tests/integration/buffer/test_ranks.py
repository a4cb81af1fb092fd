"""Several train workers that share the data, over real sockets."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidRequestError,
    PreconditionError,
    UnavailableError,
)
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually
from rlightning.wire import Batch
from tests.integration.buffer.harness import (
    FAST,
    FORGETFUL,
    act,
    acting,
    buffer_server,
    check_rollout,
    inserting,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions

REPLAY: dict[str, Any] = {
    "type": "ReplayBuffer",
    "auto_truncate_episode": True,
    "capacity": 1000,
    "sampler": {"type": "uniform", "seed": 11},
}


def joined(shares: list[Batch]) -> dict[str, Any]:
    """Puts the shares of a rollout together again."""
    names = shares[0].columns
    return {
        name: np.concatenate([share.columns[name] for share in shares], axis=1) for name in names
    }


async def test_each_rank_gets_its_rows_of_every_rollout() -> None:
    one, other = ScriptedEnv(3, env_id="one"), ScriptedEnv(5, env_id="other")
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, one.meta) as first,
        inserting(buffers.address, other.meta) as second,
        acting((first, one), (second, other)),
        AsyncExitStack() as stack,
    ):
        ranks = [
            await stack.enter_async_context(sampling(buffers.address, rank=rank, world_size=4))
            for rank in range(4)
        ]
        for index in range(4):
            shares = [await learner.next_batch(10) for learner in ranks]
            for rank, share in enumerate(shares):
                check_rollout(share, 8, 2)
                assert share.metadata["rollout"] == index
                assert (share.metadata["rank"], share.metadata["world_size"]) == (rank, 4)
            assert [share.metadata["env_ids"] for share in shares] == [
                ["one"],
                ["one", "other"],
                ["other"],
                ["other"],
            ]
            assert [share.metadata["rows"] for share in shares] == [[2], [1, 1], [2], [2]]
            whole = joined(shares)
            rows = [0, 1, 2, 0, 1, 2, 3, 4]
            np.testing.assert_array_equal(whole["observation"][0, :, 0], rows)
        assert buffers.table.sampled_total >= 4 * 8 * 8


async def test_a_rollout_leaves_when_every_rank_has_used_its_share() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(max_rollouts=1) as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
        sampling(buffers.address, rank=0, world_size=2, prefetch=0) as fast,
        sampling(buffers.address, rank=1, world_size=2, prefetch=0) as slow,
    ):
        rollouts = buffers.table.buffer.rollouts
        await fast.next_batch(5)
        with pytest.raises(DeadlineExceededError):
            await fast.next_batch(0.3)  # acks the first one
        assert (rollouts.oldest, rollouts.formed) == (0, 1)
        assert (await slow.next_batch(5)).metadata["rollout"] == 0
        await slow.ack()
        assert (await fast.next_batch(5)).metadata["rollout"] == 1
        assert (await slow.next_batch(5)).metadata["rollout"] == 1


async def test_a_rank_that_is_not_there_is_named_to_the_others() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(producer_timeout_s=0.5) as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
        sampling(buffers.address, rank=0, world_size=2) as learner,
    ):
        for index in range(2):
            assert (await learner.next_batch(5)).metadata["rollout"] == index
        for _ in range(2):
            with pytest.raises(UnavailableError, match="rollout 0 waits for rank 1 of 2") as told:
                await learner.next_batch(10)
            assert told.value.reason == "RANK_SILENT"
        async with sampling(buffers.address, rank=1, world_size=2) as other:
            assert (await other.next_batch(5)).metadata["rollout"] == 0
            await other.ack()
            assert (await learner.next_batch(5)).metadata["rollout"] == 2


async def test_a_share_that_was_not_acked_comes_again_to_its_rank_alone() -> None:
    env = ScriptedEnv(4)
    async with (
        buffer_server(rpc=FORGETFUL) as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(buffers.address, env.meta, rpc=FORGETFUL) as client,
        acting((client, env)),
        sampling(buffers.address, rank=1, world_size=2, prefetch=0) as other,
    ):
        async with sampling(proxy.address, rank=0, world_size=2, prefetch=0) as cut:
            first = await cut.next_batch(5)
            proxy.cut()
            second = await cut.next_batch(10)  # and that acks the first
            assert second.metadata["rollout"] == 1
        async with sampling(buffers.address, rank=0, world_size=2, prefetch=0) as again:
            repeated = await again.next_batch(10)
            for name, column in second.columns.items():
                np.testing.assert_array_equal(repeated.columns[name], column)
            for index in range(4):
                mine = await other.next_batch(5)
                assert mine.metadata["rollout"] == index
                if index == 0:
                    check_rollout(mine, 8, 2)
                    np.testing.assert_array_equal(mine.columns["observation"][0, :, 0], [2, 3])
                    np.testing.assert_array_equal(first.columns["observation"][0, :, 0], [0, 1])
                if index >= 1:
                    assert (await again.next_batch(5)).metadata["rollout"] == index + 1


async def test_another_number_of_learners_gets_the_rollouts_whole_that_not_all_have_used() -> None:
    env = ScriptedEnv(4)
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta) as client,
        acting((client, env)),
    ):
        async with sampling(buffers.address, rank=0, world_size=2, prefetch=0) as half:
            await half.next_batch(5)
            await half.ack()
        async with sampling(buffers.address) as whole:
            batch = await whole.next_batch(5)
            assert batch.metadata["rollout"] == 0
            check_rollout(batch, 8, 4)
        async with AsyncExitStack() as stack:
            for rank in range(4):
                client_of = sampling(buffers.address, rank=rank, world_size=4)
                learner = await stack.enter_async_context(client_of)
                check_rollout(await learner.next_batch(5), 8, 1)


async def test_each_rank_draws_by_itself_and_by_the_seed_alone() -> None:
    async def drawn(order: list[int], batches: int = 3) -> dict[int, list[list[float]]]:
        env = ScriptedEnv(2, lambda row, episode: (5, True))
        found: dict[int, list[list[float]]] = {rank: [] for rank in range(2)}
        async with (
            buffer_server(**REPLAY) as buffers,
            inserting(buffers.address, env.meta) as client,
            AsyncExitStack() as stack,
        ):
            await act(client, env, 50)
            await client.flush(5)
            ranks: list[SampleClient] = [
                await stack.enter_async_context(
                    sampling(buffers.address, rank=rank, world_size=2, batch_size=16, prefetch=0)
                )
                for rank in range(2)
            ]
            for rank in order * batches:
                batch = await ranks[rank].next_batch(5)
                assert check_transitions(batch.columns) == 16
                found[rank].append(batch.columns["episode_id"].tolist())
        return found

    first = await drawn([0, 1])
    assert first == await drawn([1, 0])
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: expected 0 to 1 with world_size 2, got 2"),
        ({"rank": -1, "world_size": 2}, "rank: expected 0 to 1 with world_size 2, got -1"),
        ({"rank": 1}, "rank: expected 0 to 0 with world_size 1, got 1"),
        ({"world_size": -3}, "world_size: expected 1 to 65536, got -3"),
        ({"world_size": 2**20}, "world_size: expected 1 to 65536, got 1048576"),
    ],
)
async def test_ranks_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    for buffer, batch_size in (({}, 0), (REPLAY, 4)):
        async with buffer_server(**buffer) as buffers:
            with pytest.raises(InvalidRequestError, match=message):
                async with sampling(buffers.address, batch_size=batch_size, **options):
                    pass


async def test_ranks_that_disagree_or_come_twice_are_refused() -> None:
    async with buffer_server() as buffers:
        async with sampling(buffers.address, rank=0, world_size=2, client_id="first"):
            for options in ({"rank": 1, "world_size": 3}, {}):
                size = options.get("world_size", 1)
                message = f"world_size {size}: learner first samples .* as one of 2"
                with pytest.raises(PreconditionError, match=message):
                    async with sampling(buffers.address, **options):
                        pass
            second = SampleClient(buffers.address, rank=0, world_size=2, rpc=FAST)
            with pytest.raises(AlreadyExistsError, match="rank 0: learner first samples table"):
                await second.start(0.5)  # it tries again as long as it may
            await second.close()
            async with sampling(buffers.address, rank=1, world_size=2):
                pass
    async with buffer_server(**REPLAY) as buffers:
        async with (
            sampling(buffers.address, batch_size=4, rank=0, world_size=2),
            sampling(buffers.address, batch_size=4),  # draws by itself, and disturbs nobody
        ):
            with pytest.raises(PreconditionError, match="world_size 4"):
                async with sampling(buffers.address, batch_size=4, rank=1, world_size=4):
                    pass


async def test_rows_that_do_not_divide_are_told_at_once_or_when_they_come() -> None:
    env = ScriptedEnv(3)
    message = "world_size 2: the 3 rows of a rollout do not divide by it"
    async with buffer_server() as buffers:
        async with sampling(buffers.address, rank=0, world_size=2) as early:
            async with inserting(buffers.address, env.meta) as client, acting((client, env)):
                with pytest.raises(PreconditionError, match=message):
                    await early.next_batch(10)
                with pytest.raises(PreconditionError, match=message):
                    async with sampling(buffers.address, rank=1, world_size=2):
                        pass
                async with sampling(buffers.address) as lone:
                    check_rollout(await lone.next_batch(5), 8, 3)
                await assert_eventually(lambda: buffers.table.rendezvous.readers == 0)
