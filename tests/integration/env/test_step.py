"""Drivers that reset and step the envs of an env server, on real servers and real sockets."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from rlightning.env.remote_client import EnvClient
from rlightning.env.step_client import StepClient
from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RemoteError,
    UnavailableError,
)
from rlightning.rpc.channel import connect
from rlightning.rpc.server import serve
from rlightning.services.env_server.servicer import EnvService
from rlightning.testing import FaultProxy, assert_eventually, free_address
from rlightning.types import PolicyResponse
from rlightning.utils.config import ListenConfig, MainConfig, RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_policy_response, read_env_ret
from tests.integration.env.attaching import TenSteps, attached
from tests.integration.pairing.env import Counting

pytestmark = pytest.mark.timeout(60)

FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0, reconnect_initial_ms=10)
COUNT = {
    "name": "count",
    "backend": "gymnasium",
    "task": "tests.integration.pairing.env:Counting",
    "driver": "external",
}
NOWHERE = {"policy": {"address": "127.0.0.1:1"}, "buffer": {"address": "127.0.0.1:1"}}
PATIENCE_S = 20.0


class Server:
    """An env server in this loop; may be stopped and started again."""

    def __init__(self, env, services):
        sections = {**NOWHERE, "env": services}
        self.config = MainConfig.from_dict({"env": env, "services": sections})
        self.config.services.env.rpc = FAST
        self.address = free_address()

    async def start(self):
        self.service = EnvService(self.config)
        listen = [ListenConfig(address=self.address)]
        self.server = await serve(self.service, listen=listen, rpc=FAST)
        await self.server.ready()

    async def stop(self):
        await self.server.stop(grace_s=3)


@asynccontextmanager
async def env_server(*env, **services):
    server = Server(list(env), services)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def answer_to(env_ret, env_id=None):
    """The action that is right for a counting env's observation."""
    return PolicyResponse(env_id or env_ret.env_id, action=env_ret.observation[:, :3])


class Walker:
    """Steps one counting env, and checks that each step happened once."""

    def __init__(self, client, env_id):
        self.client, self.env_id, self.steps = client, env_id, 0

    async def walk(self, count):
        env_ret = await self.client.reset(self.env_id)
        for _ in range(count):
            _, episode, step, wrong = env_ret.observation[0]
            env_ret = await self.client.step(answer_to(env_ret))
            self.steps += 1
            ended = bool(env_ret.last_terminated[0] or env_ret.last_truncated[0])
            expected = (episode + 1, 0) if ended else (episode, step + 1)
            assert tuple(env_ret.observation[0, 1:3]) == expected
            assert env_ret.observation[0, 3] == wrong == 0
            if ended:
                final = env_ret.info["final_observation"][0]
                assert tuple(final[1:3]) == (episode, step + 1)


async def test_cuts_repeat_and_lose_no_step():
    async with env_server({**COUNT, "num_workers": 3}) as server, AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy(server.address))
        client = await stack.enter_async_context(StepClient(proxy.address, rpc=FAST))
        walkers = [Walker(client, f"count-{n}-0") for n in range(3)]
        walks = asyncio.gather(*(walker.walk(400) for walker in walkers))
        while not walks.done():
            proxy.cut()
            await asyncio.sleep(0.1)
        await walks
        assert client._session.epoch > 2
        assert [group.env_steps for group in server.service._groups] == [400] * 3


async def test_a_restarted_server_ends_the_steps_that_wait():
    slow = {**COUNT, "task": "tests.integration.env.test_step:Slow"}
    async with env_server(slow) as server, StepClient(server.address, rpc=FAST) as client:
        first = await client.reset("count-0-0")
        stepping = asyncio.create_task(client.step(answer_to(first)))
        await asyncio.sleep(0.1)
        server.service._driven.drain = lambda: asyncio.sleep(0)  # as if it had been killed
        await server.stop()
        await server.start()
        with pytest.raises(PreconditionError, match="begin anew") as raised:
            await stepping
        assert raised.value.reason == "STATE_LOST"
        with pytest.raises(PreconditionError, match="reset it before"):
            await client.step(answer_to(first))
        await Walker(client, "count-0-0").walk(3)


class Slow(Counting):
    """Takes its time over the first step."""

    def step(self, action):
        import time

        if self._state[1] == 0 and self._state[2] == 0:
            time.sleep(0.6)
        return super().step(action)


