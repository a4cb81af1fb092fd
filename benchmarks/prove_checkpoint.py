"""Checkpoints a full table while a writer writes, and loads it again: `python -m benchmarks.prove_checkpoint MEGABYTES`.

Prints what an acked insert takes idle and during the checkpoint, how long the load takes to the first sample, and
whether the next 100 batches are those of the server that was not stopped. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness import machine, scratch_folder
from rlightning.buffer.remote_buffer import BufferClient, InsertClient, SampleClient
from rlightning.testing.ports import free_address
from rlightning.testing.processes import ServerProcess
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

ROWS, PERIOD_S = 4, 0.02
IDLE_S = 5.0
# A small checkpoint is over soon: it is made anew until there were so many inserts, of which there is a percentile.
LEAST_BUSY = 50
BATCHES, BATCH = 100, 16
MOST_SLOWER, MOST_RESTORE_S = 3.0, 10.0
SPACE = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
ROW_BYTES = 84 * 84 * 4


@dataclass
class Proof:
    """What was measured.

    Attributes:
        nbytes: Size of the checkpoint in bytes.
        checkpoint_s: How long each took, in seconds.
        idle_ms: What acked inserts took without it, in milliseconds, sorted.
        busy_ms: What they took during it.
        restore_s: From the start of the process to the first sample, in seconds.
        equal: Whether the next batches were the same.
    """

    nbytes: int
    checkpoint_s: float
    idle_ms: list[float]
    busy_ms: list[float]
    restore_s: float
    equal: bool

    @property
    def slower(self) -> float:
        """How much longer the 99th percentile was during the checkpoint."""
        return p99(self.busy_ms) / p99(self.idle_ms)


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(values, 99))


class Env:
    """Images of four rows, in episodes of fifty steps."""

    def __init__(self, rows: int = ROWS, env_id: str = "env") -> None:
        self.meta = EnvMeta(env_id, gym.spaces.Discrete(4), SPACE, rows)
        self.rows, self.number = rows, 0
        self.rng = np.random.default_rng(0)

    def step(self) -> tuple[EnvRet, PolicyResponse]:
        """The next observation and the answer to it."""
        self.number += 1
        seen = self.rng.integers(0, 255, (self.rows, 84, 84, 4), np.uint8)
        last, info = np.zeros(self.rows, np.bool_), {}
        if self.number % 50 == 0:
            last, info = (
                ~last,
                {
                    "final_rows": np.arange(self.rows, dtype=np.int32),
                    "final_observation": seen,
                },
            )
        env_ret = EnvRet(
            self.meta.env_id or "",
            seen,
            last_reward=np.ones(self.rows, np.float32),
            last_terminated=np.zeros(self.rows, np.bool_),
            last_truncated=last,
            info=info,
        )
        return env_ret, PolicyResponse(self.meta.env_id or "", action=np.zeros(self.rows, np.int64))


def server(folder: Path, address: str, capacity: int, **buffer: Any) -> ServerProcess:
    """A buffer server over a data directory."""
    section = {
        "type": "ReplayBuffer",
        "capacity": capacity,
        "auto_truncate_episode": True,
        "sampler": {"type": "uniform", "seed": 0},
        "data_dir": str(folder / "data"),
        "checkpoint_keep": 3,  # so that one that the server makes by itself removes none of these
        "max_bytes": 2 * capacity * ROW_BYTES + 2**29,
        **buffer,
    }
    file = folder / "buffer.yaml"
    file.write_text(json.dumps({"buffer": section}))
    arguments = ["-m", "rlightning.services.buffer_server", "--config", str(file)]
    return ServerProcess([*arguments, "--listen", address], folder).start()


async def insert_until(client: InsertClient, env: Env, stop: asyncio.Event) -> list[float]:
    """Inserts at a fixed rate; returns what each took until its ack, from when it was due."""
    took, due = [], time.perf_counter()
    while not stop.is_set():
        due += PERIOD_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await client.insert(*env.step())
        await client.flush(60)
        took.append(1e3 * (time.perf_counter() - due))
    return sorted(took)


async def batches(address: str) -> list[np.ndarray[Any, Any]]:
    """The next batches of a server."""
    async with SampleClient(address, batch_size=BATCH, prefetch=1) as learner:
        return [
            np.array((await learner.next_batch(60)).columns["observation"]) for _ in range(BATCHES)
        ]


async def prove(
    megabytes: int, folder: Path, durability: str = "process", idle_s: float = IDLE_S
) -> Proof:
    """Does all of it once; what inserts take without a checkpoint is measured for `idle_s`."""
    capacity = megabytes * 10**6 // ROW_BYTES
    address = free_address()
    running = server(folder, address, capacity, durability=durability)
    try:
        filler, env = Env(64, "filler"), Env()
        async with (
            InsertClient(address, spec=filler.meta, window_bytes=2**28) as filling,
            InsertClient(address, spec=env.meta) as client,
            BufferClient(address) as asked,
        ):
            for _ in range(capacity // 64 + 100):
                await filling.insert(*filler.step())
            await filling.flush(60)
            await filling.close()
            # So that none is due, or still being written, while it is idle.
            await asked.checkpoint()
            await asyncio.sleep(1.0)
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(idle_s, stop.set)
            idle = await insert_until(client, env, stop)
            stop = asyncio.Event()
            inserting = asyncio.create_task(insert_until(client, env, stop))
            begun, first, count = time.perf_counter(), env.number, 0
            while not count or env.number < first + LEAST_BUSY:
                made, count = await asked.checkpoint(), count + 1
            checkpoint_s = (time.perf_counter() - begun) / count
            stop.set()
            busy = await inserting
            name = (await asked.checkpoint()).name
            expected = await batches(address)
        running.kill()
        begun = time.perf_counter()
        running = server(folder, address, capacity, durability="none", restore=name)
        async with SampleClient(address, batch_size=BATCH, prefetch=0) as learner:
            await learner.next_batch(60)
            restore_s = time.perf_counter() - begun
        running.kill()
        running = server(folder, address, capacity, durability="none", restore=name)
        again = await batches(address)
        equal = all(np.array_equal(*pair) for pair in zip(expected, again, strict=True))
        return Proof(made.nbytes, checkpoint_s, idle, busy, restore_s, equal)
    finally:
        running.kill()


def main() -> int:
    """Proves it for as many megabytes as the command line says."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    good = True
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}\n")
    for durability in ("none", "process", "power"):
        with scratch_folder() as folder:
            proof = asyncio.run(prove(megabytes, Path(folder).resolve(), durability))
        good &= proof.equal and proof.slower <= MOST_SLOWER and proof.restore_s <= MOST_RESTORE_S
        print(
            f"durability {durability}: checkpoint of {proof.nbytes / 1e6:,.0f} MB in {proof.checkpoint_s:.1f} s; "
            f"p99 of acked inserts {p99(proof.idle_ms):.1f} ms idle, {p99(proof.busy_ms):.1f} ms during it "
            f"({proof.slower:.1f}x, at most {MOST_SLOWER:g}x; {len(proof.busy_ms)} inserts); "
            f"to the first sample {proof.restore_s:.1f} s (at most {MOST_RESTORE_S:g} s); "
            f"the next {BATCHES} batches are {'the same' if proof.equal else 'OTHERS'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
