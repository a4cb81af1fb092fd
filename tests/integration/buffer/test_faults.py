"""The buffer server dies and comes back: nobody hangs, nothing is paired wrongly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlightning.buffer.remote_buffer import InsertClient
from rlightning.errors import DeadlineExceededError, UnavailableError
from rlightning.testing.waiting import assert_eventually
from tests.integration.buffer.harness import (
    FAST,
    acting,
    asking,
    buffer_process,
    buffer_server,
    check_rollout,
    inserting,
    raw_writer,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions


@pytest.mark.crash
async def test_killed_in_the_middle_of_inserts_and_samples(tmp_path: Path) -> None:
    process, address = buffer_process(tmp_path)
    envs = [ScriptedEnv(2, lambda row, episode: (6, True), env_id=f"cp-{i}") for i in (0, 1)]
    rng = np.random.default_rng(7)
    with process:
        process.address(20)
        async with (
            inserting(address, envs[0].meta) as first,
            inserting(address, envs[1].meta) as second,
            sampling(address) as learner,
            acting((first, envs[0]), (second, envs[1])),
        ):
            for _ in range(4):
                newest = {env.env_id: -1 for env in envs}
                for _ in range(rng.integers(1, 4)):
                    batch = await learner.next_batch(20)
                    ids = batch.metadata["env_ids"]  # one alone may have come back first
                    check_rollout(batch, 8, 2 * len(ids))
                    # Nothing comes twice from one server. From the next one, what was sampled
                    # but not acked to its writer does, as this one keeps nothing on disk.
                    versions = batch.columns["policy_version"]
                    for env_id, first_row in zip(ids, range(0, 4, 2), strict=False):
                        assert (versions[0, first_row : first_row + 2] > newest[env_id]).all()
                        newest[env_id] = versions[-1, first_row]
                await asyncio.sleep(rng.uniform(0, 0.02))  # anywhere in an insert or a sample
                process.kill()
                process.start()
                process.address(20)
            # The last restart too has been noticed by all: a batch that came from it is here.
            while not (first.acked and first.rebased and second.rebased):
                await learner.next_batch(20)
            for _ in range(3):
                await learner.next_batch(20)
            check_rollout(await learner.next_batch(20), 8, 4)
        process.terminate()
        assert process.wait() == 0


async def test_rows_whose_beginning_was_lost_start_a_segment() -> None:
    """The oldest message without an ack becomes the base; what it completes is gone."""
    env = ScriptedEnv(2)
    async with buffer_server() as old:
        address = old.address
        client_context = inserting(address, env.meta)
        client = await client_context.__aenter__()
        env_ret = env.reset()
        for _ in range(3):
            await client.insert(env_ret, answer(env_ret))
            env_ret = env.step()
        await client.flush(5)
    inserted = asyncio.create_task(client.insert(env_ret, answer(env_ret)))
    async with buffer_server(listen=address) as new, asking(address) as asker:
        await inserted
        for _ in range(2):
            env_ret = env.step()
            await client.insert(env_ret, answer(env_ret))
        await client.flush(10)
        columns = await asker.get()
        assert check_transitions(columns) == 4
        np.testing.assert_array_equal(columns["step"], [3, 4, 3, 4])
        assert (await asker.describe()).stats["writers_rebased_total"] == 1
        assert client.rebased == 1
        assert new.table.buffer.counters.lost == 0
        await client_context.__aexit__(None, None, None)


async def test_messages_in_flight_during_a_restart_are_stored_once() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as old:
        address = old.address
        async with raw_writer(address, env.meta) as writer:
            storage_id = (await writer.hello()).storage_id
            rets = [env.reset(), env.step(), env.step(), env.step()]
            for seq in (1, 2):
                await writer.insert(seq, rets[seq - 1], answer(rets[seq - 1]))
            await writer.acked(2)
    async with buffer_server(listen=address) as new, raw_writer(address, env.meta) as writer:
        welcome = await writer.hello(storage_id)
        assert welcome.storage_id != storage_id
        assert welcome.next_seq == 0
        for seq in (2, 2, 3, 4, 3):
            await writer.insert(seq, rets[seq - 1], answer(rets[seq - 1]))
        await writer.acked(4)
        columns = new.table.buffer.get_all()
        assert check_transitions(columns) == 4
        np.testing.assert_array_equal(columns["step"], [1, 2, 1, 2])


async def test_a_learner_waits_through_a_restart() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as old:
        address = old.address
        learner_context = sampling(address)
        learner = await learner_context.__aenter__()
        with pytest.raises(DeadlineExceededError):
            await learner.next_batch(0.1)
    with pytest.raises(DeadlineExceededError):
        await learner.next_batch(0.2)
    waiting = asyncio.create_task(learner.next_batch(20))
    async with (
        buffer_server(listen=address),
        inserting(address, env.meta) as client,
        acting((client, env)),
    ):
        check_rollout(await waiting, 8, 2)
        check_rollout(await learner.next_batch(5), 8, 2)
        await learner_context.__aexit__(None, None, None)


async def test_sigterm_ends_with_status_0_while_acks_are_withheld(tmp_path: Path) -> None:
    process, address = buffer_process(tmp_path, rollout_length=1, max_rollouts=1)
    env = ScriptedEnv(1)
    with process:
        process.address(20)
        async with (
            inserting(address, env.meta, window_items=4) as client,
            asking(address) as asker,
            acting((client, env)),
        ):

            async def waits() -> bool:
                producers = (await asker.describe()).stats["tables"]["default"]["producers"]
                return bool(producers) and producers["env"]["waiting"] > 0

            await assert_eventually(waits)
            process.terminate()
            assert await asyncio.to_thread(process.wait) == 0


async def test_a_client_that_was_never_served_can_be_started_again() -> None:
    env = ScriptedEnv(1)
    async with buffer_server() as old:
        address = old.address
    client = InsertClient(address, spec=env.meta, rpc=FAST)
    with pytest.raises(UnavailableError):
        await client.start(0.3)
    async with buffer_server(listen=address) as new:
        await client.start(10)
        await assert_eventually(lambda: len(new.table.producers) == 1)
        await client.close()
        await assert_eventually(lambda: not new.table.producers)
