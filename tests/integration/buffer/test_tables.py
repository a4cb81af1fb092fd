"""Several tables on one server, over real sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.testing.waiting import assert_eventually
from tests.integration.buffer.harness import (
    act,
    asking,
    buffer_server,
    check_rollout,
    config,
    inserting,
    raw_writer,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

TABLES = {"sim": {"envs": ["sim*"]}, "real": {"capacity": 50}}
REPLAY: dict[str, Any] = {
    "type": "ReplayBuffer",
    "auto_truncate_episode": True,
    "capacity": 1000,
    "sampler": {"type": "uniform", "seed": 7},
}


def env(env_id: str, length: int = 5, rows: int = 2) -> ScriptedEnv:
    return ScriptedEnv(rows, lambda row, episode: (length, True), env_id=env_id)


async def sizes(asker: BufferClient) -> dict[str, int]:
    return {name: table.size for name, table in (await asker.describe()).tables.items()}


async def test_every_call_honours_its_table() -> None:
    sim, real = env("sim"), env("real")
    prioritised = {**TABLES, "sim": {"sampler": {"type": "prioritised"}}}
    async with (
        buffer_server(**REPLAY, tables=prioritised) as buffers,
        inserting(buffers.address, sim.meta, tables="sim") as first,
        inserting(buffers.address, real.meta, tables="real") as second,
        asking(buffers.address) as asker,
    ):
        await act(first, sim, 12)
        await act(second, real, 7)
        await first.flush(5)
        await second.flush(5)
        assert await sizes(asker) == {"sim": 20, "real": 10}
        status = await asker.describe()
        assert (status.tables["sim"].capacity, status.tables["real"].capacity) == (1000, 50)
        assert (await asker.describe(table="real")).tables.keys() == {"real"}
        assert check_transitions(await asker.get(table="sim")) == 20
        assert check_transitions(await asker.get([0, -1], "real")) == 2
        assert await asker.update_priorities([0], [3.0], table="sim") == 1
        assert await asker.truncate(["sim"], "sim") == 2
        assert await sizes(asker) == {"sim": 24, "real": 10}
        with pytest.raises(PreconditionError, match="env_ids: no data of sim") as refused:
            await asker.truncate(["sim"], "real")
        assert refused.value.reason == "UNKNOWN_ENV"
        assert await asker.clear("real") == 10
        assert await sizes(asker) == {"sim": 24, "real": 0}
        async with sampling(buffers.address, table="sim", batch_size=4) as learner:
            assert check_transitions((await learner.next_batch(5)).columns) == 4
        for call in (
            asker.get(table="other"),
            asker.truncate([], "other"),
            asker.clear("other"),
            asker.clear(),
            asker.update_priorities([0], [1.0], table="other"),
            asker.describe(table="other"),
            asker.discard_episode("sim", "other"),
        ):
            with pytest.raises(NotFoundError, match=r"no table '(other|default)'; there are \['re"):
                await call
        for options in ({"table": "other"}, {}):
            with pytest.raises(NotFoundError, match="no table"):
                async with sampling(buffers.address, batch_size=4, **options):
                    pass
        with pytest.raises(NotFoundError, match="no table 'default'"):
            async with inserting(buffers.address, env("third").meta):
                pass


async def test_rows_go_to_all_tables_of_their_writer_in_whole_messages() -> None:
    one = env("env")
    tables = {
        "rollouts": {"type": "RolloutBuffer", "rollout_length": 4, "sampler": None},
        "replay": {},
    }
    async with (
        buffer_server(**REPLAY, tables=tables) as buffers,
        inserting(buffers.address, one.meta, tables=["rollouts", "replay"]) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 8)
        await client.flush(5)
        assert await sizes(asker) == {"rollouts": 16, "replay": 10}
        env_ret = one.step()
        env_ret.observation = env_ret.observation.astype(np.float64)
        await client.insert(env_ret, answer(env_ret))
        with pytest.raises(InvalidRequestError, match="observation: expected float32"):
            await client.flush(5)
        async with sampling(buffers.address, table="rollouts") as learner:
            check_rollout(await learner.next_batch(5), 4, 2)
        env_ret = one.reset()
        for _ in range(6):
            await client.insert(env_ret, answer(env_ret), table="replay")
            env_ret = one.step()
        await client.flush(5)
        assert (await sizes(asker))["replay"] == 26  # with the 6 before the item that was refused
        status = await asker.describe()
        assert status.tables["rollouts"].inserted_total == 16


async def test_a_message_for_a_table_that_its_hello_did_not_name_is_refused() -> None:
    one = env("env")
    async with (
        buffer_server(**REPLAY, tables={"default": {}, "other": {}}) as buffers,
        raw_writer(buffers.address, one.meta) as writer,
    ):
        await writer.hello()
        first = one.reset()
        await writer.insert(1, first, answer(first), table="other")
        error = (await writer.read()).ack.error
        assert "table: expected one of the hello's, ['default'], got 'other'" in error.message
        second = one.step()
        await writer.insert(2, second, answer(second), table="default")
        await writer.acked(2)


async def test_one_stream_mixes_tables_by_fraction_and_says_which_row_is_whose() -> None:
    sim, real = env("sim"), env("real")
    tables = {"sim": {"sampler": {"type": "prioritised", "seed": 1}}, "real": {}}
    async with (
        buffer_server(**REPLAY, tables=tables) as buffers,
        inserting(buffers.address, sim.meta, tables="sim") as first,
        inserting(buffers.address, real.meta, tables="real") as second,
        sampling(buffers.address, fractions={"sim": 0.75, "real": 0.25}, batch_size=32) as learner,
    ):
        await act(first, sim, 40)
        await first.flush(5)
        await act(second, real, 6)  # 10 rows: more than its part, less than a batch
        await second.flush(5)
        for _ in range(3):
            batch = await learner.next_batch(5)
            assert check_transitions(batch.columns) == 32
            assert batch.metadata["tables"] == ["sim", "real"]
            index = batch.metadata["table_index"]
            assert index.dtype == np.int32
            np.testing.assert_array_equal(index, np.repeat([0, 1], [24, 8]))
            assert (batch.columns["sample_index"][index == 0] >= 0).all()
            np.testing.assert_array_equal(batch.columns["sample_index"][index == 1], -1)
            np.testing.assert_array_equal(batch.columns["sample_weight"][index == 1], 1)
        async with asking(buffers.address) as asker:
            status = await asker.describe()
            sim_total = status.tables["sim"].sampled_total
            assert sim_total == 3 * status.tables["real"].sampled_total > 0


async def test_a_mixture_waits_for_each_of_its_tables() -> None:
    sim, real = env("sim"), env("real")
    async with (
        buffer_server(**REPLAY, tables={"sim": {}, "real": {}}) as buffers,
        inserting(buffers.address, sim.meta, tables="sim") as first,
        inserting(buffers.address, real.meta, tables="real") as second,
        sampling(buffers.address, fractions={"sim": 0.5, "real": 0.5}, batch_size=8) as learner,
    ):
        await act(first, sim, 12)
        await first.flush(5)
        await assert_eventually(lambda: buffers.service._tables["real"].rendezvous._asking)
        assert buffers.service._tables["sim"].sampled_total == 0
        await act(second, real, 6)
        assert check_transitions((await learner.next_batch(5)).columns) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": {"sim": 0.5, "real": 0.6}}, "fractions: expected a sum of 1, got 1.1"),
        ({"fractions": {"sim": 0.99, "real": 0.01}}, "0.01 of a batch_size of 8 is no row"),
        ({"fractions": {"sim": 1.0}, "table": "sim"}, "table: expected none beside fractions"),
        ({"fractions": {"sim": 0.5, "rollouts": 0.5}}, "'rollouts' does not sample single"),
        ({"fractions": {"sim": 0.5, "sequences": 0.5}}, r"sequences of one length, got \[1, 4\]"),
    ],
)
async def test_bad_mixtures_are_refused(options: dict[str, Any], message: str) -> None:
    tables = {
        "sim": {},
        "real": {},
        "rollouts": {"type": "RolloutBuffer", "sampler": None},
        "sequences": {"sampler": {"type": "sequence", "length": 4}},
    }
    async with buffer_server(**REPLAY, tables=tables) as buffers:
        with pytest.raises(InvalidRequestError, match=message):
            async with sampling(buffers.address, batch_size=8, **options):
                pass
        with pytest.raises(NotFoundError, match="no table 'other'"):
            async with sampling(buffers.address, batch_size=8, fractions={"other": 1.0}):
                pass


async def test_tables_that_do_not_mix_are_told_apart_by_column() -> None:
    sim, real = env("sim"), env("real")
    tables = {"sim": {}, "real": {"columns": ["action_age"]}}
    async with (
        buffer_server(**REPLAY, tables=tables) as buffers,
        inserting(buffers.address, sim.meta, tables="sim") as first,
        inserting(buffers.address, real.meta, tables="real") as second,
        sampling(buffers.address, fractions={"sim": 0.5, "real": 0.5}, batch_size=8) as learner,
    ):
        await act(first, sim, 6)
        await act(second, real, 6)
        with pytest.raises(
            Exception, match=r"'sim' and 'real' differ in the columns \['action_age"
        ):
            await learner.next_batch(5)


async def test_tables_share_the_memory_of_the_section() -> None:
    tables = {"small": {"max_bytes": 2**20}, "one": {}, "two": {}}
    async with buffer_server(**REPLAY, max_bytes=5 * 2**20, tables=tables) as buffers:
        shares = {name: table.buffer.max_bytes for name, table in buffers.service._tables.items()}
        assert shares == {"small": 2**20, "one": 2 * 2**20, "two": 2 * 2**20}
        large = ScriptedEnv(200_000, env_id="large")
        with pytest.raises(ResourceExhaustedError, match=r"buffer\.max_bytes allows 1048576"):
            async with inserting(buffers.address, large.meta, tables="small"):
                pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_bytes": 100, "tables": {"a": {"max_bytes": 100}, "b": {}}},
            "its 100 bytes are less",
        ),
        ({"tables": {"a": {"capacity": 0}}}, r"table 'a' of buffer\.tables: buffer\.capacity"),
        ({"rate_limiter": {"min_size": 2000}}, r"buffer\.rate_limiter\.min_size: .*1000, got 2000"),
        (
            {"rate_limiter": {"queue_size": 9}, "sampler": None, "storage": {"mode": "fixed"}},
            r"buffer\.storage\.mode: a queue needs 'circular', got 'fixed'",
        ),
    ],
)
def test_tables_that_cannot_be_are_refused_at_the_start(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BufferService(config(**{**REPLAY, **options}))
