"""What one client or env that does not move does to the others: `make prove-clients`, or `python -m benchmarks.prove_clients`.

32 clients attach to a server that takes no more. One is frozen and one is killed: the others keep their rate, and two that
wait at the door get the places once the lease has ended. A client whose connection is half open takes its session over. Of
eight hosted envs, each by itself or rows of one env, one takes 50 ms a step. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.client_worker import Waiting
from benchmarks.cluster import PATIENCE_S, servers
from benchmarks.harness import Worker, machine
from rlightning.env.remote_client import EnvClient
from rlightning.env.remote_env import RemoteEnvClient
from rlightning.testing import FaultProxy, assert_eventually, wait_until

CLIENTS, PROCESSES = 32, 3
CLIENT_S, FAST_S, SLOW_S = 0.05, 0.02, 0.05
LEASE_S, HEARTBEAT_S = 5.0, 1.0
WINDOW_S = 8.0
# A slot is free when the lease has ended; who waits asks every 0.1 s, and has to take a step then.
MOST_SLOT_S = LEASE_S + 0.5
LEAST_RATE = 0.9


def cluster(env: Sequence[Mapping[str, Any]], **section: Any) -> AbstractContextManager[str]:
    """Runs the three servers; gives the address of the env server."""
    config = {
        "env": list(env),
        "policy": {"device": "cpu", "initial_weights": "random", "model_cfg": {"hidden": [8]}},
        "buffer": {"type": "ReplayBuffer", "capacity": 100_000, "auto_truncate_episode": True},
    }
    return servers(config, **section)


def steps_of(workers: Sequence[Worker]) -> Counter[str]:
    """How many steps each client of some processes has done."""
    return Counter({n: s for worker in workers for n, s in worker.job(what="steps").items()})


def rates(workers: Sequence[Worker]) -> dict[str, float]:
    """Steps a second of each client over a window."""
    before, begun = steps_of(workers), time.monotonic()
    time.sleep(WINDOW_S)
    after, seconds = steps_of(workers), time.monotonic() - begun
    return {name: (after[name] - before[name]) / seconds for name in after}


def crowd(address: str) -> list[tuple[str, float, str, bool]]:
    """Freezes one client and kills another of 32; yields lines of the table."""
    with ExitStack() as stack:

        def worker() -> Worker:
            one = Worker("benchmarks.client_worker", address)
            stack.callback(one.close)
            return one

        others = [worker() for _ in range(PROCESSES)]
        frozen, killed, waiting = worker(), worker(), worker()
        share = (CLIENTS - 2) // PROCESSES
        for number, one in enumerate(others):
            names = [f"other-{number}-{index}" for index in range(share)]
            one.job(what="attach", names=names, seconds=CLIENT_S)
        for one, name in ((frozen, "frozen"), (killed, "killed")):
            one.job(what="attach", names=[name], seconds=CLIENT_S)
        all_workers = [*others, frozen, killed]
        wait_until(
            lambda: len(done := steps_of(all_workers)) == CLIENTS and min(done.values()) > 20,
            PATIENCE_S,
            "not all clients step",
        )
        before = rates(others)
        os.kill(frozen.pid, signal.SIGSTOP)
        stack.callback(os.kill, frozen.pid, signal.SIGCONT)  # or it would not end
        os.kill(killed.pid, signal.SIGKILL)
        begun = time.monotonic()
        waiting.job(what="attach", names=["late-0", "late-1"], seconds=CLIENT_S)
        came: dict[str, float] = {}
        watching = threading.Thread(target=_watch, args=(waiting, begun, came))
        watching.start()
        during = rates(others)
        watching.join()
        ratios = [during[name] / before[name] for name in before]
        lines = [
            ("30 clients, rate with one frozen, one killed / before", statistics.median(ratios)),
            ("the slowest of them", min(ratios)),
        ]
        held = [(name, value, f">= {LEAST_RATE}", value >= LEAST_RATE) for name, value in lines]
        slowest = max(came.values(), default=PATIENCE_S)
        bound = slowest <= MOST_SLOT_S
        return [*held, ("both places taken again after, s", slowest, f"<= {MOST_SLOT_S:g}", bound)]


def _watch(waiting: Worker, begun: float, came: dict[str, float]) -> None:
    """Notes when each client that waits at the door has done a step."""
    while len(came) < 2 and time.monotonic() < begun + PATIENCE_S:
        for name, steps in waiting.job(what="steps").items():
            if steps:
                came.setdefault(name, time.monotonic() - begun)
        time.sleep(0.05)


async def half_open(address: str) -> tuple[str, float, str, bool]:
    """Lets the packets of a client vanish for longer than it waits; its session is still held at the server."""
    async with FaultProxy(address) as proxy:
        host, _, port = proxy.address.rpartition(":")
        client = RemoteEnvClient(Waiting(0.0), host, int(port), name="half-open", control_hz=20)
        thread = threading.Thread(target=client.run)
        thread.start()
        await assert_eventually(lambda: client.status.steps > 40, PATIENCE_S)
        proxy.black_hole()
        await assert_eventually(
            lambda: client.status.control is None or client.status.trouble != "", PATIENCE_S
        )
        proxy.restore()
        begun = time.monotonic()
        await assert_eventually(
            lambda: client.status.trouble == "" and client.status.reconnects > 0, PATIENCE_S
        )
        took_s = time.monotonic() - begun
        client.stop()
        await asyncio.to_thread(thread.join)
        control = client.status.control
        kept = control is not None and control.uncertain == 0
        client.close()
        return (
            "half-open session taken over after, s",
            took_s,
            f"< {LEASE_S:g}",
            took_s < LEASE_S and kept,
        )


def hosted(slow: bool, folder: Path, *, rows: bool) -> list[dict[str, Any]]:
    """Eight hosted envs, of which one may be slow: each by itself, or as rows of one env."""
    env = {"backend": "gymnasium", "task": "benchmarks.client_worker:first_slower"}
    kwargs = {"folder": str(folder), "first_s": SLOW_S if slow else FAST_S, "seconds": FAST_S}
    if rows:
        how: dict[str, Any] = {"num_envs": 8, "vectorization_mode": "independent"}
    else:
        how = {"num_workers": 8}
    return [{"name": "hosted", **env, "env_kwargs": kwargs, **how}]


async def _under_way(client: EnvClient) -> bool:
    return (await client.describe()).env_steps > 500


async def hosted_rates(address: str) -> dict[str, float]:
    """Steps a second of each hosted env, by its finished episodes."""
    async with EnvClient(address) as client:
        await assert_eventually(partial(_under_way, client), PATIENCE_S)
        cursor, begun = (await client.describe()).episode_cursor, time.monotonic()
        await asyncio.sleep(WINDOW_S)
        status = await client.describe(cursor)
        steps: Counter[str] = Counter()
        for episode in status.episodes:
            steps[f"{episode.env_id}/{episode.row}"] += episode.length
        return {name: n / (time.monotonic() - begun) for name, n in steps.items()}


def straggler(*, rows: bool) -> list[tuple[str, float, str, bool]]:
    """Compares seven envs beside a slow one with the same beside a fast one."""
    found = []
    for slow in (False, True):
        with TemporaryDirectory() as folder:
            envs = hosted(slow, Path(folder), rows=rows)
            with cluster(envs, pipeline_depth=1) as address:
                found.append(sorted(asyncio.run(hosted_rates(address)).values()))
    assert [len(rates) for rates in found] == [8, 8], found
    # Without the slow one, the slowest beside the slowest.
    ratios = [beside / alone for alone, beside in zip(found[0][1:], found[1][1:], strict=True)]
    value = statistics.median(ratios)
    what = "rows in processes" if rows else "hosted envs"
    name = f"7 {what} of 20 ms, rate beside one of 50 ms / beside one of 20 ms"
    lines = [(name, value), ("the least of the seven", min(ratios))]
    return [(name, value, f">= {LEAST_RATE}", value >= LEAST_RATE) for name, value in lines]


def main() -> int:
    """Prints a section of RESULTS.md."""
    rpc = {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, "max_sessions": CLIENTS}
    with cluster([], min_clients=1, rpc=rpc) as address:
        lines = crowd(address)
    with cluster([], min_clients=1, rpc=rpc) as address:
        lines.append(asyncio.run(half_open(address)))
    lines += straggler(rows=False)
    lines += straggler(rows=True)
    print(
        f"## {datetime.now(timezone.utc).date()}, clients: `make prove-clients`\n\n{machine()}.\n"
    )
    print("| | reached | asked | |\n|---|---|---|---|")
    for name, value, asked, good in lines:
        print(f"| {name} | {value:.3g} | {asked} | {'' if good else 'missed'} |")
    return 0 if all(good for *_, good in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
