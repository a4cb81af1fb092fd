"""What measuring costs: CPU per step of a cluster with stages, traces and metrics on, against all of them off.

What metrics alone cost is seen against a third cluster, which has the others on. All live in this process, three services each
with real sockets between them, and step by turns: what one process has over another, such as where its memory lies, is some
per cent of CPU, more than what is looked for.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.env.remote_client import EnvClient
from rlightning.latency import ClockOffset, LatencyStats
from rlightning.latency.stages import ACT, BATCH, INSERT, STEP, STORE, ActStamps
from rlightning.policy import PolicyClient
from rlightning.rpc.metrics import MetricsServer
from rlightning.rpc.protocol import arrival_of, measure, stamp
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.services.policy_server.servicer import PolicyService
from rlightning.utils.config import MainConfig
from rlightning.v1 import policy_service_pb2 as pb

CEILING = 1.02
# Many short rounds: what else the machine does falls on both sides alike.
LEAST_ROUNDS = 300
LONGEST_S = 0.1
# That of deploy/monitoring/prometheus.yml.
SCRAPE_EVERY_S = 5.0
ASKED = 10
RECORDED_STEPS = 1_000_000
ROWS = (1, 64)


class Side:
    """A cluster that steps CartPole, with stages and traces on or off, and metrics; paused between jobs."""

    def __init__(self, rows: int, *, stages: bool, metrics: bool) -> None:
        self._shows_metrics = metrics
        self._stack = AsyncExitStack()
        self._metrics: list[str] = []
        self._cursors = (0, 0)
        self._config = MainConfig.from_dict(
            {
                "env": {
                    "name": "cart",
                    "backend": "gymnasium",
                    "task": "CartPole-v1",
                    "num_envs": rows,
                },
                "buffer": {
                    "type": "ReplayBuffer",
                    "capacity": 50_000,
                    "auto_truncate_episode": True,
                },
                "policy": {"initial_weights": "random", "device": "cpu", "torch_threads": 1},
                "log": {"latency": stages, "trace_every": 100 if stages else 0},
            }
        )

    async def start(self) -> None:
        """Starts the services and lets them warm up."""
        services = self._config.services
        services.policy.address = await self._serve(PolicyService(self._config))
        services.buffer.address = await self._serve(BufferService(self._config))
        self._client = EnvClient(await self._serve(EnvService(self._config)))
        policy = PolicyClient(services.policy.address)
        self._others = policy, BufferClient(services.buffer.address)
        for client in (self._client, *self._others):
            self._stack.push_async_callback(client.close)
        while not await self._stepped():
            await self._run(1.0)

    async def _serve(self, service: PolicyService | BufferService | EnvService) -> str:
        server = await serve(service)
        self._stack.push_async_callback(server.stop, grace_s=5.0)
        await server.ready()
        if self._shows_metrics:
            loop = asyncio.get_running_loop()
            metrics = MetricsServer("127.0.0.1:0", service.measure, loop=loop)
            self._stack.push_async_callback(asyncio.to_thread, metrics.close)
            self._metrics.append(metrics.address)
        return server.address

    async def close(self) -> None:
        """Stops the services."""
        await self._stack.aclose()

    async def step_us(self, seconds: float) -> float:
        """CPU per step of a group in all three services, in microseconds."""
        stepped = await self._stepped()
        begun_ns = time.process_time_ns()
        await self._run(seconds)
        taken_ns = time.process_time_ns() - begun_ns
        return taken_ns / (await self._stepped() - stepped) / 1e3

    async def _run(self, seconds: float) -> None:
        """Lets the group step for so long."""
        await self._client.control("start")
        await asyncio.sleep(seconds)
        await self._client.control("pause")  # answered when the steps in flight are over

    async def asked_ms(self) -> float:
        """CPU in milliseconds, in each second, for who looks: a Describe a second, and its share of a scrape.

        What asking itself takes is part of it, and so is sorting in what a second of steps has left behind.
        """
        await self._run(1.0)
        begun_ns = time.process_time_ns()
        await self._stepped()
        for client in self._others:
            await client.describe()
        described_ns = time.process_time_ns()
        for address in self._metrics:
            await asyncio.to_thread(scrape, address)
        scraped_ns = time.process_time_ns()
        return (described_ns - begun_ns + (scraped_ns - described_ns) / SCRAPE_EVERY_S) / 1e6

    async def _stepped(self) -> int:
        """Steps of groups so far, by a Describe as a run sends it."""
        episodes, traces = self._cursors
        status = await self._client.describe(episodes, trace_cursor=traces)
        self._cursors = status.episode_cursor, status.trace_cursor
        return status.env_steps // (status.envs[0].num_envs or 1)


def scrape(address: str) -> None:
    """Reads the metrics of a service."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        answer.read()


