"""A cluster with simulated envs whose services are watched: `benchmarks.prove_scaling` runs several.

As a command (`python -m benchmarks.capacity_site ADDRESS`) it is a learner that takes batches and learns nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.capacity import Measured, Work
from benchmarks.harness import Worker, answer_jobs, cpu_s
from rlightning.buffer.remote_buffer import BufferClient, SampleClient
from rlightning.cluster.env_servers import EnvServers
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.prepare import prepare
from rlightning.cluster.runs import Run
from rlightning.policy import BasePolicy, PolicyClient
from rlightning.policy.weights import dump_weights
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import MainConfig

WEIGHTS = 2**20  # bytes
GROUPS = 2  # of each worker: services.env.pipeline_depth
_SETTLE_S = 1.5
_ROOT = Path(__file__).parents[1]


class Constant(BasePolicy):
    """Always the same action, so that what is measured is everything but a network."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes weights that nothing is computed with."""
        self.net = nn.Embedding(WEIGHTS // 4, 1)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Answers."""
        return PolicyResponse(
            env_ret.env_id, action=torch.zeros(len(env_ret.observation), dtype=torch.int64)
        )


@dataclass(frozen=True)
class Site:
    """What a run consists of.

    Attributes:
        nbytes: Size of an observation.
        rows: Rows in a group.
        servers: Env servers.
        workers: Env workers of each, of two groups each.
        seconds: How long an env step takes; 0: nothing, and as many are taken as there is time for.
        batch: Rows in a batch; 0: nobody takes any.
        pause_s: What the learner waits between two batches.
    """

    nbytes: int
    rows: int
    servers: int = 1
    workers: int = 1
    seconds: float = 0.0
    batch: int = 0
    pause_s: float = 0.01

    @property
    def groups(self) -> int:
        """Groups of all env servers together."""
        return self.servers * self.workers * GROUPS

    def __str__(self) -> str:
        pace = "" if not self.seconds else f", {1e3 * self.seconds:g} ms a step"
        taken = "" if not self.batch else f", batches of {self.batch}"
        groups = f"{self.servers} x {self.workers * GROUPS} groups of {self.rows}"
        return f"{groups} rows of {self.nbytes:,} B{pace}{taken}"

    def config(self, folder: str) -> MainConfig:
        """Returns the config of the cluster."""
        env = {
            "name": "sim",
            "task": "simulated",
            "backend": "benchmarks.capacity_env:Simulated",
            "num_workers": self.workers,
            "num_envs": GROUPS * self.rows,
            "env_kwargs": {"nbytes": self.nbytes, "seconds": self.seconds},
        }
        policy = {"type": "benchmarks.capacity_site:Constant", "device": "cpu"}
        rows = min(100_000, 200_000_000 // self.nbytes)
        buffer = {"type": "ReplayBuffer", "capacity": rows, "max_bytes": 2 * 10**9}
        env_service = {"replicas": self.servers, "pipeline_depth": GROUPS}
        return MainConfig.from_dict(
            {
                "env": [env],
                "policy": {**policy, "initial_weights": "random"},
                "buffer": {**buffer, "auto_truncate_episode": True},
                "services": {"env": env_service, "python_path": [str(_ROOT)]},
                "log": {"log_dir": folder},
            }
        )


class Cluster:
    """A site that runs, in a `with` block.

    Attributes:
        pids: Processes by the service that they are of.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stack = ExitStack()
        self.pids: dict[str, list[int]] = {}

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            config = prepare(self._site.config(folder))
            run = Run.create(config, command=[])
            self._launcher = stack.enter_context(LocalLauncher(config, run, report=_complain))
            for process in self._launcher.processes():
                self.pids.setdefault(process.section.partition("-")[0], []).append(process.pid)
            self._buffer = self._launcher.config.buffer_addresses[0]
            self._policy = self._launcher.address("policy")
            if self._site.batch:
                learner = Worker("benchmarks.capacity_site", self._buffer)
                stack.callback(learner.close)
                self.pids["learner"] = [learner.pid]
                learner.job(what="take", batch=self._site.batch, pause_s=self._site.pause_s)
            self._stack = stack.pop_all()
        time.sleep(_SETTLE_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def measure(self, seconds: float) -> Measured:
        """Returns what passes through in a second, and what each service uses for it."""
        begun, before, used = time.monotonic(), self._counters(), self._cpu()
        time.sleep(seconds)
        after, then = self._counters(), self._cpu()
        took = time.monotonic() - begun
        rate = {name: (after[name] - before[name]) / took for name in after}
        site = self._site
        rows_taken = rate["batches"] * site.batch
        work = Work(
            steps=rate["steps"],
            rows=rate["rows"],
            bytes=rate["rows"] * site.nbytes,
            threaded=rate["steps"] if site.seconds else 0.0,
            batches=rate["batches"],
            batch_rows=rows_taken,
            batch_bytes=2 * rows_taken * site.nbytes,
        )
        cores = {role: (then[role] - used[role]) / took for role in then}
        return Measured(str(site), work, cores)

    def memory(self) -> dict[str, float]:
        """Returns the resident size of one process of each service, in MiB."""
        return {role: _memory_mib(pids[0]) for role, pids in self.pids.items()}

    def look_s(self, times: int) -> float:
        """Returns the CPU seconds of this process for one look of a learner at one env server."""
        service = self._launcher.config.services.env

        async def look() -> float:
            servers = EnvServers(service, fresh=True)
            await servers.look(5.0)
            begun = time.process_time()
            for _ in range(times):
                await servers.look(5.0)
            used = time.process_time() - begun
            await servers.close()
            return used / times / self._site.servers

        return shared_loop().run(look())

    def publish_s(self, times: int) -> tuple[float, float]:
        """Returns the CPU seconds for publishing the weights once, here and at the policy server."""

        async def publish() -> None:
            async with PolicyClient(self._policy) as client:
                for version in range(1, times + 1):
                    await client.publish_weights(version, data, learner_id="bench", timeout_s=60)

        data = dump_weights({"net.weight": torch.zeros(WEIGHTS // 4, 1)})
        here, there = time.process_time(), self._cpu()["policy"]
        shared_loop().run(publish())
        return (
            (time.process_time() - here) / times,
            (self._cpu()["policy"] - there) / times,
        )

    def _cpu(self) -> dict[str, float]:
        return {role: sum(map(cpu_s, pids)) for role, pids in self.pids.items()}

    def _counters(self) -> dict[str, float]:
        async def ask() -> dict[str, float]:
            async with PolicyClient(self._policy) as policy, BufferClient(self._buffer) as buffer:
                acted = (await policy.describe()).stats
                stored = (await buffer.describe()).stats
            return {
                "steps": acted["requests"],
                "rows": acted["rows"],
                "batches": stored["batches_total"],
            }

        return shared_loop().run(ask())


def network_bytes() -> int:
    """Returns how many bytes this machine has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _complain(line: str) -> None:
    print(line, file=sys.stderr)


def _memory_mib(pid: int) -> float:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )
    return int(line.split()[1]) / 1024


async def _learn(address: str) -> None:
    """Takes batches once it is told to, as fast as `pause_s` between them allows, and drops them."""
    taking: list[asyncio.Task[None]] = []

    async def take(job: Mapping[str, Any]) -> dict[str, Any]:
        taking.append(asyncio.create_task(_take(address, job["batch"], job["pause_s"])))
        return {}

    await answer_jobs({"take": take})
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)


async def _take(address: str, batch: int, pause_s: float) -> None:
    async with SampleClient(address, batch_size=batch, prefetch=1) as client:
        while True:
            await client.next_batch(60)
            await asyncio.sleep(pause_s)


if __name__ == "__main__":
    asyncio.run(_learn(sys.argv[1]))
