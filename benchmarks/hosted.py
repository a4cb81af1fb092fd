"""Hosted envs through the cluster, against vector envs with the same policy in one process, on the same cores."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.cluster import servers
from benchmarks.harness import Ratio, Worker, report, run_rounds
from rlightning.env.remote_client import EnvClient

ROWS = 8
LEAST_SECONDS = 1.5
POLICY = {"type": "actor_critic", "device": "cpu", "initial_weights": "random", "torch_threads": 1}
# What a task needs beside gymnasium, and the section that hosts it.
TASKS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "CartPole-v1": (None, {"backend": "gymnasium"}),
    "ALE/Pong-v5": ("ale_py", {"backend": "ale", "init_params": {"frame_stack": 4}}),
    "HalfCheetah-v5": ("mujoco", {"backend": "mujoco"}),
}


async def cluster_rate(address: str, seconds: float) -> float:
    """Env steps per second of an env server, which is paused before and after."""
    async with EnvClient(address) as client:
        await client.control("start")
        await asyncio.sleep(0.3)
        before, begun = (await client.describe(max_episodes=1)).env_steps, time.perf_counter()
        await asyncio.sleep(seconds)
        after, elapsed = (await client.describe(max_episodes=1)).env_steps, time.perf_counter()
        await client.control("pause")
        return (after - before) / (elapsed - begun)


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints a table for each task whose library is installed."""
    good = True
    for task, (library, section) in TASKS.items():
        if library is not None and importlib.util.find_spec(library) is None:
            print(f"\n{task}: {library} is not installed")
        else:
            good &= _measure(task, section, rounds, max(seconds, LEAST_SECONDS), slack)
    return good


def _measure(task: str, section: dict[str, Any], rounds: int, seconds: float, slack: float) -> bool:
    config = {
        "env": [{"name": "hosted", "task": task, "num_envs": ROWS, **section}],
        "policy": POLICY,
        "buffer": {"type": "ReplayBuffer", "capacity": 4096, "auto_truncate_episode": True},
    }
    with ExitStack() as stack:
        address = stack.enter_context(servers(config))
        asyncio.run(_pause(address))
        cells: dict[str, Callable[[], float]] = {
            "cluster": lambda: asyncio.run(cluster_rate(address, seconds))
        }
        for library in ("AsyncVectorEnv", "envpool"):
            if library == "envpool" and importlib.util.find_spec("envpool") is None:
                print("\nenvpool is not installed")
                continue
            worker = Worker("benchmarks.hosted_worker")
            stack.callback(worker.close)
            worker.job(what="start", library=library, task=task, rows=ROWS, policy=POLICY)
            cells[library] = lambda worker=worker: float(
                worker.job(what="run", seconds=seconds)["per_s"]
            )
        table = run_rounds(cells, rounds=rounds, unit="env steps/s")
    ratios = [Ratio(f"cluster / {name}", "cluster", name) for name in cells if name != "cluster"]
    return report(f"Hosted {task}, {ROWS} rows", table, ratios, slack=slack)


async def _pause(address: str) -> None:
    async with EnvClient(address) as client:
        await client.control("pause")