class RawDriver:
    """A Step stream message by message, for what a `StepClient` would never do."""

    def __init__(self, call):
        self.call = call

    async def hello(self):
        request = pb.StepRequest()
        request.hello.protocol_version = 1
        request.hello.client_id = "raw"
        await self.call.write(request.SerializeToString())
        self.epoch = (await self.read()).message.welcome.epoch

    async def send(self, seq, *, reset=(), step=(), claim=()):
        request, writer = pb.StepRequest(), Writer()
        command = request.command
        command.seq, command.epoch, command.autoreset = seq, self.epoch, True
        command.reset_env_ids.extend(reset)
        command.claim_env_ids.extend(claim)
        for response in step:
            fill_policy_response(command.responses.add(), response, writer)
        await self.call.write(writer.finish(request))

    async def read(self):
        return Reader(pb.StepResponse, await asyncio.wait_for(self.call.read(), 20))

    async def answer(self):
        reader = await self.read()
        answer = reader.message.answer
        return answer, [read_env_ret(one, reader) for one in answer.env_rets]


@asynccontextmanager
async def raw_driver(server):
    async with connect(server.address, rpc=FAST) as channel:
        driver = RawDriver(channel.stream_stream("/rlightning.v1.EnvService/Step")())
        await driver.hello()
        yield driver
        driver.call.cancel()


async def test_a_command_that_comes_twice_is_executed_once():
    async with env_server(COUNT) as server, raw_driver(server) as driver:
        await driver.send(1, reset=["count-0-0"])
        _, (env_ret,) = await driver.answer()
        for seq in range(2, 12):
            step = [answer_to(env_ret)]
            await driver.send(seq, step=step)
            first = await driver.answer()
            await driver.send(seq, step=step)
            again = await driver.answer()
            assert first[0].seq == again[0].seq == seq
            np.testing.assert_array_equal(first[1][0].observation, again[1][0].observation)
            env_ret = first[1][0]
        assert env_ret.observation[0, 3] == 0
        assert server.service._groups[0].env_steps == 10
        # What was answered long ago is not kept, and not executed either.
        await driver.send(3, step=step)
        await driver.send(12, claim=["count-0-0"])
        assert (await driver.answer())[0].seq == 12
        assert server.service._groups[0].env_steps == 10


async def test_what_is_kept_of_commands_is_bounded():
    async with env_server(COUNT) as server, raw_driver(server) as driver:
        # Executed: only its answer is kept, not what was to be executed.
        action = np.zeros((1, 2**21), np.uint8)
        for seq in range(1, 50):
            await driver.send(seq, step=[PolicyResponse(f"nobody-{seq}", action=action)])
            assert "no env" in (await driver.answer())[0].error.message
        (state,) = [one.state for one in server.service._drivers.sessions]
        assert len(state.kept) == 49
        assert sum(one.nbytes for one in state.kept.values()) < 1000
        assert not any(one.responses for one in state.kept.values())
    async with env_server({**COUNT, "num_workers": 1}, min_clients=9) as server:
        async with raw_driver(server) as driver:  # none is executed before there are nine
            for seq in range(1, 33):  # 31 of them take less than 64 MiB
                await driver.send(seq, step=[PolicyResponse(f"nobody-{seq}", action=action)])
            code = await asyncio.wait_for(driver.call.code(), 20)
            assert code.name == "RESOURCE_EXHAUSTED"


async def test_one_command_for_several_envs():
    envs = {**COUNT, "num_workers": 2}
    broken = {**COUNT, "name": "bad", "task": "tests.unit.env.envs:AlwaysBreaking"}
    async with env_server(envs, broken) as server, raw_driver(server) as driver:
        ids = ["count-0-0", "count-1-0", "bad-0-0"]
        await driver.send(1, reset=ids)
        answer, env_rets = await driver.answer()
        assert [one.env_id for one in env_rets] == ids
        assert not answer.HasField("error")
        bad = PolicyResponse("bad-0-0", action=np.zeros((1, 1), np.float32))
        await driver.send(2, reset=ids[1:2], step=[answer_to(env_rets[0]), bad])
        answer, returned = await driver.answer()
        assert "the arm fell off" in answer.error.message
        assert [one.env_id for one in returned] == ["count-1-0", "count-0-0"]
        assert returned[1].observation[0, 3] == 0
        # One that cannot be executed as a whole is not executed in part.
        for seq, kwargs, message in [
            (3, {"step": [answer_to(returned[1]), answer_to(returned[1])]}, "twice"),
            (4, {"step": [answer_to(returned[1])], "claim": ["nobody"]}, "no env 'nobody'"),
        ]:
            await driver.send(seq, **kwargs)
            answer, returned_now = await driver.answer()
            assert message in answer.error.message
            assert returned_now == []
        assert server.service._groups[0].env_steps == 1


@pytest.mark.parametrize("what", ["epoch", "number", "body", "options"])
async def test_bad_commands_end_the_session_and_nothing_else(what):
    async with env_server(COUNT) as server, raw_driver(server) as driver:
        driver.epoch += what == "epoch"
        if what == "body":
            await driver.call.write(pb.StepRequest().SerializeToString())
        elif what == "options":
            request = pb.StepRequest()
            request.command.seq, request.command.epoch = 1, driver.epoch
            request.command.options.int_value = 3
            await driver.call.write(request.SerializeToString())
        else:
            await driver.send(0 if what == "number" else 1, reset=["count-0-0"])
        code = await asyncio.wait_for(driver.call.code(), 20)
        assert code.name == ("FAILED_PRECONDITION" if what == "epoch" else "INVALID_ARGUMENT")
        async with StepClient(server.address) as client:
            await Walker(client, "count-0-0").walk(3)


