"""What measuring costs: CPU per step with stages, traces and metrics on, against all of them off."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.act import CONFIG
from benchmarks.harness import Worker
from rlightning.cluster.process import MALLOC_ENV
from rlightning.latency import ActTimes, LatencyStats
from rlightning.latency.clock import OneWay
from rlightning.testing import ServerProcess

CEILING = 1.02
LEAST_ROUNDS = 15
RECORDED_STEPS = 1_000_000
CELLS = (("cp", 1), ("cp", 64))


def cpu_ns(pid: int) -> int:
    """What the threads of a process have run, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads)


class Side:
    """A policy server and a client that steps against it, with everything on or off."""

    def __init__(self, server: ServerProcess, folder: Path, *, on: bool) -> None:
        self.address = server.address(60.0)
        announced = json.loads((folder / "announced.json").read_text())
        self._metrics = announced.get("metrics")
        self._pid = announced["pid"]
        self._on = on
        self._worker = Worker("benchmarks.latency_worker")

    def close(self) -> None:
        """Ends the client."""
        self._worker.close()

    def step_us(self, kind: str, n: int, seconds: float) -> float:
        """CPU per step of both processes, in microseconds."""
        before = cpu_ns(self._pid)
        job = {"address": self.address, "kind": kind, "n": n, "seconds": seconds, "on": self._on}
        done = self._worker.job(**job)
        return float((done["cpu_ns"] + cpu_ns(self._pid) - before) / done["steps"] / 1e3)

    def scrape_ms(self) -> float:
        """CPU of the server for one scrape, in milliseconds."""
        before = cpu_ns(self._pid)
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            answer.read()
        return (cpu_ns(self._pid) - before) / 1e6


@contextlib.contextmanager
def sides() -> Iterator[tuple[Side, Side]]:
    """Starts both sides; yields (on, off)."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "config.yaml"
        config.write_text(CONFIG)
        found = []
        for on in (True, False):
            own = folder / str(on)
            own.mkdir()
            options = ["services.python_path=[.]", f"log.latency={str(on).lower()}"]
            if on:
                options.append("services.policy.metrics=0")
            command = ["-m", "rlightning.services.policy_server", "--config", str(config)]
            for option in options:
                command += ["--set", option]
            server = stack.enter_context(ServerProcess(command, own, environment=MALLOC_ENV))
            side = Side(server, own, on=on)
            stack.callback(side.close)
            found.append(side)
        yield found[0], found[1]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    source, size = random.Random(0), len(ratios)
    medians = sorted(statistics.median(source.choices(ratios, k=size)) for _ in range(2000))
    return medians[50], medians[1949]


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the cost for each size of group, and what a million recorded steps leave behind."""
    rounds = max(rounds, LEAST_ROUNDS)
    good = True
    print("\n### CPU per step with stages, traces and metrics on / off\n")
    print("| rows | off, us | on, us | on / off, median of rounds | 95 % | target | |")
    print("|---|---|---|---|---|---|---|")
    with sides() as (on, off):
        for kind, n in CELLS:
            pairs = []
            for number in range(rounds + 1):
                order = (on, off) if number % 2 else (off, on)
                cost = {side: side.step_us(kind, n, seconds) for side in order}
                if number:
                    pairs.append((cost[on], cost[off]))
            ratios = [one / other for one, other in pairs]
            median, (low, high) = statistics.median(ratios), interval(ratios)
            good &= median <= CEILING * slack
            on_us, off_us = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
            print(
                f"| {kind} {n} | {off_us:.1f} | {on_us:.1f} | {median:.3f} | {low:.3f} to {high:.3f} "
                f"| <= {CEILING} | {'' if median <= CEILING else 'missed'} |"
            )
        scrapes = statistics.median(on.scrape_ms() for _ in range(rounds))
        print(f"\nOne scrape of the policy server: {scrapes:.2f} ms of CPU.")
    return remember() and good


def remember() -> bool:
    """Prints the resident memory before and after a million recorded steps."""
    stats = LatencyStats()
    ways = OneWay(1e-4, 1e-4, 1e-5)
    times = ActTimes(1, 0, 20_000, 9_000, 5_000, 90_000, 130_000, 400_000, 430_000, ways)

    def record(steps: int) -> None:
        for _ in range(steps):
            times.record(stats)

    record(RECORDED_STEPS // 20)
    gc.collect()
    before, begun = resident_kib(), time.process_time()
    record(RECORDED_STEPS)
    each_us = (time.process_time() - begun) / RECORDED_STEPS * 1e6
    gc.collect()
    after = resident_kib()
    print(
        f"\n{RECORDED_STEPS:,} recorded steps, {len(stats)} figures each: {before:,} KiB resident before, "
        f"{after:,} KiB after; {each_us:.2f} us of CPU a step."
    )
    return after <= before * 1.02


def resident_kib() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
