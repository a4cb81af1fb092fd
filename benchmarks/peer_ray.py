"""The loop between actors of Ray, driven from this process; jobs come as JSON lines on stdin."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np
import ray

from benchmarks.harness import answer_jobs
from benchmarks.workload import forward, make_env, make_network

Answer = dict[str, Any]


@ray.remote(num_cpus=0)
class Env:
    """An env of N rows."""

    def __init__(self, kind: str, n: int) -> None:
        self.env = make_env(kind, n)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Returns the observation after an action."""
        self.env.observation = self.env.step(action)[0]
        return self.env.observation


@ray.remote(num_cpus=0)
class Policy:
    """The network."""

    def __init__(self, kind: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.kind, self.network = kind, make_network(kind)

    def act(self, *observations: np.ndarray) -> np.ndarray:
        """Returns actions for the rows of several envs, one below the other."""
        import torch

        rows = observations[0] if len(observations) == 1 else np.concatenate(observations)
        with torch.inference_mode():
            # What Ray gives is read-only, which torch warns of.
            action = forward(self.network, self.kind, torch.from_numpy(rows.copy()))
        return np.asarray(action)


_actors: dict[tuple[str, int, int], tuple[list[Any], Any]] = {}


async def loop(job: Answer) -> Answer:
    """Groups of N rows, each in an actor; references go from env to policy and back."""
    kind, n, groups = job["kind"], job["n"], job.get("groups", 1)
    key = kind, n, groups
    if key not in _actors:
        _actors[key] = [Env.remote(kind, n) for _ in range(groups)], Policy.remote(kind)
    envs, policy = _actors[key]
    still = np.zeros(n, np.int64)
    seen = [env.step.remote(still) for env in envs]
    ray.get(policy.act.remote(*seen))
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < job["seconds"]:
        action = policy.act.remote(*seen)
        if groups == 1:
            seen = [envs[0].step.remote(action)]
            ray.get(action)
        else:
            rows = np.split(ray.get(action), groups)
            seen = [env.step.remote(row) for env, row in zip(envs, rows, strict=True)]
        steps += n * groups
    ray.get(seen)
    return {"steps_per_s": steps / (time.perf_counter() - start)}


def main() -> None:
    # Ray writes to stdout, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=10**9,
        log_to_driver=False,
        logging_level="CRITICAL",
        _node_ip_address="127.0.0.1",
    )
    try:
        asyncio.run(answer_jobs({"loop": loop}, answers))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
