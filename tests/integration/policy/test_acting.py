"""Acting over the network: answers, batches, errors, caps."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    PolicyError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
)
from rlightning.latency import STAGES
from rlightning.policy import PolicyClient
from rlightning.rpc.health import ServingStatus, check
from rlightning.testing import FaultProxy, assert_eventually
from rlightning.types import EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.config import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.tensor_pb2 import Value
from tests.integration.policy.harness import (
    VECTOR,
    acting,
    env_ret,
    policy_server,
    spec,
    weights,
)

ROOT = Path(__file__).parents[3]

AWKWARD = "tests.integration.policy.harness:Awkward"
# Zeros take it no time, so that it would be taken for short.
SLOW: dict[str, Any] = {"type": AWKWARD, "inline_below_us": 0}
LARGE = "tests.integration.policy.harness:Large"


def vector(value: float, rows: int = 1) -> EnvRet:
    return EnvRet("env", np.full((rows, 4), value, np.float32))


async def test_an_answer_has_the_rows_that_asked_its_number_and_its_times() -> None:
    async with policy_server() as server, acting(server.address, 8) as client:
        for seq in (1, 2, 3):
            response = await client.act(env_ret(8), purpose=Purpose.EVAL)
            assert response.env_id == "env"
            assert response.action.dtype == np.int64
            assert response.log_prob.dtype == response.value.dtype == np.float32
            assert response.action.shape == response.value.shape == (8,)
            assert (response.seq, response.policy_version) == (seq, 0)
            assert response.ts_policy_sent_ns > 0
        for stage in ("act", "queue", "batch_wait", "inference"):
            assert client.stats[stage].count == 3
        server_time = sum(client.stats[s].total for s in ("queue", "batch_wait", "inference"))
        assert server_time < client.stats["act"].total
        description = await client.describe()
        assert description.sessions == 1
        assert description.stats["requests"] == 3
        assert description.stats["rows"] == 24
        assert description.stats["latency"]["inference"]["count"] == 3


async def test_the_first_request_of_a_server_finds_its_way_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlightning.services.policy_server.acting._REHEARSE_S", 10.0)
    async with policy_server(inline_below_us=1_000_000) as server:
        async with acting(server.address, 8) as client:
            assert server.stats.requests == 0
            assert server.service._hosts.default.batcher.groups == 1  # nobody who is waited for
            # The hello, and a heartbeat that was answered before the session counted as open.
            assert server.service._registry.messages.received >= 2
            await client.act(env_ret(8))
            # Without a thread switch, since inferences of that size are known to be short.
            assert (server.stats.requests, server.stats.inline_batches) == (1, 1)


async def test_one_row_without_a_leading_dimension_is_answered_without_one() -> None:
    async with policy_server() as server, acting(server.address) as client:
        response = await client.act(EnvRet("robot", np.zeros(4, np.float32)))
        assert response.action.shape == ()


async def test_rows_are_answered_the_same_whatever_shares_the_batch() -> None:
    async with policy_server(max_wait_us=200_000) as server:
        whole = env_ret(16)
        async with acting(server.address, 16, client_id="all") as client:
            together = await client.act(whole, mode=Mode.EXPLOIT)
        clients = [PolicyClient(server.address, spec=spec(), client_id=f"c{i}") for i in range(16)]
        await asyncio.gather(*(client.start() for client in clients))
        alone = await asyncio.gather(
            *(
                client.act(EnvRet(f"c{i}", whole.observation[i : i + 1]), mode=Mode.EXPLOIT)
                for i, client in enumerate(clients)
            )
        )
        assert [response.env_id for response in alone] == [f"c{i}" for i in range(16)]
        assert server.stats.batches == 2
        for name in ("action", "log_prob", "value"):
            got = np.concatenate([getattr(response, name) for response in alone])
            np.testing.assert_allclose(got, getattr(together, name), atol=1e-5)
        await asyncio.gather(*(client.close() for client in clients))


async def test_sessions_share_batches_without_being_made_to_wait() -> None:
    async with policy_server() as server:
        clients = [PolicyClient(server.address, spec=spec(2)) for _ in range(16)]
        await asyncio.gather(*(client.start() for client in clients))

        async def loop(client: PolicyClient) -> None:
            for _ in range(20):
                await client.act(env_ret(2))

        await asyncio.gather(*map(loop, clients))
        assert server.stats.requests == 320
        assert server.stats.batches < 240
        await asyncio.gather(*(client.close() for client in clients))


async def test_no_batch_waits_for_a_client_that_resets() -> None:
    async with policy_server(max_wait_us=60_000_000) as server:
        async with acting(server.address) as one, acting(server.address) as two:

            def awaited() -> int:
                groups: int = server.service._hosts.default.batcher.groups
                return groups

            await asyncio.gather(one.act(env_ret()), two.act(env_ret()))
            with two._session.activity.resetting():
                await two._session.probe()
                await assert_eventually(lambda: awaited() == 1)
                await asyncio.wait_for(one.act(env_ret()), 20)
            asking = asyncio.ensure_future(two.act(env_ret()))  # no heartbeat has said so
            await assert_eventually(lambda: awaited() == 2)
            await asyncio.gather(one.act(env_ret()), asking)
            assert (server.stats.requests, server.stats.batches) == (5, 3)
        await assert_eventually(lambda: awaited() == 0)


async def test_an_observation_outside_the_spec_is_refused_by_key_and_the_session_lives_on() -> None:
    space = gym.spaces.Dict(
        {"camera": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), "arm": gym.spaces.Box(-1, 1, (3,))}
    )
    good = {"camera": np.zeros((2, 2, 2, 3), np.uint8), "arm": np.zeros((2, 3), np.float32)}
    async with policy_server() as server:
        async with acting(server.address, spec=spec(2, space)) as client:
            for change, message in [
                (
                    {"camera": np.zeros((2, 2, 2, 3), np.float32)},
                    r"observation.camera: expected uint8",
                ),
                (
                    {"arm": np.zeros((2, 4), np.float32)},
                    r"observation.arm: expected float32\[2, 3\]",
                ),
                ({"extra": 1}, "'extra' is not in the space"),
            ]:
                with pytest.raises(InvalidRequestError, match=message):
                    await client.act(EnvRet("env", good | change))
                response = await client.act(EnvRet("env", good))
                assert response.action.shape == (2,)


async def test_what_the_policy_raises_reaches_the_caller_with_its_message_and_env() -> None:
    async with policy_server(type=AWKWARD) as server, acting(server.address) as client:
        with pytest.raises(
            RemoteError, match="failed for env 'env': ValueError: the arm is on fire"
        ):
            await asyncio.wait_for(client.act(vector(101)), 30)
        assert (await client.act(vector(-1))).action.tolist() == [-1]
        assert server.stats.errors == 1


async def test_a_nan_action_is_an_error_of_who_asked_and_of_nobody_else_in_the_batch() -> None:
    async with policy_server(type=AWKWARD, max_wait_us=60_000_000) as server:
        async with acting(server.address, 2) as good, acting(server.address, 2) as bad:
            for _ in range(2):
                action, error = await asyncio.gather(
                    good.act(vector(-1, 2)),
                    bad.act(EnvRet("arm", np.full((2, 4), np.nan, np.float32))),
                    return_exceptions=True,
                )
                assert isinstance(action, PolicyResponse)
                assert action.action.tolist() == [-1, -1]
                assert isinstance(error, RemoteError)
                assert "failed for env 'arm': 'action' is NaN, in row 0" in str(error)
            answers = await asyncio.gather(good.act(vector(-1)), bad.act(vector(-2)))
            assert [answer.action.tolist() for answer in answers] == [[-1], [-2]]
        assert (server.stats.errors, server.stats.requests, server.stats.batches) == (2, 4, 3)


async def test_another_spec_is_refused_with_what_differs() -> None:
    async with policy_server() as server, acting(server.address):
        other = spec(1, gym.spaces.Box(-1, 1, (5,), np.float32))
        with pytest.raises(PreconditionError, match=r"observation_space.*expected.*got"):
            async with acting(server.address, spec=other):
                pass


async def test_a_policy_that_cannot_act_in_a_space_says_so_when_the_session_opens() -> None:
    async with policy_server() as server:
        wrong = spec()
        wrong.action_space = gym.spaces.MultiBinary(3)
        with pytest.raises(PreconditionError, match="acts in Discrete and Box spaces"):
            async with acting(server.address, spec=wrong):
                pass


async def test_act_needs_a_spec_and_a_session_and_goes_one_at_a_time() -> None:
    async with policy_server(**SLOW) as server:
        async with PolicyClient(server.address) as client:
            with pytest.raises(PolicyError, match="needs a session"):
                await client.act(env_ret())
            with pytest.raises(ConfigError, match="needs the spec"):
                await client.start()
        async with acting(server.address) as client:
            first = asyncio.ensure_future(client.act(vector(0.2)))
            await asyncio.sleep(0)
            with pytest.raises(PolicyError, match="another call waits"):
                await client.act(vector(-1))
            assert (await first).seq == 1


async def test_a_session_that_is_silent_delays_the_others_by_the_wait_and_no_more() -> None:
    wait_us = 30_000
    async with policy_server(max_wait_us=wait_us) as server:
        async with acting(server.address), acting(server.address) as client:
            waits = []
            for _ in range(5):
                await client.act(env_ret())
                assert client.times is not None
                waits.append(client.times.batch_wait_ns / 1000)
            assert min(waits) >= 0.9 * wait_us
            assert np.median(waits) <= 2 * wait_us


async def test_a_session_that_reads_slowly_delays_nobody() -> None:
    async with policy_server(type=LARGE) as server, FaultProxy(server.address) as proxy:
        async with acting(proxy.address) as slow, acting(server.address) as quick:
            proxy.bytes_per_s = 2**20
            large = np.zeros((1, 4), np.float32)
            large[0, 1] = 2**19
            asked = asyncio.ensure_future(slow.act(EnvRet("env", large)))
            await assert_eventually(lambda: server.stats.requests == 1)
            for _ in range(20):
                await quick.act(vector(-1))
            assert not asked.done()  # 8 MB take it 8 s
            proxy.bytes_per_s = None
            assert (await asked).big.shape == (1, 2**21)


async def test_past_the_queue_requests_are_refused_and_the_session_lives_on() -> None:
    async with policy_server(queue_rows=4) as server, acting(server.address, 8) as client:
        with pytest.raises(ResourceExhaustedError, match="policy.queue_rows = 4"):
            await client.act(env_ret(8))
        assert (await client.act(env_ret(4))).action.shape == (4,)


async def test_a_late_answer_never_reaches_a_newer_observation() -> None:
    async with policy_server(**SLOW) as server:
        async with acting(server.address, act_timeout_s=0.1) as client:
            with pytest.raises(DeadlineExceededError, match="no answer to request 1 within 0.1 s"):
                await client.act(vector(0.4))
            client._act_timeout_s = 10
            response = await client.act(vector(-7))
            assert (response.seq, response.action.tolist()) == (2, [-7])


async def test_what_nobody_waits_for_any_more_is_not_inferred() -> None:
    async with policy_server(**SLOW) as server:
        async with (
            acting(server.address, client_id="slow") as slow,
            acting(server.address, client_id="hasty", act_timeout_s=0.1) as hasty,
        ):
            blocking = asyncio.ensure_future(slow.act(vector(0.5)))
            await assert_eventually(lambda: server.service._hosts.default.batcher._busy)
            with pytest.raises(DeadlineExceededError):
                await hasty.act(vector(-1))
            await blocking
            await assert_eventually(lambda: server.stats.expired == 1)
            assert server.stats.requests == 1


async def test_what_fails_while_a_server_drains_is_told_to_who_asked_alone() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    async with policy_server(**SLOW) as server:
        batcher = server.service._hosts.default.batcher
        async with (
            acting(server.address, client_id="slow") as slow,
            acting(server.address, client_id="wrong") as wrong,
        ):
            blocking = asyncio.ensure_future(slow.act(vector(1)))
            await assert_eventually(lambda: batcher._busy)
            failing = asyncio.ensure_future(wrong.act(vector(101)))
            await assert_eventually(lambda: batcher.queued_rows == 1)
            await server.service.drain(30)
            assert server.stats.errors == 1
            with pytest.raises(RemoteError, match="on fire"):
                await failing
            await blocking
    gc.collect()
    assert told == []


async def test_an_inference_longer_than_the_lease_ends_no_session() -> None:
    rpc = RpcConfig(heartbeat_s=0.1, lease_s=0.5)
    async with policy_server(**SLOW, rpc=rpc) as server:
        async with acting(server.address, rpc=rpc) as client:
            assert (await client.act(vector(1.5))).seq == 1
            assert client._session is not None
            assert client._session.epoch == 1


async def test_a_repeated_request_is_answered_from_what_was_kept() -> None:
    async with policy_server() as server, acting(server.address, 4) as client:
        first = await client.act(env_ret(4))
        session = client._session
        assert session is not None
        again: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asked: list[Any] = []
        encode = client._encode

        def keep(*args: Any) -> bytes:
            asked.append(args[1])
            return encode(*args)

        client._encode = keep  # type: ignore[method-assign]
        second = await client.act(env_ret(4))
        ask = asked[0]
        ask.answer = again
        client._ask = ask
        await session.send(encode(session, ask))
        repeated = await asyncio.wait_for(again, 30)
        assert repeated.seq == second.seq == 2
        for name in ("action", "log_prob", "value"):
            np.testing.assert_array_equal(getattr(repeated, name), getattr(second, name))
        assert server.stats.requests == 2
        ask.seq = first.seq
        ask.answer = asyncio.get_running_loop().create_future()
        await session.send(encode(session, ask))
        with pytest.raises(PreconditionError, match="request 1 came after 2"):
            await asyncio.wait_for(ask.answer, 30)


async def test_a_fresh_recurrent_state_changes_nothing_where_none_is_kept() -> None:
    async with policy_server() as server, acting(server.address, 4) as client:
        first = await client.act(env_ret(4), mode=Mode.EXPLOIT)
        fresh = await client.act(env_ret(4), mode=Mode.EXPLOIT, reset_state=True)
        np.testing.assert_array_equal(fresh.value, first.value)


async def test_a_state_that_a_client_carries_is_refused_and_the_session_lives_on() -> None:
    async with policy_server() as server, acting(server.address) as client:
        encode = client._encode
        carried = pb.ActRequest(step=pb.ActStep(state=Value(int_value=1))).SerializeToString()
        # Fields that come twice are merged.
        client._encode = lambda *args: encode(*args) + carried  # type: ignore[method-assign]
        with pytest.raises(InvalidRequestError, match="state: .* this server's policy has none"):
            await client.act(env_ret())
        client._encode = encode  # type: ignore[method-assign]
        assert (await client.act(env_ret())).seq == 2
        assert server.stats.requests == 1


async def test_a_space_without_a_bound_is_refused_with_its_path() -> None:
    space = gym.spaces.Dict({"arm": VECTOR, "say": gym.spaces.Text(9)})
    async with policy_server(type="tests.unit.policy.policies:Echo") as server:
        with pytest.raises(InvalidRequestError, match=r"observation_space\['say'\].* max_bytes"):
            async with acting(server.address, spec=spec(1, space)):
                pass
        space["say"].max_bytes = 36  # type: ignore[attr-defined]
        async with acting(server.address, spec=spec(1, space)) as client:
            assert client._session is not None
            cap = 2 * (16 + 36) + 8 + RpcConfig().info_budget_bytes
            assert client._session._stream.cap == cap  # type: ignore[union-attr]


async def test_a_cut_connection_is_resumed_and_the_request_answered_once() -> None:
    async with policy_server(**SLOW) as server, FaultProxy(server.address) as proxy:
        async with acting(proxy.address) as client:
            await client.act(vector(-1))
            waiting = asyncio.ensure_future(client.act(vector(0.3)))
            await assert_eventually(lambda: server.service._hosts.default.batcher._busy)
            proxy.reset()
            response = await asyncio.wait_for(waiting, 30)
            assert response.action.tolist() == [pytest.approx(0.3)]
            assert client._session is not None
            assert (client._session.epoch, client._session.resumed) == (2, True)
            assert server.stats.requests == 2
            assert server.service._hosts.default.batcher.groups == 1


async def test_large_observations_pass_and_larger_ones_name_cap_and_key() -> None:
    for mb in (6, 64):
        space = gym.spaces.Box(0, 255, (mb, 2**20), np.uint8)
        async with policy_server(type=LARGE) as server:
            async with acting(server.address, spec=spec(1, space)) as client:
                observation = np.zeros((1, mb, 2**20), np.uint8)
                observation[0, 0, 0] = mb
                response = await client.act(EnvRet("env", observation))
                assert response.action.tolist() == [mb]
                with pytest.raises(
                    ResourceExhaustedError,
                    match=r"message of \d+ bytes passes the .*cap of \d+ bytes",
                ) as caught:
                    await client.act(EnvRet("env", np.zeros((3, mb, 2**20), np.uint8)))
                assert "services.policy.rpc." in str(caught.value)
                await client.act(EnvRet("env", observation))


async def test_an_answer_past_the_cap_is_an_error_and_the_session_lives_on() -> None:
    rpc = RpcConfig(max_message_bytes=4 * 2**20)
    async with policy_server(type=LARGE, rpc=rpc) as server, acting(server.address) as client:
        small, large = np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32)
        large[0, 1] = 2**20
        with pytest.raises(ResourceExhaustedError, match="passes the cap of 4194304 bytes"):
            await client.act(EnvRet("env", large))
        await client.act(EnvRet("env", small))


async def test_the_stages_of_an_answer_add_up_to_its_round_trip() -> None:
    async with policy_server() as server, acting(server.address, 8) as client:
        for _ in range(20):
            await client.act(env_ret(8))
            times = client.times
            assert times is not None
            assert times.ways is not None
            parts = (
                times.encoded_ns - times.begun_ns,
                times.ways.uplink_s * 1e9,
                times.queue_ns,
                times.batch_wait_ns,
                times.inference_ns,
                times.answer_ns,
                times.ways.downlink_s * 1e9,
                times.done_ns - times.heard_ns,
            )
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(times.done_ns - times.begun_ns, abs=10)
        for stage in list(STAGES)[:8]:
            assert client.stats[stage].count == 20
        assert client.one_way_unknown == 0
        assert client.offset.same_clock


async def test_ways_are_unknown_only_while_the_offset_is() -> None:
    async with policy_server() as server, acting(server.address, 8) as client:

        async def ask() -> tuple[int, dict[str, int]]:
            await client.act(env_ret(8))
            counts = {name: client.stats[name].count for name in ("uplink", "downlink", "act")}
            assert (client.times.ways is None) is math.isnan(client.offset.bounds(0)[0])
            return client.one_way_unknown, counts

        assert await ask() == (0, {"uplink": 1, "downlink": 1, "act": 1})
        bounds = client.offset.bounds
        client.offset.bounds = lambda now_ns: (math.nan, math.nan)  # another epoch, say
        assert await ask() == (1, {"uplink": 1, "downlink": 1, "act": 2})
        client.offset.bounds = bounds
        assert await ask() == (1, {"uplink": 2, "downlink": 2, "act": 3})


async def test_an_answer_says_when_it_left_the_policy_server() -> None:
    async with policy_server() as server, acting(server.address, 8) as client:
        response = await client.act(env_ret(8))
        times, taken = client.times, response.corrected_latency()
        assert times is not None
        assert times.ways is not None
        assert taken == (pytest.approx(taken[0]), times.ways.uncertainty_s)
        at_least = times.ways.downlink_s + (times.done_ns - times.heard_ns) * 1e-9
        assert at_least - 1e-8 <= taken[0] < 60
        client.offset.bounds = lambda now_ns: (math.nan, math.nan)  # another epoch, say
        assert (await client.act(env_ret(8))).corrected_latency() is None


async def test_probes_are_answered_while_50_mb_come() -> None:
    """The loop decodes them without a copy: a probe waits for none of them."""
    space = gym.spaces.Box(0, 255, (2**22,), np.uint8)
    big = EnvRet("env", np.zeros((12, 2**22), np.uint8))
    meant = spec(12, space)
    meant.action_space = gym.spaces.Box(0, 255, (), np.uint8)
    async with policy_server(type=AWKWARD) as server:
        async with acting(server.address, spec=meant) as client:
            asking = asyncio.ensure_future(client.act(big))
            waits = []
            while not asking.done():
                begun = time.monotonic()
                assert await check(server.address, timeout_s=10) is ServingStatus.SERVING
                waits.append(time.monotonic() - begun)
            assert (await asking).action.shape == (12,)
            assert np.median(waits) <= 0.2  # twice what is promised, for slow machines


def test_the_robot_example_acts_in_the_base_install() -> None:
    example = ROOT / "examples" / "inference_only" / "robot.py"
    code = (
        "import runpy, sys; sys.modules |= dict.fromkeys(('torch', 'tensordict', 'safetensors')); "
        f"sys.argv = ['robot.py', sys.argv[1], '40']; runpy.run_path({str(example)!r})"
    )

    async def serve_it() -> subprocess.CompletedProcess[str]:
        async with policy_server() as server:
            async with PolicyClient(server.address) as learner:
                await learner.publish_weights(3, weights())
            command = [sys.executable, "-c", code, server.address]
            run = partial(
                subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
            )
            return await asyncio.to_thread(run)

    done = asyncio.run(serve_it())
    assert done.returncode == 0, done.stderr
    assert re.search(r"^return \d+, policy version 3$", done.stdout, re.MULTILINE)
