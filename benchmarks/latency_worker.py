"""A client process of the cost benchmark: steps one group; jobs come as JSON lines on stdin."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from benchmarks.act_worker import RawEnv
from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.latency import LatencyStats
from rlightning.latency.trace import TraceLog
from rlightning.policy import PolicyClient


async def step(job: dict[str, Any]) -> dict[str, Any]:
    """Steps for some seconds; returns how many steps, and the CPU of this process."""
    env = RawEnv(job["kind"], job["n"], 0)
    latency = LatencyStats(enabled=job["on"])
    stats, traces = ActorStats(latency=latency), TraceLog(every=100 if job["on"] else 0)
    control = ActorControl()
    async with PolicyClient(job["address"], spec=env.meta, stats=latency) as client:
        begun = time.process_time_ns()
        asyncio.get_running_loop().call_later(job["seconds"], control.stop)
        await run_actor(env, client, None, control=control, stats=stats, traces=traces)
        return {"steps": stats.steps, "cpu_ns": time.process_time_ns() - begun}


def main() -> None:
    """Answers jobs until stdin ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(uvloop.run(step(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
