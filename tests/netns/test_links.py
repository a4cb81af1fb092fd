"""Links that fail as real ones do: the server is in a network namespace, the client outside."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rlightning.testing import assert_eventually
from rlightning.utils.config.rpc import RpcConfig
from tests.integration.rpc.harness import FAST, connected, echo_process, serving
from tests.netns.link import Link, links
from tests.proc import established

pytestmark = pytest.mark.netns

# What a busy machine may be late.
LATE_S = 2.0
# Only the transport notices: no heartbeat is missed in time.
PINGS = RpcConfig(
    heartbeat_s=0.1,
    lease_s=60,
    resume_window_s=10,
    keepalive_time_s=0.5,
    keepalive_timeout_s=0.5,
    connect_timeout_ms=500,
)


@asynccontextmanager
async def linked(folder, rpc):
    """A server beyond a link and a client with a session that has been answered once."""
    with Link() as link:
        listen = ("--listen", f"{link.host}:0", "--rpc", rpc.model_dump_json())
        with echo_process(folder, *listen, prefix=link.prefix) as server:
            async with connected(await serving(server), rpc=rpc) as client:
                await client.ask()
                yield link, server, client


async def took(condition) -> float:
    begun = time.monotonic()
    await assert_eventually(condition, 60)
    return time.monotonic() - begun


async def test_a_link_that_goes_down_ends_the_lease_on_both_sides_and_is_resumed_when_it_is_up(
    tmp_path,
):
    async with linked(tmp_path, FAST) as (link, server, client):
        link.down()
        asking = asyncio.create_task(client.ask(timeout_s=10))
        client_s, server_s = await asyncio.gather(
            took(lambda: not client.session.connected),
            took(lambda: "closed a, resumable True" in server.log),
        )
        assert FAST.lease_s * 0.5 < client_s < FAST.lease_s + LATE_S
        assert FAST.lease_s * 0.5 < server_s < FAST.lease_s + LATE_S
        await asyncio.sleep(1)  # nobody is asked, since nobody is there
        assert not asking.done()
        assert not client.session.connected
        link.up()
        assert (await asking).seq == 2
        assert client.session.resumed
        assert (await client.ask()).seq == 3
        assert client.answered == [1, 2, 3]


async def test_a_link_that_is_down_for_longer_than_the_resume_window_begins_a_new_session(tmp_path):
    rpc = FAST.model_copy(update={"resume_window_s": 0.2})
    async with linked(tmp_path, rpc) as (link, server, client):
        link.down()
        asking = asyncio.create_task(client.ask(timeout_s=10))
        await assert_eventually(lambda: "closed a, resumable False" in server.log)
        link.up()
        assert (await asking).seq == 2
        assert not client.session.resumed
        assert client.session.epoch == 1


@pytest.mark.parametrize(("lost", "chain"), [("request", "INPUT"), ("answer", "OUTPUT")])
async def test_a_large_message_whose_packets_vanish_ends_with_the_keepalive_and_is_sent_again(
    tmp_path, lost, chain
):
    observation = np.arange(8 * 2**20, dtype=np.float32).reshape(8, -1)
    async with linked(tmp_path, PINGS) as (link, server, client):
        link.swallow_after(4 * 2**20, chain)
        asking = asyncio.create_task(client.ask(observation, timeout_s=20))
        await assert_eventually(lambda: link.swallowed(chain) > 0)
        limit_s = PINGS.keepalive_time_s + 2 * PINGS.keepalive_timeout_s + LATE_S
        client_s, server_s = await asyncio.gather(
            took(lambda: not client.session.connected),
            took(lambda: established(server.child.pid) == 0),
        )
        assert client_s < limit_s
        assert server_s < limit_s
        assert not asking.done()
        link.restore()
        assert (await asking).seq == 2
        assert client.session.resumed
        assert client.answered == [1, 2]


def test_nothing_is_left_of_a_link_even_if_its_process_is_killed():
    code = (
        "import os; from tests.netns.link import Link; link = Link().__enter__();"
        "print(link.name, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == -9, done.stderr
    name = done.stdout.strip()
    deadline = time.monotonic() + 5
    while name in links():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with Link() as link:
        assert link.name in links()
    assert link.name not in links()
