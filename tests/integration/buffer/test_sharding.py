"""Several buffer server processes as one buffer; one of them is killed and comes back."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.actor import ActorControl
from rlightning.buffer import BufferConfig, ReplayBuffer, RolloutBuffer, SamplerConfig
from rlightning.buffer.remote_buffer import InsertClient
from rlightning.buffer.sharded_client import ShardedSampleClient
from rlightning.buffer.shards import unpack
from rlightning.env.control import Quorum
from rlightning.errors import DeadlineExceededError, ReplayError, UnavailableError
from rlightning.services.env_server.actors import Actors
from rlightning.testing.waiting import assert_eventually, wait_until
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import MainConfig
from tests.integration.buffer.harness import (
    FAST,
    act,
    acting,
    asking,
    buffer_process,
    buffer_server,
    check_rollout,
    inserting,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

REPLAY = {"type": "ReplayBuffer", "capacity": 500, "auto_truncate_episode": True}


def storage(*addresses: str, **given: Any) -> dict[str, Any]:
    return {"type": "sharded", "addresses": [*addresses], "missing_after_s": 0.3, **given}


def over(*addresses: str, sampler: str = "uniform", **given: Any) -> BufferConfig:
    return BufferConfig(
        **{**REPLAY, "sampler": SamplerConfig(type=sampler, seed=1)},  # type: ignore[arg-type]
        storage=storage(*addresses, **given),  # type: ignore[arg-type]
    )


def ends(row: int, episode: int) -> tuple[int, bool]:
    return 5, True


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Any]]:
    """Two buffer server processes, [(process, address)]."""
    servers = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        servers.append(buffer_process(folder, **{**REPLAY, "sampler": {"type": "prioritised"}}))
    try:
        for server, _ in servers:
            server.start()
        for server, _ in servers:
            server.address(60)
        yield servers
    finally:
        for server, _ in servers:
            server.kill()


def test_a_data_buffer_over_servers_is_used_like_a_local_one(
    processes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [address for _, address in processes]
    envs = [ScriptedEnv(2, ends, f"env-{i}") for i in range(3)]
    buffer = ReplayBuffer(over(*addresses, sampler="prioritised"), rpc=FAST)
    buffer.init([env.meta for env in envs])
    try:
        env_rets = [env.reset() for env in envs]
        for _ in range(12):
            ids = [env.env_id for env in envs]
            buffer.add_batched_transition(
                BatchedData(ids, env_rets), BatchedData(ids, [*map(answer, env_rets)])
            )
            env_rets = [env.step() for env in envs]
        assert buffer.size() == buffer.num_transitions() == 3 * 2 * 10  # two episodes of each row
        assert [len(one) for one in buffer.storages.values()] == [40, 20]  # envs 0 and 2, env 1
        assert buffer.table is not None
        assert buffer.table.get_env_to_storage() == {"env-0": 0, "env-1": 1, "env-2": 0}
        with caplog.at_level(logging.DEBUG, "rlightning.buffer"):
            buffer.print_timing_summary(reset=True)
            first = caplog.text
            caplog.clear()
            buffer.print_timing_summary()
        for address in addresses:
            for stage in ("store", "insert_ack", "env_to_buffer"):
                (told,) = re.findall(rf"buffer server {address} {stage}: (\{{.*\}})", first)
                assert re.search(r"'count': [1-9].*'p50': .*'p90': .*'p99': .*'max': ", told)
            assert f"buffer server {address} store: " in caplog.text  # the server's stay
        assert "insert_ack" not in caplog.text

        (batch,) = buffer.sample(32)
        assert check_transitions(batch) == 32
        owners, _ = unpack(batch["sample_index"])
        assert set(owners.tolist()) == {0, 1}
        assert (batch["sample_weight"] <= 1).all()
        updated = buffer.update_priorities(
            batch["sample_index"], np.ones(32), batch["sample_generation"]
        )
        assert updated == 32
        assert buffer.update_priorities(batch["sample_index"], np.ones(32), np.full(32, -7)) == 0

        check_transitions(buffer.get({"storage_idx": 1, "indices": [0, -1]}))
        assert buffer[0, 3]["reward"].shape == ()
        assert {i: len(data["reward"]) for i, data in buffer.get_all().items()} == {0: 40, 1: 20}
        with pytest.raises(IndexError):
            buffer.get({"storage_idx": 1, "indices": [20]})
        with pytest.raises(ValueError, match="61"):
            buffer.sample(61)

        buffer.truncate_episodes([env.env_id for env in envs])  # two open transitions of each row
        buffer.truncate_one_episode(envs[0].env_id)
        assert buffer.size() == 60 + 3 * 2
        with pytest.raises(KeyError):
            buffer.truncate_one_episode("stranger")
        assert buffer.counters.cut == 6
        buffer.init_storage_table(train_worker_num=2)
        parts = buffer.sample(20)
        assert [check_transitions(part) for part in parts] == [10, 10]
        buffer.clear()
        assert buffer.size() == 0
    finally:
        buffer.close()


def test_answers_may_come_later_and_rows_alone(processes: list[Any]) -> None:
    buffer = ReplayBuffer(over(processes[0][1], processes[1][1]), rpc=FAST)
    buffer.init()
    try:
        for step in range(4):
            env_ret = EnvRet("lone", np.full(3, step, np.float32), float(step))
            buffer.add_data_async("lone", env_ret)
            env_ret.observation[:] = -1  # the caller's own
            buffer.add_data_async("lone", PolicyResponse("lone", action=np.int64(step)))
        with pytest.raises(ValueError, match="no observation that waits"):
            buffer.add_data_async("lone", PolicyResponse("lone", action=np.int64(9)))
        last = EnvRet("lone", np.full(3, 4, np.float32), 4.0, last_terminated=True)
        buffer.add_data_async("lone", last)
        buffer.add_data_async("lone", PolicyResponse("lone", action=np.int64(9)))  # in vain
        assert buffer.size() == 4
        data = buffer.get_all()[0]
        assert data["action"].tolist() == [0, 1, 2, 3]
        assert data["reward"].tolist() == [1, 2, 3, 4]
        assert data["observation"][:, 0].tolist() == [0, 1, 2, 3]
        with pytest.raises(TypeError):
            buffer.add_transition("lone", last, last)
        with pytest.raises(ReplayError, match="add_episode"):
            buffer.add_episode({"reward": np.zeros(1)})

        buffer.clear()
        buffer.init([EnvMeta("env", num_envs=2)], rows := ["env/0", "env/1"])
        for step in range(3):
            for row in rows:  # each stands for a lone env
                env_ret = EnvRet(row, np.full(3, step, np.float32), float(step))
                buffer.add_transition(row, env_ret, PolicyResponse(row, action=np.int64(step)))
        buffer.truncate_episodes(rows)
        assert [data["reward"].tolist() for data in buffer.get_all().values()] == [[1, 2], [1, 2]]
        with pytest.raises(KeyError, match=r"env 'other/0' is none of \['env'\]"):
            buffer.add_data_async("other/0", EnvRet("other/0", np.zeros(3, np.float32)))
    finally:
        buffer.close()


def test_functions_do_not_travel() -> None:
    buffer = ReplayBuffer(over("127.0.0.1:1", "127.0.0.1:2"), obs_preprocessor=lambda one: one)
    with pytest.raises(ValueError, match="obs_preprocessor: functions do not travel"):
        buffer.init()


@pytest.mark.parametrize(
    ("affinity", "chosen"),
    [(False, ["a:1", "b:1", "a:1", "b:1"]), (True, ["b:1", "b:1", "a:1", "a:1"])],
)
def test_groups_of_an_env_server_are_dealt_out(affinity: bool, chosen: list[str]) -> None:
    nodes = {"one": {"buffer": [1], "env": [0]}, "two": {"buffer": [0], "env": [1]}}
    config = MainConfig(
        buffer=BufferConfig(
            type="ReplayBuffer",
            capacity=10,
            node_affinity_env=affinity,
            storage=storage("a:1", "b:1", nodes=nodes),  # type: ignore[arg-type]
        )
    )
    quorum = Quorum(0, 1.0, "services.env.min_clients")
    actors = Actors(config, [], ActorControl(), quorum=quorum, on_failure=lambda error: None)
    groups = [f"arm-{worker}-{group}" for worker in range(2) for group in range(2)]
    assert [actors.buffer_of(group, hosted=True) for group in groups] == chosen
    assert [actors.buffer_of(group, hosted=True) for group in groups] == chosen


@asynccontextmanager
async def learner(config: BufferConfig, **given: Any) -> AsyncIterator[ShardedSampleClient]:
    async with ShardedSampleClient(config, rpc=FAST, **given) as client:
        yield client


async def drain(client: ShardedSampleClient) -> None:
    for _ in range(3):
        await client.next_batch(30)


async def collect(*addresses: str, steps: int = 20) -> list[ScriptedEnv]:
    envs = [ScriptedEnv(2, ends, f"at-{i}") for i in range(len(addresses))]
    for env, address in zip(envs, addresses, strict=True):
        async with inserting(address, env.meta) as client:
            await act(client, env, steps)
            await client.flush(30)
    return envs


@pytest.mark.crash
async def test_a_server_that_is_killed_is_sampled_around_and_takes_part_again(
    processes: list[Any],
) -> None:
    (_, first), (victim, second) = processes
    await collect(first, second)
    config = over(first, second, missing_shards="skip")
    async with learner(config, batch_size=20) as client:
        batch = await client.next_batch(30)
        assert check_transitions(batch.columns) == 20
        assert batch.metadata["shards"].keys() == {first, second}
        assert batch.metadata["missing"] == {}

        victim.kill()
        await assert_eventually(lambda: second in client.missing, timeout_s=60)
        for _ in range(3):  # the first may have been on its way
            batch = await client.next_batch(30)
            assert check_transitions(batch.columns) == 20
        assert batch.metadata["shards"] == {first: 20}
        assert batch.metadata["missing"][second] >= 0.3

        victim.start()
        await asyncio.to_thread(victim.address, 60)
        async with inserting(second, ScriptedEnv(2, ends, "again").meta) as writer:
            await act(writer, ScriptedEnv(2, ends, "again"), 20)
            await writer.flush(30)
        async with asking(second) as other:
            assert (await other.describe()).tables["default"].size == 40

        async def takes_part() -> bool:
            metadata = (await client.next_batch(30)).metadata
            return second in metadata["shards"] and not metadata["missing"]

        await assert_eventually(takes_part, timeout_s=60)


async def test_a_server_that_is_away_is_an_error_unless_it_may_be_left_out(
    processes: list[Any],
) -> None:
    (_, first), (victim, second) = processes
    await collect(first, second)
    async with learner(over(first, second), batch_size=20) as client:
        await client.next_batch(30)
        victim.kill()
        await assert_eventually(lambda: second in client.missing, timeout_s=60)
        said = rf"shard 1, the buffer server at {second}, is away since \d{{4}}-\d\d-\d\d .*\d s\)"
        with pytest.raises(UnavailableError, match=said) as raised:
            await drain(client)  # the first may have been on its way
        assert raised.value.reason == "SHARD_MISSING"
        victim.start()
        await asyncio.to_thread(victim.address, 60)
        await collect(second)
        await assert_eventually(lambda: not client.missing, timeout_s=60)
        for _ in range(3):
            batch = await client.next_batch(30)
        assert check_transitions(batch.columns) == 20


async def test_starting_without_a_server() -> None:
    async with buffer_server(**REPLAY) as buffers:
        await collect(buffers.address)
        absent = "127.0.0.1:1"
        client = ShardedSampleClient(over(buffers.address, absent), batch_size=4, rpc=FAST)
        with pytest.raises(UnavailableError, match=rf"shard 1, the buffer server at {absent}"):
            await client.start(0.5)
        await client.close()
        config = over(buffers.address, absent, missing_shards="skip")
        async with learner(config, batch_size=4) as skipping:
            batch = await skipping.next_batch(30)
            assert batch.metadata["shards"] == {buffers.address: 4}
            assert batch.metadata["missing"].keys() == {absent}


async def test_sizes_may_change_from_batch_to_batch() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(buffer_server(**REPLAY)) for _ in range(2)]
        await collect(*(one.address for one in servers))
        config = over(*(one.address for one in servers))
        client = await stack.enter_async_context(learner(config, batch_size=8, prefetch=0))
        for size in (8, 3, 30, 1):
            batch = await client.next_batch(10, batch_size=size)
            assert check_transitions(batch.columns) == size
        with pytest.raises(DeadlineExceededError):
            await client.next_batch(0.3, batch_size=10_000)
        assert check_transitions((await client.next_batch(30)).columns) == 8


async def test_rollouts_of_all_servers_lie_side_by_side() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(buffer_server()) for _ in range(3)]
        addresses = [one.address for one in servers]
        config = BufferConfig(
            type="RolloutBuffer",
            capacity=10_000,
            rollout_length=8,
            storage=storage(*addresses),  # type: ignore[arg-type]
        )
        envs = [
            ScriptedEnv(2, env_id="a"),
            ScriptedEnv(3, env_id="b"),
        ]  # nobody writes to the third
        writers: list[tuple[InsertClient, ScriptedEnv]] = []
        for env, address in zip(envs, addresses, strict=False):
            writers.append((await stack.enter_async_context(inserting(address, env.meta)), env))
        client = await stack.enter_async_context(learner(config))
        async with acting(*writers):
            for _ in range(3):
                batch = await client.next_batch(20)
                check_rollout(batch, 8, 5)
                assert batch.metadata["env_ids"] == ["a", "b"]
                assert batch.metadata["shards"] == {addresses[0]: 2, addresses[1]: 3}


def test_a_rollout_buffer_takes_rollouts_of_servers(tmp_path: Path) -> None:
    server, address = buffer_process(tmp_path)
    server.start()
    server.address(60)
    config = BufferConfig(
        type="RolloutBuffer",
        capacity=10_000,
        rollout_length=8,
        storage=storage(address),  # type: ignore[arg-type]
    )
    buffer = RolloutBuffer(config, rpc=FAST)
    env = ScriptedEnv(2)
    try:
        buffer.init([env.meta])
        env_ret = env.reset()
        for _ in range(9):
            buffer.add_transition(env.env_id, env_ret, answer(env_ret))
            env_ret = env.step()
        wait_until(lambda: buffer.size() >= 16, timeout_s=60)
        (rollout,) = buffer.sample()
        assert rollout["reward"].shape == (8, 2)
        assert check_transitions(rollout) == 16

        def add_rollout() -> None:
            nonlocal env_ret
            for _ in range(8):
                buffer.add_transition(env.env_id, env_ret, answer(env_ret))
                env_ret = env.step()

        buffer.init_storage_table([env.env_id], train_worker_num=2)
        add_rollout()
        parts = buffer.sample()
        for row, part in enumerate(parts):  # each has a row of its own, in its order
            assert part["reward"].shape == (8, 1)
            assert check_transitions(part) == 8
            assert (part["observation"][..., 0] == env.rows[row]).all()
        assert len(parts) == 2
        buffer.init_storage_table([env.env_id], train_worker_num=3)
        add_rollout()
        for drop_last in (True, False):
            with pytest.raises(ReplayError, match="world_size 3: the 2 rows .* do not divide"):
                buffer.sample(drop_last=drop_last)
        buffer.init_storage_table([env.env_id], train_worker_num=2)
        again = buffer.sample()  # what was refused is not lost
        for row, part in enumerate(again):
            assert part["reward"].shape == (8, 1)
            assert (part["observation"][..., 0] == env.rows[row]).all()
            assert part["observation"].min() >= parts[row]["observation"].min()
            assert not np.array_equal(part["observation"], parts[row]["observation"])
    finally:
        buffer.close()
        server.kill()
