"""Latencies between two machines whose clocks differ: a network namespace whose clock is 5 s ahead, behind a slow link."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest

from rlightning.policy import PolicyClient
from rlightning.testing import FaultProxy
from rlightning.types import EnvRet
from tests.integration.rpc.harness import FAST, echo_process, make_meta, serving
from tests.netns.link import Link

pytestmark = pytest.mark.netns

AHEAD_S = 5
# What the processes and the proxy add to the delay on a busy machine.
ADDED_S = 0.005
# The lease must outlast the delays.
RPC = FAST.model_copy(update={"lease_s": 5.0})


@asynccontextmanager
async def asked(folder, *, up_s: float, down_s: float, times: int = 40):
    """A client that was answered some times over such a link."""
    # A time namespace: the kernel itself gives its processes another monotonic clock.
    ahead = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child")
    with Link() as link:
        listen = ("--listen", f"{link.host}:0", "--rpc", RPC.model_dump_json())
        with echo_process(folder, *listen, prefix=(*link.prefix, *ahead)) as server:
            server.address(60.0)
            async with FaultProxy(await serving(server)) as proxy:
                proxy.delay_s, proxy.delay_back_s = up_s, down_s
                meta = make_meta()
                async with PolicyClient(proxy.address, spec=meta, rpc=RPC) as client:
                    ways = []
                    for _ in range(times):
                        await client.act(EnvRet("env", np.zeros((8, 4), np.float32)))
                        ways.append(client.times.ways)
                    yield client, ways


async def test_40_ms_each_way_are_shown_as_such_though_the_clocks_are_5_s_apart(tmp_path):
    async with asked(tmp_path, up_s=0.04, down_s=0.04) as (client, ways):
        assert not client.offset.same_clock
        estimate = client.offset.estimate()
        assert abs(estimate.offset_ns * 1e-9 - AHEAD_S) <= ADDED_S
        for stage in ("uplink", "downlink"):
            shown = client.stats[stage].summary()
            assert abs(shown["p50"] - 0.04) <= ADDED_S
            assert shown["count"] == len(ways)
            assert shown["uncertainty"] >= 0.04
        assert client.one_way_unknown == 0


async def test_40_ms_up_only_are_within_the_uncertainty_that_is_shown(tmp_path):
    async with asked(tmp_path, up_s=0.04, down_s=0.0) as (client, ways):
        for way in ways:
            assert way.uncertainty_s >= 0.02
            assert way.uplink_s + way.uncertainty_s >= 0.04
        # What is shown cannot be the 40 ms and the nothing that it was, and says so.
        for stage, true_s in (("uplink", 0.04), ("downlink", 0.0)):
            shown = client.stats[stage].summary()
            assert shown["uncertainty"] >= 0.02
            assert abs(shown["p50"] - true_s) <= shown["uncertainty"] + ADDED_S
        estimate = client.offset.estimate()
        assert abs(estimate.offset_ns - AHEAD_S * 10**9) <= estimate.uncertainty_ns
