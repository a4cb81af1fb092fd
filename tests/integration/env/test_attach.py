"""Envs that clients attach over the network, on real servers and real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import ExitStack

import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import EnvError
from rlightning.rpc.client_stream import ClientStream
from rlightning.testing import FaultProxy, ServerProcess, assert_eventually
from rlightning.v1.session_pb2 import CLIENT_STATE_RESETTING
from tests.integration.env.attaching import (
    CART,
    COUNT,
    ECHO,
    FAST,
    KEEPING,
    PATIENCE_S,
    TenSteps,
    attached,
    cluster,
    left,
    raw_client,
    stepped,
)
from tests.integration.pairing.env import Counting
from tests.integration.pairing.ledger import Ledger
from tests.unit.env.envs import SlowReset

pytestmark = pytest.mark.timeout(120)

FORGETFUL = FAST.model_copy(update={"resume_window_s": 0.3})


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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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


async def test_a_client_that_is_stopped_in_a_write_gives_its_place_back(monkeypatch):
    writing, begin = threading.Event(), ClientStream.__init__

    class Slow:
        """A call whose third write takes a while, and ends it if cancelled, as gRPC's do."""

        def __init__(self, call):
            self.call, self.writes = call, 0

        def __getattr__(self, name):
            return getattr(self.call, name)

        async def write(self, data):
            self.writes += 1
            if self.writes == 3:  # hello, the first step, another one
                writing.set()
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    self.call.cancel()
                    raise
            await self.call.write(data)

    def begin_slowly(stream, channel, method):
        begin(stream, channel, method)
        if method.endswith("/Attach"):
            stream.call = Slow(stream.call)

    monkeypatch.setattr(ClientStream, "__init__", begin_slowly)
    async with cluster(rpc=KEEPING) as running:
        async with attached(running.env_address, Counting()) as client:
            await assert_eventually(writing.is_set, PATIENCE_S)
            client.stop()
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert client.outcome == [None]
            await left(running)


async def test_a_client_that_has_finished_leaves_its_last_outcome():
    async with cluster(rpc=KEEPING) as running:
        async with attached(running.env_address, Counting(), kind=TenSteps) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert client.outcome == [None]
            await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
            assert len(check(await running.rows(client))) == 10
            await left(running)


SCRIPT = """
import os, sys

def audit(event, args):
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
        print("a client has begun a process:", event, args, flush=True)
        os._exit(3)

sys.addaudithook(audit)
from rlightning.env.remote_env import RemoteEnvClient
from tests.integration.pairing.env import Counting
assert not {{"torch", "uvloop"}} & set(sys.modules)
RemoteEnvClient(Counting(), "127.0.0.1", {port}, name="{name}").run()
"""


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_the_slot_of_a_client_that_is_gone_is_free_after_its_lease(tmp_path, how):
    """The client is a process that has begun no other, without torch and uvloop."""
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
            assert time.monotonic() - begin < FORGETFUL.lease_s + 15
            assert running.service._groups[0].env_steps > hosted
            assert not running.service.failure.done()
            if how == "freeze":
                process.thaw()
                await assert_eventually(
                    lambda: group in [g.env_id for g in running.service._attached.groups.values()],
                    PATIENCE_S,
                    process.log,
                )


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
        await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
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
