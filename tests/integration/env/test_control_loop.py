"""Envs that go on at a fixed rate, whatever the network does; on real servers and real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.env.remote_env import RemoteEnvClient
from rlightning.errors import ConfigError, DeadlineExceededError
from rlightning.testing import FaultProxy, ServerProcess, assert_eventually
from rlightning.types import ActionSource
from tests.integration.env.attaching import (
    CLI,
    ECHO,
    FAST,
    PATIENCE_S,
    Cluster,
    attached,
    left,
)
from tests.integration.pairing.env import Counting
from tests.integration.pairing.policy import Echo

pytestmark = pytest.mark.timeout(120)

HZ = 50
HELD, ZEROED, OF_POLICY = ActionSource.HOLD, ActionSource.ZERO, ActionSource.POLICY


class Recording(Counting):
    """Keeps what it executed: observation, action, next observation, and when."""

    length = 40

    def __init__(self):
        super().__init__()
        self.done = []
        self.times = []

    def step(self, action):
        before = self._state.copy()
        self._state[2] += 1
        truncated = bool(self._state[2] % self.length == 0)
        self.times.append(time.monotonic())
        self.done.append((before, np.array(action), self._state.copy()))
        return self._state.copy(), float(len(self.done)), False, truncated, {}


class Chunks(Echo):
    """Answers with the actions of the next steps, too."""

    length = 300

    def rollout_step(self, env_ret):
        response = super().rollout_step(env_ret)
        ahead = torch.zeros(self.length, 3, dtype=torch.int64)
        ahead[:, 2] = torch.arange(self.length)
        response.action = response.action[:, None] + ahead
        return response


@asynccontextmanager
async def cluster(policy=ECHO, rpc=FAST):
    """Servers for attached envs alone."""
    async with AsyncExitStack() as stack:
        running = Cluster(stack, [], policy, rpc)
        running.config.services.env.min_clients = 1
        await running.start()
        yield running


async def goes_on(client, more, timeout_s=PATIENCE_S):
    goal = client.status.steps + more
    await assert_eventually(
        lambda: client.outcome != [] or client.status.steps >= goal, timeout_s, "no steps"
    )
    assert client.outcome == [], client.outcome


async def caught_up(client):
    """Waits until no more is under way than a busy machine is slow: a second."""
    await assert_eventually(lambda: client.status.control.spooled < HZ, PATIENCE_S)


async def stored(running, client):
    """What one client brought, in the order in which it was executed."""
    await assert_eventually(lambda: not running.service._actors._detaching, PATIENCE_S)
    columns = await running.rows(client)
    order = np.lexsort((columns["observation"][:, 2], columns["observation"][:, 1]))
    return {name: column[order] for name, column in columns.items()}


def check(columns, env, *, missing=0):
    """Asserts that the buffer holds what the env executed: each step once, with its action."""
    executed = {
        tuple(before[1:3]): (number, *what)
        for number, what in enumerate(env.done)
        for before in [what[0]]
    }
    seen = [tuple(step) for step in columns["observation"][:, 1:3].tolist()]
    assert len(set(seen)) == len(seen), "a step was stored twice"
    assert set(seen) <= executed.keys(), "a step was invented"
    assert len(executed) - len(seen) == missing, sorted(executed.keys() - set(seen))
    for row, step in enumerate(seen):
        number, before, action, after = executed[step]
        np.testing.assert_array_equal(columns["observation"][row], before)
        np.testing.assert_array_equal(columns["action"][row], action)
        np.testing.assert_array_equal(columns["next_observation"][row], after)
        assert columns["reward"][row] == number + 1
        source = columns["action_source"][row]
        if source == OF_POLICY:  # the answer to this very observation
            np.testing.assert_array_equal(action, before[:3])
            if columns["policy_version"][row] >= 0:
                np.testing.assert_array_equal(columns["echo"][row], before)
        elif source == HELD:
            np.testing.assert_array_equal(action, env.done[number - 1][1])
        else:
            assert source == ZEROED
            assert not action.any()


async def keeps_time(client, seconds):
    """Asserts that the env is stepped at its rate for a while, but for what a busy machine takes."""
    missed, begin = client.status.control.missed, time.monotonic()
    await asyncio.sleep(seconds)
    end = time.monotonic()
    steps = sum(begin <= moment < end for moment in client.given.times)
    missed = client.status.control.missed - missed
    assert steps + missed == pytest.approx((end - begin) * HZ, abs=4)
    assert steps > missed


async def test_every_step_is_stored_with_the_action_that_was_executed():
    async with cluster() as running:
        env = Recording()
        async with attached(running.env_address, env, control_hz=HZ) as client:
            await goes_on(client, 100)
        columns = await stored(running, client)
        assert client.outcome == [None]
        check(columns, env)
        own = columns["action_source"] == OF_POLICY
        assert own.any()
        assert (columns["policy_version"][own] >= 0).all()
        control = client.status.control
        assert control.held == (~own).sum()
        assert control.spooled == control.dropped == control.uncertain == 0


@pytest.mark.parametrize("how", ["cut", "black_hole"])
async def test_the_clock_goes_on_while_the_link_is_cut(how):
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        env.length = 10**6
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 50)
            if how == "cut":
                await proxy.refuse()
            else:
                proxy.black_hole()
            await keeps_time(client, 2.0)
            assert client.status.control.spooled > HZ / 2
            if how == "cut":
                await proxy.start()
            else:
                proxy.restore()
            await caught_up(client)
            await goes_on(client, 30)
        columns = await stored(running, client)
        check(columns, env)
        assert (columns["action_source"] == HELD).sum() == client.status.control.held
        assert (columns["policy_version"][columns["action_source"] == HELD] == -1).sum() >= HZ / 2
        assert not columns["cut"][:-1].any()


async def test_the_clock_waits_for_no_log_handler():
    """A handler stands still, and with it the thread that logs: that of the connection."""
    entered, released = threading.Event(), threading.Event()

    class Full(logging.Handler):
        def emit(self, record):
            entered.set()
            assert released.wait(PATIENCE_S)

    logger, handler = logging.getLogger("rlightning.env.remote_env.env_client"), Full()
    logger.addHandler(handler)
    try:
        async with cluster() as running:
            env = Failing()
            env.length = 10**6
            options = {"control_hz": HZ, "on_late": "zero"}
            async with attached(running.env_address, env, **options) as client:
                await assert_eventually(entered.is_set, PATIENCE_S)
                env.fails = False
                await goes_on(client, 5)
                await keeps_time(client, 1.0)
                assert client.status.control.spooled > HZ / 2
                released.set()
                await caught_up(client)
                await goes_on(client, 30)
            check(await stored(running, client), env)
    finally:
        released.set()
        logger.removeHandler(handler)


async def test_the_clock_waits_for_no_name_look_up(monkeypatch):
    """A connection stands still before it is made, as one whose name nobody looks up."""
    entered, released = threading.Event(), threading.Event()
    make = grpc.aio.insecure_channel

    def made(*args):
        if threading.current_thread().name == "rlightning-attach":
            entered.set()
            assert released.wait(PATIENCE_S)
        return make(*args)

    # The session outlives the silence: it is the connection that is given up.
    patient = FAST.model_copy(update={"lease_s": 100.0})
    async with cluster(rpc=patient) as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        env.length = 10**6
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 30)
            monkeypatch.setattr(grpc.aio, "insecure_channel", made)
            proxy.black_hole()  # so that another connection is tried
            await assert_eventually(entered.is_set, PATIENCE_S)
            await keeps_time(client, 1.0)
            proxy.restore()
            released.set()
            await caught_up(client)
            await goes_on(client, 30)
        check(await stored(running, client), env)


async def test_a_silent_server_is_tried_over_another_connection_long_before_its_lease_ends():
    patient = FAST.model_copy(update={"lease_s": 100.0})
    async with cluster(rpc=patient) as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        env.length = 10**6
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 30)
            before = proxy.accepted
            proxy.black_hole()
            await assert_eventually(lambda: proxy.accepted > before, PATIENCE_S)
            proxy.restore()
            await caught_up(client)
            await goes_on(client, 30)
            assert client.status.reconnects >= 1
            assert client.status.control.uncertain == 0
        check(await stored(running, client), env)


async def test_a_restarted_env_server_loses_and_repeats_nothing():
    async with cluster() as running:
        env = Recording()
        env.length = 10**6
        async with attached(running.env_address, env, control_hz=HZ) as client:
            for _ in range(2):
                await goes_on(client, 50)
                await running.env.stop(grace_s=5)
                await goes_on(client, 30)
                assert client.status.control.spooled >= 20
                await running.start_env()
                await caught_up(client)
            await goes_on(client, 50)
            control = client.status.control
            assert control.uncertain == control.dropped == 0, control
        columns = await stored(running, client)
        check(columns, env)
        held = (columns["action_source"] == HELD).sum()
        assert held == client.status.control.held >= 40


async def test_what_was_on_its_way_to_a_server_that_is_gone_is_counted():
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        env.length = 10**6
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 30)
            proxy.black_hole()
            await goes_on(client, 30)
            await running.env.stop(grace_s=5)
            await running.start_env()
            proxy.restore()
            await caught_up(client)
            await goes_on(client, 30)
            uncertain = client.status.control.uncertain
            assert 0 < uncertain <= 64
        columns = await stored(running, client)
        missing = len(env.done) - len(columns["step"])
        assert 0 <= missing <= uncertain
        check(columns, env, missing=missing)


async def test_a_policy_that_pauses_is_held_for():
    async with cluster() as running:
        env = Recording()
        env.length = 10**6
        async with attached(running.env_address, env, control_hz=HZ) as client:
            await goes_on(client, 50)
            await running.client.control("pause")
            await asyncio.sleep(1.0)
            control, steps = client.status.control, client.status.steps
            await keeps_time(client, 1.0)
            more = client.status.steps - steps
            assert client.status.control.held - control.held == pytest.approx(more, abs=2)
            await running.client.control("start")
            await caught_up(client)
            await goes_on(client, 50)
        check(await stored(running, client), env)


async def test_an_answer_that_comes_late_is_never_executed():
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 50)
            proxy.delay_s = 0.06  # a round trip takes six periods
            await goes_on(client, 10)
            before = client.status.control
            await goes_on(client, 60)
            after = client.status.control
            assert after.held - before.held >= 50
            assert after.skipped > before.skipped
        columns = await stored(running, client)
        check(columns, env)
        # What was answered and not executed is stored beside what was.
        late = (columns["action_source"] == HELD) & (columns["policy_version"] >= 0)
        assert late.any()
        np.testing.assert_array_equal(
            columns["policy_action"][late], columns["observation"][late][:, :3]
        )


async def test_a_full_spool_ends_the_episode_as_truncated_and_counts_what_is_lost():
    async with cluster() as running, FaultProxy(running.env_address) as proxy:
        env = Recording()
        env.length = 10**6
        options = {"control_hz": HZ, "spool_steps": 60}
        async with attached(proxy.address, env, **options) as client:
            await goes_on(client, 30)
            await proxy.refuse()
            await goes_on(client, 130)
            assert client.status.control.spooled <= 60
            assert client.status.control.dropped >= 60
            await proxy.start()
            await caught_up(client)
            await goes_on(client, 50)
            dropped = client.status.control.dropped

            async def told():
                return (await running.client.describe()).stats["steps_dropped"] == dropped

            await assert_eventually(told, PATIENCE_S)
            episodes = (await running.client.describe()).episodes
            assert [e.reason for e in episodes if e.env_id == "attached/robot"] == ["truncated"]
        columns = await stored(running, client)
        ends = np.flatnonzero(columns["truncated"])
        assert len(ends) == 1
        assert len(set(columns["episode_id"].tolist())) == 2
        columns["truncated"][ends] = False
        check(columns, env, missing=dropped)
        gap = np.diff(columns["observation"][:, 2])
        assert gap[ends[0]] == dropped + 1
        assert (np.delete(gap, ends[0]) == 1).all()


async def test_zeros_are_executed_where_nobody_answers():
    async with cluster() as running:
        env = Recording()
        options = {"control_hz": HZ, "on_late": "zero"}
        async with attached(running.env_address, env, **options) as client:
            await goes_on(client, 30)
            await running.client.control("pause")
            await goes_on(client, 50)
            await running.client.control("start")
            await goes_on(client, 30)
        columns = await stored(running, client)
        check(columns, env)
        assert (columns["action_source"] == ZEROED).sum() == client.status.control.zeroed >= 40
        assert not (columns["action_source"] == HELD).any()


async def test_a_late_answer_may_end_the_run():
    async with cluster() as running:
        env = Recording()
        options = {"control_hz": 5, "on_late": "stop"}
        async with attached(running.env_address, env, **options) as client:
            await goes_on(client, 2)
            await running.client.control("pause")
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], DeadlineExceededError)
            await running.client.control("start")
        columns = await stored(running, client)
        check(columns, env)
        assert (columns["action_source"] == OF_POLICY).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"control_hz": 0}, "control_hz"),
        ({"control_hz": 10, "on_late": "never"}, "on_late"),
        ({"control_hz": 10, "max_action_age_ms": 0}, "max_action_age_ms"),
        ({"control_hz": 10, "spool_steps": 1}, "spool_steps"),
        ({"control_hz": 10, "spool_mb": 0}, "spool_mb"),
        ({"on_late": "stop"}, "control_hz"),
    ],
)
def test_numbers_out_of_range_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        RemoteEnvClient(Counting(), "127.0.0.1", 1, **options)


async def test_a_chunk_of_actions_lasts_through_a_cut():
    async with (
        cluster({"type": "tests.integration.env.test_control_loop:Chunks"}) as running,
        FaultProxy(running.env_address) as proxy,
    ):
        env = Recording()
        env.length = 10**6
        async with attached(proxy.address, env, control_hz=HZ) as client:
            await goes_on(client, 30)
            held = client.status.control.held
            await proxy.refuse()
            await goes_on(client, 60)
            assert client.status.control.held == held
            await proxy.start()
            await caught_up(client)
            await goes_on(client, 30)
        columns = await stored(running, client)
        check(columns, env)
        by_itself = (columns["policy_version"] < 0) & (columns["action_source"] == OF_POLICY)
        assert by_itself.sum() >= 30
        assert columns["policy_action"].shape[1:] == (Chunks.length, 3)


async def test_an_env_of_several_rows_has_no_clock():
    async with cluster() as running:
        envs = gym.vector.SyncVectorEnv(
            [Counting] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
        )
        async with attached(running.env_address, envs, control_hz=HZ) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], ConfigError)
            assert "one row, got 2 rows" in str(client.outcome[0])


class Failing(Recording):
    """Raises in every 20th step, before it does anything."""

    calls, fails = 0, True

    def step(self, action):
        self.calls += 1
        if self.fails and self.calls % 20 == 0:
            raise RuntimeError("the arm fell off")
        return super().step(action)


async def test_an_env_that_fails_is_reset_and_goes_on():
    async with cluster() as running:
        env = Failing()
        async with attached(running.env_address, env, control_hz=HZ) as client:
            await goes_on(client, 50)
            assert client.status.env_errors >= 2
        check(await stored(running, client), env)


async def test_the_command_says_every_second_how_the_loop_fares(tmp_path):
    async with cluster() as running:
        task = "tests.integration.pairing.env:Endless"
        command = ["-c", CLI, "attach", task, "--server", running.env_address]
        command += ["--name", "robot", "--control-hz", "20", "--on-late", "zero"]
        with ServerProcess(command, tmp_path, announces=False) as process:
            moments = []
            for lines in (1, 3):
                await assert_eventually(
                    lambda lines=lines: (
                        process.log.count("jitter") >= lines or process.child.poll() is not None
                    ),
                    PATIENCE_S,
                )
                moments.append(time.monotonic())
            assert 1 < moments[1] - moments[0] < 10  # two of them
            process.child.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 15) == 130
            line = next(one for one in process.log.splitlines() if "jitter" in one)
            for part in ("action age", "link up", "held", "spooled", "reconnects 0", "version 0"):
                assert part in line
            rates = [int(rate) for rate in re.findall(r"steps [0-9,]+ \((\d+)/s\)", process.log)]
            assert 0 < max(rates) <= 25  # at 20 Hz, less what a busy machine misses
            assert "ended" in process.log
            assert "the env is closed" in process.log
        await left(running)
        episodes = (await running.client.describe()).episodes
        assert [(e.env_id, e.reason) for e in episodes] == [("attached/robot", "truncated")]
