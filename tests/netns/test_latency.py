"""Latencies between two machines whose clocks differ: a network namespace whose clock is 5 s ahead, behind a slow link."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest

from rlightning.latency import LatencyStats
from rlightning.latency.stages import ACT, ActStamps
from rlightning.policy import PolicyClient
from rlightning.testing import FaultProxy
from rlightning.types import EnvRet
from tests.integration.rpc.harness import FAST, echo_process, make_meta, serving
from tests.netns.link import Link

pytestmark = pytest.mark.netns

AHEAD_S = 5
# What the processes and the proxy add to the delay on a busy machine.
ADDED_S = 0.005
# What floats of seconds may be off.
ROUNDED_S = 1e-8
# The lease must outlast the delays.
RPC = FAST.model_copy(update={"lease_s": 5.0})


class KeptStats(LatencyStats):
    """Keeps what exchanges were stamped with."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[ActStamps] = []

    def record_stamps(self, kind, stamps):
        if kind is ACT:
            self.kept.append(ActStamps(*stamps))
        super().record_stamps(kind, stamps)

    def true_ways(self) -> list[tuple[float, float]]:
        """Returns how long requests and answers took, in seconds: how far the clocks are apart is known here, to the ns."""
        return [
            (
                (each.received_ns - each.encoded_ns) * 1e-9 - AHEAD_S,
                (each.heard_ns - each.sent_ns) * 1e-9 + AHEAD_S,
            )
            for each in self.kept
        ]


@asynccontextmanager
async def asked(folder, *, up_s: float, down_s: float, times: int = 40):
    """A client that was answered some times over such a link, each way within what was shown of it."""
    # A time namespace: the kernel itself gives its processes another monotonic clock.
    ahead = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--kill-child")
    with Link() as link:
        listen = ("--listen", f"{link.host}:0", "--rpc", RPC.model_dump_json())
        with echo_process(folder, *listen, prefix=(*link.prefix, *ahead)) as server:
            server.address(60.0)
            async with FaultProxy(await serving(server)) as proxy:
                proxy.delay_s, proxy.delay_back_s = up_s, down_s
                meta = make_meta()
                stats = KeptStats()
                async with PolicyClient(proxy.address, spec=meta, rpc=RPC, stats=stats) as client:
                    ways = []
                    for _ in range(times):
                        await client.act(EnvRet("env", np.zeros((8, 4), np.float32)))
                        ways.append(client.times.ways)
                    true = stats.true_ways()
                    for (true_up, true_down), way in zip(true, ways, strict=True):
                        assert true_up >= up_s
                        assert true_down >= down_s
                        assert abs(way.uplink_s - true_up) <= way.uncertainty_s + ROUNDED_S
                        assert abs(way.downlink_s - true_down) <= way.uncertainty_s + ROUNDED_S
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
        # What is shown cannot be the 40 ms and the nothing that it was, and says so.
        for stage, true in zip(
            ("uplink", "downlink"), zip(*client.stats.true_ways(), strict=True), strict=True
        ):
            shown = client.stats[stage].summary()
            assert shown["uncertainty"] >= 0.02
            within = shown["uncertainty"] + shown["p50"] / 32  # as exact as percentiles are
            assert np.abs(shown["p50"] - np.sort(true)[19:21]).min() <= within
        estimate = client.offset.estimate()
        assert abs(estimate.offset_ns - AHEAD_S * 10**9) <= estimate.uncertainty_ns
