"""Inserts over real sockets: exactly once, bounded, and refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from rlightning.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
)
from rlightning.rpc.channel import connect
from rlightning.rpc.session import Session
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually
from rlightning.types import EnvMeta, PolicyResponse
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_meta
from tests.integration.buffer.harness import (
    FAST,
    FORGETFUL,
    Buffers,
    act,
    acting,
    asking,
    buffer_server,
    check_rollout,
    inserting,
    keep_acting,
    raw_writer,
    sampling,
)
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions


async def test_rollouts_of_all_groups_arrive_whole() -> None:
    envs = [
        ScriptedEnv(3, lambda row, episode: (5 + row, row == 1), env_id=f"cp-{i}") for i in (0, 1)
    ]
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, envs[0].meta) as first,
        inserting(buffers.address, envs[1].meta) as second,
        sampling(buffers.address) as learner,
        acting((first, envs[0]), (second, envs[1])),
    ):
        for rollout in range(6):
            batch = await learner.next_batch(5)
            check_rollout(batch, 8, 6)
            assert batch.metadata["rollout"] == rollout
            assert batch.metadata["env_ids"] == ["cp-0", "cp-1"]
            assert batch.columns["action_source"].dtype == np.int8
            assert batch.columns["policy_version"].dtype == np.int64
            assert batch.columns["terminated"].any()


async def test_a_repeated_message_is_acked_and_not_stored_again() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, raw_writer(buffers.address, env.meta) as writer:
        assert (await writer.hello()).next_seq == 1
        rets = [env.reset(), env.step(), env.step()]
        for seq, env_ret in enumerate(rets[:2], 1):
            await writer.insert(seq, env_ret, answer(env_ret))
        for seq in (1, 2, 2):
            await writer.insert(seq, rets[seq - 1], answer(rets[seq - 1]))
        await writer.insert(3, rets[2], answer(rets[2]))
        await writer.acked(3)
        async with asking(buffers.address) as client:
            assert check_transitions(await client.get()) == 4
            stats = (await client.describe()).stats
        assert stats["duplicates_total"] == 3
        assert stats["tables"]["default"]["lost"] == 0


async def test_a_gap_is_answered_with_the_expected_number() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, raw_writer(buffers.address, env.meta) as writer:
        await writer.hello()
        env_ret = env.reset()
        await writer.insert(4, env_ret, answer(env_ret))
        ack = (await writer.read()).ack
        assert (ack.seq, ack.expected_seq) == (0, 1)
        await writer.insert(1, env_ret, answer(env_ret))
        await writer.acked(1)


async def test_a_resumed_writer_goes_on_where_it_was_and_joins_its_rows() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers:
        async with raw_writer(buffers.address, env.meta) as writer:
            await writer.hello()
            env_ret = env.reset()
            await writer.insert(1, env_ret, answer(env_ret))
            await writer.acked(1)
            token = writer.token
        async with raw_writer(buffers.address, env.meta, token=token) as writer:
            welcome = await writer.hello()
            assert (welcome.next_seq, welcome.session.epoch) == (2, 2)
            await writer.insert(1, env_ret, answer(env_ret))
            env_ret = env.step()
            await writer.insert(2, env_ret, answer(env_ret))
            await writer.acked(2)
        async with asking(buffers.address) as client:
            assert check_transitions(await client.get()) == 2


async def test_a_new_writer_of_an_env_begins_a_segment() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers:
        async with raw_writer(buffers.address, env.meta, "one") as one:
            await one.hello()
            for seq, env_ret in enumerate([env.reset(), env.step()], 1):
                await one.insert(seq, env_ret, answer(env_ret))
            await one.acked(2)
        writers = buffers.service._writers
        await assert_eventually(lambda: writers.open_count == 0)  # it may still come back
        async with raw_writer(buffers.address, env.meta, "two") as two:
            assert (await two.hello()).next_seq == 1
            for seq, env_ret in enumerate([env.step(), env.step()], 1):
                await two.insert(seq, env_ret, answer(env_ret))
            await two.acked(2)
            columns = buffers.table.buffer.get_all()
            assert check_transitions(columns) == 4
            np.testing.assert_array_equal(columns["cut"], [1, 0, 1, 0])
            # The first one's end must not take the rows of the second away.
            await buffers.service._insert.on_close(_session(buffers, "one"), resumable=False)
            assert buffers.table.producers["env"].writer_id == "two"


def _session(buffers: Buffers, client_id: str) -> Session:
    return next(s for s in buffers.service._writers.sessions if s.client_id == client_id)


@pytest.mark.parametrize(("env_id", "writer_id"), [("env", "two"), ("env", "one"), ("x", "one")])
async def test_the_rows_of_two_clients_are_never_mixed(env_id: str, writer_id: str) -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, raw_writer(buffers.address, env.meta, "one") as one:
        await one.hello()
        async with connect(buffers.address, rpc=FAST) as channel:
            call = channel.stream_stream("/rlightning.v1.BufferService/Insert")()
            w, request = Writer(), pb.InsertRequest()
            request.hello.writer_id = writer_id
            request.hello.session.protocol_version = 1
            request.hello.session.client_id = "rival"
            fill_env_meta(request.hello.session.spec, ScriptedEnv(2, env_id=env_id).meta, w)
            await call.write(w.finish(request))
            with pytest.raises(grpc.aio.AioRpcError, match="client one at .* of env 'env'") as e:
                await call.read()
            assert e.value.code() == grpc.StatusCode.ALREADY_EXISTS
        for seq, env_ret in enumerate([env.reset(), env.step()], 1):
            await one.insert(seq, env_ret, answer(env_ret))
        await one.acked(2)


async def test_a_full_buffer_withholds_acks_until_a_rollout_is_acked() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=4, max_rollouts=2) as buffers,
        inserting(buffers.address, env.meta, window_items=3) as client,
        sampling(buffers.address) as learner,
        acting((client, env)),
    ):
        # 2 rollouts of 4, the observation after them, and a full window.
        await assert_eventually(lambda: buffers.table.buffer.rollouts.held == 2)
        with pytest.raises(DeadlineExceededError):
            await client.flush(0.3)
        assert buffers.table.buffer.rollouts.formed == 2
        assert client.acked == 9
        newest = []
        for rollout in range(5):
            batch = await learner.next_batch(5)
            check_rollout(batch, 4, 2)
            newest.append(int(batch.columns["policy_version"].max()))
            assert buffers.table.buffer.rollouts.formed <= rollout + 2
        assert newest == [3, 7, 11, 15, 19]


async def test_at_the_end_nobody_waits_for_room() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=4, max_rollouts=2) as buffers,
        inserting(buffers.address, env.meta, window_items=3) as client,
    ):
        writing = asyncio.create_task(keep_acting(client, env))
        # 2 rollouts of 4 and the observation after them; then a full window.
        await assert_eventually(lambda: client.acked == 9)
        assert not writing.done()
        client.stop_waiting_for_room()
        with pytest.raises(StorageFullError, match="no room for the last 3 items"):
            await writing
        with pytest.raises(StorageFullError, match="no room for the last 3 items"):
            await client.flush(5)
        assert client.acked == 9


async def test_what_there_is_room_for_is_acked_at_the_end_too() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=4, max_rollouts=1000) as buffers,
        inserting(buffers.address, env.meta, window_items=3) as client,
    ):
        client.stop_waiting_for_room()
        await act(client, env, 200)
        await client.flush(5)
        assert client.acked == 201


async def test_what_waits_for_room_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, raw_writer(buffers.address, env.meta) as writer:
        await writer.hello()
        monkeypatch.setattr("rlightning.services.buffer_server.inserts._MAX_WAITING_BYTES", 2500)
        env_ret = env.reset()
        for seq in range(1, 60):
            await writer.insert(seq, env_ret, answer(env_ret))
            env_ret = env.step()
        state = buffers.service._insert._writers["raw"]
        await assert_eventually(lambda: len(state.waiting) > 1)
        await asyncio.sleep(0.2)
        waiting = [message.nbytes for message in state.waiting]
        assert sum(waiting[:-1]) < 2500 < sum(waiting)


async def test_heartbeats_go_on_while_acks_are_withheld() -> None:
    env = ScriptedEnv(1)
    async with (
        buffer_server(rollout_length=1, max_rollouts=1) as buffers,
        inserting(buffers.address, env.meta) as client,
    ):
        task = asyncio.create_task(act(client, env, 30))
        await asyncio.sleep(2.5)  # more than a lease
        assert client.resent == 0
        assert not task.done()
        async with sampling(buffers.address) as learner:
            for _ in range(30):
                await learner.next_batch(5)
        await task


async def test_a_row_that_does_not_fit_is_refused_and_the_session_lives_on() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=2) as buffers,
        inserting(buffers.address, env.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, env, 1)
        bad = env.step()
        bad.observation = bad.observation.astype(np.float64)
        await client.insert(bad, answer(bad))
        with pytest.raises(InvalidRequestError, match="observation: expected float32, got float64"):
            await client.flush(5)
        env_ret = env.step()
        await client.insert(env_ret, answer(env_ret))
        await client.insert(env.step(), None)
        await client.flush(5)
        columns = await asker.get()
        assert check_transitions(columns) == 4
        np.testing.assert_array_equal(columns["cut"], [1, 0, 1, 0])
        status = await asker.describe()
        assert status.stats["refused_total"] == 1
        assert status.tables["default"].writers == 1


async def test_nothing_is_joined_across_a_refused_item() -> None:
    """Not even by a row that ends its episode, whose number of steps is not told."""
    env = ScriptedEnv(1, lambda row, episode: (3, True))
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta, window_items=1) as client,
    ):
        for step in range(6):
            env_ret = env.step() if step else env.reset()
            response = answer(env_ret)
            if step == 2:
                response.value = np.zeros(5, np.float32)
            await client.insert(env_ret, response)
            if step == 2:
                with pytest.raises(InvalidRequestError, match="value"):
                    await client.flush(5)
        await client.flush(5)
        columns = buffers.table.buffer.get_all()
        assert check_transitions(columns) == 3
        np.testing.assert_array_equal(columns["step"], [0, 0, 1])
        np.testing.assert_array_equal(columns["cut"], [1, 0, 0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"table": "other"}, "no table 'other'"),
        ({"response": PolicyResponse("env", action=np.zeros(3))}, r"action: expected shape \[2\]"),
        ({"response": PolicyResponse("env", reward=np.zeros(2))}, "reward: .* of this name"),
        ({"response": PolicyResponse("else", action=np.zeros(2))}, "Mismatched env_id"),
        ({"env_ret": None}, r"items\[0\]\.env_ret: missing"),
        ({"cut_rows": [5]}, "cut_rows: expected ascending numbers below 2"),
    ],
)
async def test_bad_items_are_named(spoil: dict, message: str) -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, raw_writer(buffers.address, env.meta) as writer:
        await writer.hello()
        first = env.reset()
        fields = {"env_ret": first, "response": answer(first), **spoil}
        await writer.insert(1, **fields)
        ack = (await writer.read()).ack
        assert ack.seq == 0
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(ack.error.message)
        env_ret = env.step()
        await writer.insert(2, env_ret, answer(env_ret))
        await writer.acked(2)


async def test_another_env_id_than_the_declared_one_is_refused() -> None:
    env, other = ScriptedEnv(2), ScriptedEnv(2, env_id="other")
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = other.reset()
        await client.insert(env_ret, answer(env_ret))
        with pytest.raises(InvalidRequestError, match="expected 'env', got 'other'"):
            await client.flush(5)
        await act(client, env, 2)
        await client.flush(5)
        assert buffers.table.buffer.num_transitions() == 4


async def test_an_item_beyond_the_cap_is_not_sent_and_names_the_key() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = env.reset()
        env_ret.info = {"video": np.zeros(2**21, np.uint8)}
        with pytest.raises(
            ResourceExhaustedError, match=r"services\.buffer\.rpc\.info_budget_bytes"
        ):
            await client.insert(env_ret, answer(env_ret))
        await act(client, env, 2)
        await client.flush(5)


async def test_describe_clear_and_truncate() -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server(rollout_length=4) as buffers,
        inserting(buffers.address, env.meta, window_items=1) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, env, 5, last=False)
        await client.flush(5)
        status = await asker.describe()
        table = status.tables["default"]
        assert (await asker.describe(table="default")).tables.keys() == {"default"}
        with pytest.raises(NotFoundError, match="no table 'other'"):
            await asker.describe(table="other")
        assert (table.size, table.capacity, table.inserted_total) == (8, 16, 8)
        assert status.stats["tables"]["default"]["rollouts_ready"] == 1
        assert status.stats["latency"]["store"]["count"] == 5
        assert check_transitions(await asker.get([0, -1])) == 2
        with pytest.raises(InvalidRequestError, match="index 99"):
            await asker.get([99])
        assert await asker.truncate(["env"]) == 2
        assert await asker.truncate(["env"]) == 0
        assert await asker.clear() == 8
        assert (await asker.describe()).tables["default"].size == 0


async def test_an_insert_needs_a_spec_and_a_writer() -> None:
    env = ScriptedEnv(1)
    async with buffer_server() as buffers:
        for spec, writer_id, message in (
            (EnvMeta(), "a", "needs a spec with the id"),
            (env.meta, "", "needs a writer_id"),
        ):
            async with raw_writer(buffers.address, spec, "raw") as writer:
                request = pb.InsertRequest()
                request.hello.writer_id = writer_id
                request.hello.session.protocol_version = 1
                request.hello.session.client_id = "raw"
                w = Writer()
                fill_env_meta(request.hello.session.spec, spec, w)
                await writer.call.write(w.finish(request))
                assert await writer.call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert message in await writer.call.details()


async def test_no_writer_counts_to_a_number_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    env = ScriptedEnv(1)
    durable = {"data_dir": str(tmp_path), "durability": "process"}
    async with buffer_server(type="ReplayBuffer", **durable) as buffers:
        async with raw_writer(buffers.address, env.meta) as writer:
            await writer.hello(storage_id="one that is gone")
            await writer.insert(2**63 - 1, env.reset())
            assert await writer.call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "seq: expected at most" in await writer.call.details()
        async with raw_writer(buffers.address, env.meta, "another") as writer:
            await writer.hello(storage_id="one that is gone")
            await writer.insert(2**62, env.reset())
            await writer.acked(2**62)
        async with asking(buffers.address) as client:
            await client.checkpoint()


async def test_an_item_of_a_caller_that_was_cancelled_before_its_turn_is_sent_all_the_same() -> (
    None
):
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, env.meta, window_items=2) as client,
    ):
        env_ret = env.reset()
        assert client._session is not None
        assert client._session._stream is not None
        async with client._session._stream._lock:  # as while a heartbeat is written
            waiting = asyncio.create_task(client.insert(env_ret, answer(env_ret)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
        for _ in range(3):
            env_ret = env.step()
            await client.insert(env_ret, answer(env_ret))
        await client.flush(5)
        assert check_transitions(buffers.table.buffer.get_all()) == 6


async def test_who_asks_for_room_while_the_client_is_closed_is_told_so() -> None:
    env = ScriptedEnv(2)
    async with buffer_server() as buffers, inserting(buffers.address, env.meta) as client:
        env_ret = env.reset()
        await client.insert(env_ret, answer(env_ret))
        async with client._sending:  # as while another task sends
            asking = asyncio.create_task(client._is_full())
            await asyncio.sleep(0)
            await client.close()
        with pytest.raises(UnavailableError, match="the client was closed"):
            await asyncio.wait_for(asking, 20)


async def test_a_refusal_that_was_not_told_before_a_cut_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ScriptedEnv(2)
    async with (
        buffer_server() as buffers,
        FaultProxy(buffers.address) as proxy,
        inserting(proxy.address, env.meta) as client,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(buffers.service._store, "settled", asyncio.Event().wait)
            bad = env.reset()
            bad.observation = bad.observation.astype(np.float64)
            await client.insert(bad, answer(bad))
            await assert_eventually(lambda: buffers.service._insert.counts.refused_total == 1)
        proxy.cut()
        with pytest.raises(InvalidRequestError, match="expected float32, got float64"):
            await client.flush(10)
        await act(client, env, 2)
        await client.flush(10)
        assert check_transitions(buffers.table.buffer.get_all()) == 4
        assert buffers.service._insert.counts.refused_total == 1


async def test_a_writer_that_goes_before_its_hello_is_answered_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ScriptedEnv(2)
    async with buffer_server(rpc=FORGETFUL) as buffers:
        with monkeypatch.context() as patched:
            patched.setattr(buffers.service._store, "settled", asyncio.Event().wait)
            async with raw_writer(buffers.address, env.meta) as writer:
                greeting = asyncio.create_task(writer.hello())
                await assert_eventually(lambda: buffers.table.producers)
                greeting.cancel()
                await asyncio.wait({greeting})
            await assert_eventually(lambda: not buffers.table.producers)