async def test_where_actors_step_a_driver_hears_which_key_to_set():
    acted = {**COUNT, "driver": "actor", "name": "acted"}
    async with env_server(acted) as server:
        client = StepClient(server.address)
        with pytest.raises(PreconditionError, match=r"set env\[\].driver, or services.env.att"):
            await client.start()
        await client.close()
    async with env_server(acted, COUNT) as server, StepClient(server.address) as client:
        with pytest.raises(PreconditionError, match=r"steps env 'acted-0-0': set env\[\].driver"):
            await client.reset("acted-0-0")
        with pytest.raises(NotFoundError, match="no env 'other'"):
            await client.claim(["other"])
        async with EnvClient(server.address) as describer:
            status = await describer.describe()
            assert status.external_env_ids == ["count-0-0"]
            assert status.stats["groups"] == 1  # those with an actor
        with pytest.raises(PreconditionError, match="reset it before the first step"):
            await client.step(PolicyResponse("count-0-0", action=np.zeros((1, 3), np.int64)))
        await Walker(client, "count-0-0").walk(5)
        await check_when_it_left(client, "count-0-0")


async def check_when_it_left(client, env_id):
    """What an env server sends says when it left, as far as its clock is known."""
    begun_ns = time.monotonic_ns()
    env_ret = await client.reset(env_id)
    env_ret.ts_env_sent_ns = 2**62  # a wall clock that is far ahead
    taken_s, within_s = env_ret.corrected_latency()
    assert within_s == 0.0  # both read one clock
    assert 0 < taken_s < (time.monotonic_ns() - begun_ns) * 1e-9
    offset = client._session.offset
    for lower_ns, upper_ns in ((-(10**9), 10**9), (math.nan, math.nan)):
        offset.bounds = lambda now_ns, bounds=(lower_ns, upper_ns): bounds
        begun_ns = time.monotonic_ns()
        left = (await client.step(answer_to(env_ret))).corrected_latency()
        past_s = (time.monotonic_ns() - begun_ns) * 1e-9
        if math.isnan(lower_ns):
            assert left is None
        else:
            assert left is not None
            assert 0.5 <= left[1] <= 1.0  # nothing arrives before it was sent
            assert left[0] - left[1] <= past_s
    del offset.bounds


async def test_who_drives_an_env_keeps_it_until_the_lease_ends():
    async with env_server(COUNT) as server, AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy(server.address))
        first = await stack.enter_async_context(StepClient(proxy.address, rpc=FAST))
        second = await stack.enter_async_context(StepClient(server.address, rpc=FAST))
        env_ret = await first.reset("count-0-0")
        with pytest.raises(AlreadyExistsError, match="is driven by client driver-"):
            await second.reset("count-0-0")
        await proxy.refuse()
        proxy.cut()
        with pytest.raises(AlreadyExistsError):
            await second.reset("count-0-0")

        async def free():
            try:
                await second.reset("count-0-0")
            except AlreadyExistsError:
                return False
            return True

        await assert_eventually(free, PATIENCE_S)
        proxy.restore()
        await proxy.start()
        with pytest.raises(AlreadyExistsError, match="is driven by"):
            await first.step(answer_to(env_ret))
        await second.close()
        await Walker(first, "count-0-0").walk(3)


class Held(Counting):
    """Steps when it may."""

    gate = threading.Event()

    def step(self, action):
        assert self.gate.wait(30)
        return super().step(action)


async def test_who_comes_back_to_a_step_whose_env_was_taken_over_is_told():
    held = {**COUNT, "task": "tests.integration.env.test_step:Held"}
    Held.gate.clear()
    async with env_server(held) as server, AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy(server.address))
        first = await stack.enter_async_context(StepClient(proxy.address, rpc=FAST))
        second = await stack.enter_async_context(StepClient(server.address, rpc=FAST))
        stack.callback(Held.gate.set)
        stepping = asyncio.create_task(first.step(answer_to(await first.reset("count-0-0"))))
        holder = server.service._driven._holders["count-0-0"]
        await assert_eventually(lambda: holder.busy, PATIENCE_S)
        await proxy.refuse()
        proxy.cut()

        async def taken():
            try:
                await second.claim(["count-0-0"])
            except AlreadyExistsError:
                return False
            return True

        await assert_eventually(taken, PATIENCE_S)
        proxy.restore()
        await proxy.start()
        with pytest.raises(PreconditionError, match="another client has taken over") as raised:
            await wait_within(stepping, PATIENCE_S)
        assert raised.value.reason == "STATE_LOST"


