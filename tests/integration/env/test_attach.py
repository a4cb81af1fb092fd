"""Envs that clients attach over the network, on real servers and real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.env.remote_client import EnvClient
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.errors import (
    AlreadyExistsError,
    EnvError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.rpc.channel import connect
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.testing import FaultProxy, ServerProcess, assert_eventually, free_address
from rlightning.types import EnvMeta, EnvRet
from rlightning.utils.config import ListenConfig, MainConfig, RpcConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.v1.session_pb2 import CLIENT_STATE_RESETTING
from rlightning.wire import Reader, Writer, fill_env_meta, fill_env_ret, read_policy_response
from tests.integration.pairing.env import Counting
from tests.integration.pairing.ledger import Ledger
from tests.unit.env.envs import SlowReset

pytestmark = pytest.mark.timeout(120)

# Short enough for tests to wait for, long enough for a busy machine.
FAST = RpcConfig(heartbeat_s=0.2, lease_s=1.5, resume_window_s=5.0, reconnect_initial_ms=10)
FORGETFUL = FAST.model_copy(update={"resume_window_s": 0.3})
COUNT = {"name": "count", "backend": "gymnasium", "task": "tests.integration.pairing.env:Counting"}
CART = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 2}
ECHO = {"type": "tests.integration.pairing.policy:Echo"}
PATIENCE_S = 40.0
CLI = "from rlightning.cli import main; main()"


class Cluster:
    """The three servers in this loop; the env server may be stopped and started again."""

    def __init__(self, stack, env, policy, rpc):
        self.stack = stack
        self.config = MainConfig.from_dict(
            {
                "env": env,
                "policy": {"device": "cpu", "initial_weights": "random", **policy},
                "buffer": {
                    "type": "ReplayBuffer",
                    "capacity": 100_000,
                    "auto_truncate_episode": True,
                },
            }
        )
        for name in ("env", "policy", "buffer"):
            getattr(self.config.services, name).rpc = rpc
        self.service = None
        self.env_address = free_address()

    async def start(self):
        services = self.config.services
        for name, kind in (("policy", PolicyService), ("buffer", BufferService)):
            section = getattr(services, name)
            service = kind(self.config)
            setattr(self, name, service)
            server = await serve(service, rpc=section.rpc)
            self.stack.push_async_callback(server.stop, grace_s=5)
            await server.ready()
            section.address = server.address
        await self.start_env()
        self.client = await self.stack.enter_async_context(EnvClient(self.env_address))
        self.buffer = await self.stack.enter_async_context(
            BufferClient(services.buffer.dial_address)
        )

    async def start_env(self):
        self.service = EnvService(self.config)
        rpc = self.config.services.env.rpc
        self.env = await serve(
            self.service, listen=[ListenConfig(address=self.env_address)], rpc=rpc
        )
        self.stack.push_async_callback(self.env.stop, grace_s=5)
        await self.env.ready()

    async def rows(self, client):
        """The columns that one counting client brought."""
        columns = await self.buffer.get()
        mine = columns["observation"][:, 0] == client.given._state[0]
        return {name: column[mine] for name, column in columns.items()}

    async def env_ids(self):
        return [meta.env_id for meta in (await self.client.describe()).envs]


@asynccontextmanager
async def cluster(env=COUNT, policy=ECHO, rpc=FAST, *, min_clients=0):
    async with AsyncExitStack() as stack:
        running = Cluster(stack, env, policy, rpc)
        running.config.services.env.min_clients = min_clients
        await running.start()
        yield running


@asynccontextmanager
async def attached(address, env, name="robot", kind=RemoteEnvClient, **options):
    """Runs a client in a thread of its own; yields it and its outcome, which comes later."""
    host, _, port = address.rpartition(":")
    client = kind(env, host, int(port), name=name, rpc=FAST, **options)
    outcome = []

    def run():
        try:
            client.run()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client.outcome, client.given = outcome, getattr(env, "unwrapped", env)
    try:
        yield client
    finally:
        client.stop()
        await asyncio.to_thread(thread.join, 15)
        assert not thread.is_alive()
        client.close()


async def stepped(client, more=100):
    goal = client.status.steps + more
    await assert_eventually(
        lambda: client.outcome != [] or client.status.steps >= goal, PATIENCE_S, "no steps"
    )
    assert client.outcome == [] or client.outcome == [None], client.outcome


def check(columns, *, missing=0):
    """Asserts that every step of an env is there once, with its own answer and outcome."""
    ledger = Ledger()
    order = np.lexsort((columns["step"], columns["observation"][:, 1]))
    ledger.add({name: column[order][:, None] for name, column in columns.items()})
    assert ledger.repeated == 0
    assert ledger.missing() == missing
    return ledger


async def test_rows_of_a_client_reach_the_buffer_with_the_right_answers():
    async with cluster() as running:
        async with attached(running.env_address, Counting()) as client:
            await stepped(client, 200)
            status = await running.client.describe()
            assert "attached/robot" in [meta.env_id for meta in status.envs]
            assert status.stats["groups_attached"] == 1
            assert status.stats["sessions"]["robot"]["state"] == "running"
            assert client.status.state == "running"
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        assert client.outcome == [None]
        columns = await running.rows(client)
        ledger = check(columns)
        # The outcome of the last answer came before the client left.
        assert abs(len(ledger) - client.status.steps) <= 1
        episodes = [
            e for e in (await running.client.describe()).episodes if e.env_id == "attached/robot"
        ]
        finished = [e for e in episodes if e.reason in ("terminated", "truncated")]
        assert sum(e.length for e in finished) == client.status.steps
        assert await running.env_ids() == ["count-0-0"]


async def test_cartpole_of_several_rows():
    policy = {"model_cfg": {"hidden": [8]}}
    envs = gym.make_vec(
        "CartPole-v1",
        3,
        "sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )
    async with cluster(CART, policy) as running:
        async with attached(running.env_address, envs) as client:
            await stepped(client, 300)
            episodes = (await running.client.describe()).episodes
            mine = [e for e in episodes if e.env_id == "attached/robot"]
            assert {e.row for e in mine} == {0, 1, 2}
            assert all(e.episode_return == e.length > 0 for e in mine)


async def test_cuts_lose_invent_and_repeat_nothing():
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        async with attached(proxy.address, Counting()) as client:
            await stepped(client, 20)
            for cut in [proxy.cut, proxy.reset] * 4:
                cut()
                await asyncio.sleep(0.05)
                await stepped(client, 10)
            assert client.status.reconnects >= 4
            assert len(running.service._attached.groups) == 1
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        columns = await running.rows(client)
        check(columns)
        assert not columns["cut"][:-1].any()


async def test_a_client_goes_on_with_a_restarted_server():
    async with cluster() as running:
        async with attached(running.env_address, Counting()) as client:
            await stepped(client)
            await running.env.stop(grace_s=1)
            before = client.status.steps
            await running.start_env()
            await stepped(client)
            assert client.status.reconnects >= 1
            assert client.status.steps > before
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        columns = await running.rows(client)
        steps = {(int(e), int(s)) for e, s in columns["observation"][:, 1:3]}
        assert len(steps) == len(columns["step"])
        assert not columns["observation"][:, 3].any()
        # What was under way when the server went, and no more.
        assert client.status.steps - len(steps) <= 2


@pytest.mark.crash
async def test_a_client_outlives_a_server_that_is_killed(tmp_path):
    async with cluster() as running:
        await running.env.stop(grace_s=1)
        config = tmp_path / "config.yaml"
        rpc = FAST.model_dump(exclude_defaults=True)
        services = {
            name: {"address": getattr(running.config.services, name).address, "rpc": rpc}
            for name in ("policy", "buffer")
        }
        sections = {"env": COUNT, "services": {**services, "env": {"rpc": rpc}}}
        config.write_text(json.dumps(sections))
        command = ["-m", "rlightning.services.env_server", "--config", str(config)]
        process = ServerProcess([*command, "--listen", running.env_address], tmp_path)
        with process:
            await asyncio.to_thread(process.address)
            async with attached(running.env_address, Counting()) as client:
                await stepped(client)
                for _ in range(2):
                    process.kill()
                    process.start()
                    await stepped(client)
                assert client.status.reconnects >= 2
            process.terminate()
            assert await asyncio.to_thread(process.wait, 15) == 0
        observation = (await running.rows(client))["observation"]
        steps = {(int(e), int(s)) for e, s in observation[:, 1:3]}
        assert len(steps) == len(observation)
        assert not observation[:, 3].any()
        # What each server had not stored yet when it died: a window of messages, and no more.
        assert 0 <= client.status.steps - len(steps) <= 2 * 10


async def test_a_slow_reset_keeps_the_lease():
    async with cluster({**COUNT, "task": "tests.unit.env.envs:SlowReset"}, {}, FAST) as running:
        env = SlowReset()
        env.pause_s = 2 * FAST.lease_s
        async with attached(running.env_address, env) as client:

            async def told():
                sessions = (await running.client.describe()).stats["sessions"]
                return sessions.get("robot", {}).get("state") == "resetting"

            await assert_eventually(told, PATIENCE_S)
            env.pause_s = 1.0
            await stepped(client, 3)
            assert client.status.reconnects == 0
            (asking,) = (
                session
                for session in running.policy._registry.sessions
                if session.spec.env_id == "attached/robot"
            )
            await assert_eventually(
                lambda: asking.client_state == CLIENT_STATE_RESETTING and not asking.state.awaited,
                PATIENCE_S,
            )
            await assert_eventually(lambda: asking.state.awaited, PATIENCE_S)


async def test_an_id_that_is_taken_and_a_server_that_is_full():
    rpc = FAST.model_copy(update={"max_sessions": 1})
    async with cluster(rpc=FAST) as running:
        running.service._clients._max_sessions = rpc.max_sessions
        async with attached(running.env_address, Counting()) as client:
            await stepped(client, 10)
            for name, kind in (("robot", AlreadyExistsError), ("other", ResourceExhaustedError)):
                async with attached(
                    running.env_address, Counting(), name, connect_timeout_s=0.5
                ) as refused:
                    await assert_eventually(lambda refused=refused: refused.outcome, PATIENCE_S)
                    assert isinstance(refused.outcome[0], kind)
            await stepped(client, 10)


async def test_a_paused_cluster_withholds_answers_and_ends_nothing():
    async with cluster() as running:
        async with attached(running.env_address, Counting()) as client:
            await stepped(client, 20)
            await running.client.control("pause", env="offload")  # waits for no client
            await asyncio.sleep(0.2)
            steps = client.status.steps
            await asyncio.sleep(2 * FAST.lease_s)
            assert client.status.steps == steps
            await running.client.control("start")
            await stepped(client, 20)
            assert client.status.reconnects == 0
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        check(await running.rows(client))


async def test_a_client_names_the_policy_that_acts_in_its_env():
    """Each policy has its own spaces; what differs is told of the one that was named."""
    async with cluster(policy=ECHO | {"named": {"other": {}}}) as running:
        async with attached(running.env_address, Counting(), policy="other") as client:
            await stepped(client, 50)
            assert running.service._expected("other").env_id == "attached/robot"
            hosts = running.policy._hosts.by_name
            assert hosts["other"].batcher.stats.rows >= 50
            other = gym.make("CartPole-v1")
            async with attached(running.env_address, other, "cart", policy="other") as cart:
                await assert_eventually(lambda: cart.outcome, PATIENCE_S)
                assert "observation_space" in str(cart.outcome[0])
            async with attached(running.env_address, Counting(), "lost", policy="third") as lost:
                await assert_eventually(lambda: lost.outcome, PATIENCE_S)
                assert "no policy 'third' here, only default, other" in str(lost.outcome[0])


async def test_another_space_is_refused_with_what_differs():
    async with cluster() as running:
        async with attached(running.env_address, gym.make("CartPole-v1")) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], PreconditionError)
            assert "observation_space" in str(client.outcome[0])
        assert not running.service.failure.done()


class Breaking(Counting):
    """Raises in every fifth step; or in all of them."""

    always = False
    calls = 0

    def step(self, action):
        self.calls += 1
        if self.always or self.calls % 5 == 0:
            raise RuntimeError("the arm fell off")
        return super().step(action)


async def test_an_env_that_raises_goes_on_in_a_new_segment():
    async with cluster() as running:
        async with attached(running.env_address, Breaking()) as client:
            await stepped(client, 20)
            assert client.status.env_errors >= 3
            episodes = (await running.client.describe()).episodes
            assert any(e.reason == "cut" for e in episodes if e.env_id == "attached/robot")
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        observation = (await running.rows(client))["observation"]
        assert not observation[:, 3].any()
        async with attached(running.env_address, Breaking(), name="broken") as client:
            client.given.always = True
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], EnvError)
            assert "the arm fell off" in str(client.outcome[0])
        assert not running.service.failure.done()


class Chatty(Counting):
    """Its infos hold what cannot be sent."""

    def step(self, action):
        *outcome, _ = super().step(action)
        return (*outcome, {"simulator": object()})


async def test_an_info_that_nobody_asked_for_stays_at_home():
    async with cluster() as running:
        async with attached(running.env_address, Chatty()) as client:
            await stepped(client, 20)
            assert client.status.env_errors == 0


class RawClient:
    """An Attach stream message by message, for what a `RemoteEnvClient` would never do."""

    def __init__(self, call):
        self.call = call
        self.env = Counting()
        self.spec = EnvMeta("raw", self.env.action_space, self.env.observation_space, 1)
        self.env_ret = EnvRet("raw", self.env.reset()[0][None])

    async def hello(self, *, spec=None, cameras=(), **fields):
        writer, request = Writer(), pb.AttachRequest()
        request.hello.cameras.extend(cameras)
        request.hello.session.protocol_version = 1
        request.hello.session.client_id = "raw"
        request.hello.last_seq = fields.pop("last_seq", 0)
        fill_env_meta(request.hello.session.spec, spec or self.spec, writer)
        await self.call.write(writer.finish(request))
        self.epoch = (await self.read()).message.welcome.epoch

    async def send(self, *steps, **fields):
        writer, request = Writer(), pb.AttachRequest()
        request.steps.epoch = self.epoch
        for seq, wants_action in steps:
            step = request.steps.steps.add(seq=seq, wants_action=wants_action, **fields)
            fill_env_ret(step.env_ret, self.env_ret, writer)
        await self.call.write(writer.finish(request))

    async def read(self):
        return Reader(pb.AttachResponse, await asyncio.wait_for(self.call.read(), 20))

    async def answer(self):
        reader = await self.read()
        answer = reader.message.answer
        return answer.seq, read_policy_response(answer.response, reader)

    def step(self, response):
        outcome = self.env.step(np.asarray(response.action)[0])
        observation, reward, terminated, truncated, _ = outcome
        flags = [reward, terminated, truncated]
        final = {}
        if terminated or truncated:
            final = {"final_rows": np.zeros(1, np.int32), "final_observation": observation[None]}
            observation = self.env.reset()[0]
        self.env_ret = EnvRet("raw", observation[None], *map(np.atleast_1d, flags), final)


@asynccontextmanager
async def raw_client(running, **fields):
    async with connect(running.env_address, rpc=FAST) as channel:
        call = channel.stream_stream("/rlightning.v1.EnvService/Attach")()
        client = RawClient(call)
        await client.hello(**fields)
        yield client
        call.cancel()


async def test_a_step_that_comes_twice_is_taken_once():
    async with cluster() as running, raw_client(running, last_seq=7) as client:
        # A client that was cut off from another server sends the step that waits, under its number.
        seq = 7
        await client.send((seq, True))
        for _ in range(20):
            first = await client.answer()
            await client.send((seq, True))
            again = await client.answer()
            assert first[0] == again[0] == seq
            np.testing.assert_array_equal(first[1].action, again[1].action)
            np.testing.assert_array_equal(first[1].action, client.env_ret.observation[:, :3])
            client.step(first[1])
            seq += 1
            await client.send((seq, True))
        assert (await client.answer())[0] == seq
        assert running.service._attached.env_steps == 20
        # Steps that want no action are stored, and not answered.
        await client.send((seq + 1, False), (seq + 2, False), (seq + 3, True))
        assert (await client.answer())[0] == seq + 3
        assert running.service._attached.env_steps == 23


@pytest.mark.parametrize("what", ["gap", "shape", "epoch", "nan", "inf", "text", "ragged"])
async def test_bad_steps_end_the_session_and_nothing_else(what):
    async with cluster() as running, raw_client(running) as client:
        await client.send((1, True))
        await client.answer()
        if what == "shape":
            client.env_ret = EnvRet("raw", np.zeros((1, 3), np.int64))
        rewards = {"inf": np.full(1, 1e308), "text": "1.0", "ragged": [1.0, [2.0, 3.0]]}
        client.env_ret.last_reward = rewards.get(what, 0.0)
        if what == "nan":
            client.env_ret.observation = client.env_ret.observation * np.float32("nan")
        client.epoch += what == "epoch"
        await client.send((5 if what == "gap" else 2, True))
        codes = {"epoch": "FAILED_PRECONDITION"}
        code = await asyncio.wait_for(client.call.code(), 20)
        assert code.name == codes.get(what, "INVALID_ARGUMENT")

        async def gone():
            return await running.env_ids() == ["count-0-0"]

        await assert_eventually(gone, PATIENCE_S)
        assert not running.service.failure.done()


async def test_nonsense_about_dropped_steps_does_not_spoil_the_stats_of_all():
    async with cluster() as running, raw_client(running) as client:
        for seq in range(1, 4):
            await client.send((seq, True), dropped=2**63 - 1)
            await client.answer()
        async with EnvClient(running.env_address, rpc=FAST) as asking:
            assert (await asking.describe()).stats["steps_dropped"] >= 2**40
        await client.send((4, True), dropped=-1)
        code = await asyncio.wait_for(client.call.code(), 20)
        assert code.name == "INVALID_ARGUMENT"


class TenSteps(RemoteEnvClient):
    """Stops after ten steps."""

    def is_finish(self):
        return self.status.steps >= 10


async def test_a_client_that_has_finished_leaves_its_last_outcome():
    async with cluster() as running:
        async with attached(running.env_address, Counting(), kind=TenSteps) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert client.outcome == [None]
            await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
            assert len(check(await running.rows(client))) == 10
            assert running.service._attached.groups == {}


SCRIPT = """
from rlightning.env.remote_env import RemoteEnvClient
from tests.integration.pairing.env import Counting
import sys
assert "torch" not in sys.modules
RemoteEnvClient(Counting(), "127.0.0.1", {port}, name="{name}").run()
"""


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_the_slot_of_a_client_that_is_gone_is_free_after_its_lease(tmp_path, how):
    async with cluster(rpc=FORGETFUL) as running:
        port = running.env_address.rpartition(":")[2]
        script = SCRIPT.format(port=port, name="robot")
        process = ServerProcess(["-c", script], tmp_path, announces=False)
        with ExitStack() as stack:
            stack.enter_context(process)
            group = "attached/robot"

            async def acting():
                assert process.child.poll() is None, process.log
                episodes = (await running.client.describe()).episodes
                return any(e.env_id == group for e in episodes)

            await assert_eventually(acting, PATIENCE_S)
            getattr(process, how)()
            begin = time.monotonic()
            hosted = running.service._groups[0].env_steps

            async def free():
                return group not in await running.env_ids()

            await assert_eventually(free, PATIENCE_S)
            assert time.monotonic() - begin < FORGETFUL.lease_s + 3
            assert running.service._groups[0].env_steps > hosted
            assert not running.service.failure.done()
            if how == "freeze":
                process.thaw()
                await assert_eventually(
                    lambda: group in [g.env_id for g in running.service._attached.groups.values()],
                    PATIENCE_S,
                    process.log,
                )


@pytest.mark.parametrize("what", ["tests.integration.pairing.env:Counting", "gymnasium"])
async def test_the_command_attaches_until_ctrl_c(tmp_path, what):
    cart = what == "gymnasium"
    env, policy = (CART, {"model_cfg": {"hidden": [8]}}) if cart else (COUNT, ECHO)
    async with cluster(env, policy) as running:
        command = ["-c", CLI, "attach", what, "--server", running.env_address, "--name", "robot"]
        if cart:
            command += ["--task", "CartPole-v1", "--num-envs", "2", "--set", "env.seed=1"]
        process = ServerProcess(command, tmp_path, announces=False)
        with process:

            async def acting():
                assert process.child.poll() is None, process.log
                episodes = (await running.client.describe()).episodes
                return any(e.env_id == "attached/robot" for e in episodes)

            await assert_eventually(acting, PATIENCE_S)
            process.child.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 15) == 130
            assert "Traceback" not in process.log
            named = "gymnasium CartPole-v1" if cart else what
            assert f"attaching {named} to {running.env_address} as robot" in process.log
            assert "interrupted" in process.log
        # Left in order, so that nobody waits for a lease.
        assert running.service._attached.groups == {}


async def test_ctrl_c_is_heard_while_nobody_answers(tmp_path):
    command = ["-c", CLI, "attach", "CartPole-v1", "--server", "127.0.0.1:1"]
    process = ServerProcess(command, tmp_path, announces=False)
    with process:
        await assert_eventually(lambda: "attaching" in process.log, PATIENCE_S)
        await asyncio.sleep(0.5)
        process.child.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 10) == 130


async def test_who_has_not_begun_holds_no_rollout_up():
    async with cluster() as running, raw_client(running) as client:

        async def writers():
            return (await running.buffer.describe()).tables["default"].writers

        assert set(await running.env_ids()) == {"count-0-0", "attached/raw"}
        await asyncio.sleep(0.5)
        assert await writers() == 1  # the hosted group
        await client.send((1, True))
        await client.answer()
        assert await writers() == 2


async def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    for arguments, line in [
        (["CartPol-v1", "--server", "127.0.0.1:1"], "did you mean CartPole-v"),
        (["CartPole-v1", "--server", "nowhere"], "--server: expected HOST:PORT"),
        (["ale", "--server", "127.0.0.1:1"], "--task: expected what the backend 'ale' shall make"),
        (["CartPole-v1", "--server", "127.0.0.1:1", "--name", "a/b"], "--name: expected"),
        (["CartPole-v1", "--server", "127.0.0.1:1", "--policy", "a/b"], "policy: expected a name"),
    ]:
        process = ServerProcess(["-c", CLI, "attach", *arguments], tmp_path, announces=False)
        with process:
            assert await asyncio.to_thread(process.wait, 20) == 2
            assert line in process.log.splitlines()[-1]


def test_the_client_needs_neither_torch_nor_fork(tmp_path):
    code = "import sys, rlightning.env.remote_env; print({'torch', 'uvloop'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


async def test_a_vector_env_that_sends_some_of_its_rows_at_a_time():
    envs = gym.vector.SyncVectorEnv(
        [Counting] * 3, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP
    )
    instances = [env._state[0] for env in envs.envs]
    async with cluster() as running:
        async with attached(running.env_address, envs) as client:
            await stepped(client, 150)
            # A new server may see a part of the rows first.
            await running.env.stop(grace_s=5)
            await running.start_env()
            await stepped(client, 150)
            episodes = (await running.client.describe()).episodes
            mine = [e for e in episodes if e.env_id == "attached/robot"]
            assert {e.row for e in mine} == {0, 1, 2}
            assert all(e.length <= 7 for e in mine)
        await assert_eventually(lambda: not running.service._actors._farewells, PATIENCE_S)
        assert client.outcome == [None]
        columns = await running.buffer.get()
    for instance in instances:
        mine = columns["observation"][:, 0] == instance
        part = {name: column[mine] for name, column in columns.items()}
        # Where the server was restarted, what was under way is joined to nothing.
        steps = part["observation"][:, 1:3].tolist()
        assert len(steps) > 60
        assert len({tuple(step) for step in steps}) == len(steps)
        np.testing.assert_array_equal(part["action"], part["observation"][:, :3])
        assert (part["next_observation"][:, 1] == part["observation"][:, 1]).all()
        assert (part["next_observation"][:, 2] == part["observation"][:, 2] + 1).all()
        assert not part["observation"][:, 3].any()


async def test_rows_that_a_group_does_not_have_are_refused():
    async with cluster() as running, raw_client(running) as client:
        client.env_ret.rows = np.array([1], np.int32)
        await client.send((1, True))
        assert (await client.call.code()).name == "INVALID_ARGUMENT"
        assert "rows: expected some of 1, got 1" in await client.call.details()