def quiet(costs: Sequence[float]) -> float:
    """The lower quartile: what other programs of the machine add to the CPU of a round is never below 0."""
    return statistics.quantiles(costs, n=4)[0]


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of lower quartiles."""
    source, size = random.Random(0), len(pairs)
    ratios = []
    for _ in range(2000):
        on, off = zip(*source.choices(pairs, k=size), strict=True)
        ratios.append(quiet(on) / quiet(off))
    ratios.sort()
    return ratios[50], ratios[1949]


class Cost(NamedTuple):
    """What a side costs.

    Attributes:
        step_us: CPU per step of a group, by round, in microseconds.
        asked_ms: CPU for who looks, each second, in milliseconds.
    """

    step_us: list[float]
    asked_ms: float


async def compare(rows: int, rounds: int, seconds: float) -> tuple[Cost, Cost, Cost]:
    """Steps three sides by turns; returns what they cost: with all off, with all but metrics on, and with all on."""
    sides = [
        Side(rows, stages=stages, metrics=metrics)
        for stages, metrics in ((False, False), (True, False), (True, True))
    ]
    try:
        for side in sides:
            await side.start()
        gc.freeze()  # as a policy server does
        cost: dict[Side, list[float]] = {side: [] for side in sides}
        asked: dict[Side, list[float]] = {side: [] for side in sides}
        for order in itertools.islice(itertools.cycle(itertools.permutations(sides)), rounds):
            for side in order:
                cost[side].append(await side.step_us(seconds))
        for _ in range(ASKED):
            for side in sides:
                asked[side].append(await side.asked_ms())
    finally:
        for side in sides:
            await side.close()
    off, stages, on = (Cost(cost[side], statistics.median(asked[side])) for side in sides)
    return off, stages, on


def measure_cost(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the cost for each size of group, and what a million recorded steps leave behind."""
    rounds, seconds = max(rounds, LEAST_ROUNDS), min(seconds, LONGEST_S)
    good = True
    print("\n### CPU per step of a group with stages, traces and metrics on / off\n")
    print(f"Env, policy and buffer server together, {rounds} rounds of {seconds:g} s each.\n")
    print(
        "| rows | what | without, us | with, us | with / without, lower quartiles | 95 % | target | |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rows in ROWS:
        off, stages, on = uvloop.run(compare(rows, rounds, seconds))
        for what, without, on_top in (("all", off, on), ("metrics alone", stages, on)):
            looked = 1 + (on_top.asked_ms - without.asked_ms) / 1e3
            pairs = [
                (one * looked, other)
                for one, other in zip(on_top.step_us, without.step_us, strict=True)
            ]
            with_us, without_us = quiet(on_top.step_us) * looked, quiet(without.step_us)
            ratio, (low, high) = with_us / without_us, interval(pairs)
            good &= ratio <= CEILING * slack
            print(
                f"| {rows} | {what} | {without_us:.1f} | {with_us:.1f} | {ratio:.4f} | {low:.4f} to {high:.4f} "
                f"| <= {CEILING} | {'' if ratio <= CEILING else 'missed'} |",
                flush=True,
            )
    print(
        f"\nIn that: a Describe of the three a second, which takes {on.asked_ms - off.asked_ms:.2f} ms of CPU a second "
        f"more with all on than with all off, {on.asked_ms - stages.asked_ms:.2f} ms of it a scrape every "
        f"{SCRAPE_EVERY_S:g} s. On all sides: the stamps of the protocol, "
        f"{stamps_us():.2f} us for those of a request and its answer."
    )
    return remember() and good


def stamps_us() -> float:
    """CPU that both sides together need to stamp a request and its answer, and to learn of the clock."""
    offset, times = ClockOffset(), 20_000
    begun = time.process_time()
    for _ in range(times):
        request, response = pb.ActRequest(), pb.ActResponse()
        stamp(request)
        stamp(response, arrival_of(request))
        measure(offset, request, response)
    stamped = time.process_time() - begun
    begun = time.process_time()
    for _ in range(times):
        request, response = pb.ActRequest(), pb.ActResponse()
    return (stamped - (time.process_time() - begun)) / times * 1e6


def remember() -> bool:
    """Prints what recording all of a step takes in the three services, and the memory that a million leave behind."""
    env, policy, buffer = LatencyStats(), LatencyStats(), LatencyStats()
    times = (430_000, 0, 20_000, 120_000, 210_000, 400_000, 9, 5, 60)
    stamps = ActStamps(*times, -10_000.0, 10_000.0)

    def record(steps: int) -> None:
        for _ in range(steps):
            now_ns = time.monotonic_ns()
            env.record_stamps(ACT, (now_ns, *stamps[1:]))
            env.record_stamps(STEP, (now_ns, now_ns - 90, now_ns - 50, now_ns - 40))
            env.record_stamps(INSERT, (now_ns, now_ns - 80, now_ns - 90, now_ns - 60, 0.0, 0.0))
            policy.record_stamps(BATCH, (now_ns, now_ns - 10, now_ns - 20, now_ns - 25))
            buffer.record_stamps(STORE, (now_ns, now_ns - 10))

    record(RECORDED_STEPS // 20)
    gc.collect()
    before, begun = resident_kib(), time.process_time()
    record(RECORDED_STEPS)
    each_us = (time.process_time() - begun) / RECORDED_STEPS * 1e6
    gc.collect()
    after = resident_kib()
    print(
        f"\n{RECORDED_STEPS:,} recorded steps, {len(env) + len(policy) + len(buffer)} figures each: {before:,} KiB "
        f"resident before, {after:,} KiB after; {each_us:.2f} us of CPU a step."
    )
    return after <= before * 1.02


def resident_kib() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