async def test_a_connection_that_does_not_come_back_is_given_up():
    async with env_server(COUNT) as server, AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy(server.address))
        client = StepClient(proxy.address, rpc=FAST, reconnect_timeout_s=0.5)
        await stack.enter_async_context(client)
        env_ret = await client.reset("count-0-0")
        await proxy.refuse()
        proxy.cut()
        with pytest.raises(UnavailableError, match="no connection for 0.5 s"):
            await client.step(answer_to(env_ret))


async def test_a_step_that_takes_too_long_is_given_up():
    slow = {**COUNT, "task": "tests.integration.env.test_step:Slow"}
    async with env_server(slow) as server:
        async with StepClient(server.address, answer_timeout_s=0.2) as client:
            env_ret = await client.reset("count-0-0")
            with pytest.raises(DeadlineExceededError, match="not done within 0.2 s"):
                await client.step(answer_to(env_ret))
            with pytest.raises(PreconditionError, match="still executes"):
                await client.step(answer_to(env_ret))


async def test_a_driver_steps_the_env_of_a_client():
    server = Server([], {"attached_driver": "external", "min_clients": 1})
    await server.start()
    try:
        async with StepClient(server.address, rpc=FAST) as client:
            waiting = asyncio.create_task(client.wait_for_clients())
            await asyncio.sleep(0.2)
            assert not waiting.done()
            async with attached(server.address, Counting()) as robot:
                await asyncio.wait_for(waiting, 30)
                assert (await client.describe()).external_env_ids == ["attached/robot"]
                with pytest.raises(PreconditionError, match="takes no seed"):
                    await client.reset("attached/robot", seed=1)
                await Walker(client, "attached/robot").walk(50)
                async with StepClient(server.address, rpc=FAST) as other:
                    with pytest.raises(AlreadyExistsError):
                        await other.claim(["attached/robot"])
                env_ret = await client.reset("attached/robot")
                assert not env_ret.last_reward.any()
            async with StepClient(server.address, rpc=FAST) as first:
                async with attached(server.address, Counting()) as robot:
                    await assert_eventually(lambda: robot.status.state == "running", PATIENCE_S)
                    await Walker(first, "attached/robot").walk(20)
                    await first.close()
                    # Who takes over begins where the env stands.
                    await Walker(client, "attached/robot").walk(20)
                    assert robot.status.steps == 40
            assert robot.outcome == [None]
            async with attached(server.address, Counting(), name="ten", kind=TenSteps) as robot:
                await assert_eventually(lambda: robot.status.state == "running", PATIENCE_S)
                # The outcome of the last step comes, too, though it wants no answer.
                await Walker(client, "attached/ten").walk(10)
                with pytest.raises(RemoteError, match="ten"):
                    await client.step(PolicyResponse("attached/ten", action=np.zeros((1, 3))))
            assert robot.outcome == [None]
    finally:
        await server.stop()


async def test_clients_that_do_not_come_end_the_server():
    server = Server([], {"min_clients": 2, "clients_timeout_s": 0.4})
    await server.start()
    try:
        await assert_eventually(server.service.failure.done, PATIENCE_S)
        error = server.service.failure.exception()
        assert "0 of 2 clients attached within 0.4 s (services.env.min_clients)" in str(error)
    finally:
        await server.stop()


async def test_a_client_named_like_a_hosted_env_and_one_without_a_policy():
    async with env_server(COUNT, attached_driver="external") as server:
        async with attached(server.address, Counting(), name="count-0-0") as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], PreconditionError)
            assert "is that of a hosted env" in str(client.outcome[0])
    server = Server([COUNT], {})
    server.config.services.policy.address = None
    await server.start()
    try:
        async with attached(server.address, Counting()) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert "services.policy: no address to dial" in str(client.outcome[0])
        assert server.service._attached.groups == {}
    finally:
        await server.stop()


async def test_evaluate_cfg_of_a_driven_env():
    cart = {
        "name": "cart",
        "backend": "gymnasium",
        "task": "CartPole-v1",
        "driver": "external",
        "evaluate_cfg": {"max_episode_steps": 2},
    }
    async with env_server(cart) as server, StepClient(server.address) as client:
        async with EnvClient(server.address) as control:
            await client.reset("cart-0-0")
            await control.control(env="apply_evaluate_cfg")
            action = PolicyResponse("cart-0-0", action=np.zeros(1, np.int64))
            with pytest.raises(RemoteError, match="reset"):
                await client.step(action)
            await client.reset("cart-0-0")
            await client.step(action)
            assert (await client.step(action)).last_truncated[0]
        with pytest.raises(InvalidRequestError):
            await client.claim(["cart-0-0", "cart-0-0"])
