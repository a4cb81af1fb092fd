"""Memory of 100,000 steps of stacks of 4 frames of 84x84 pixels: of a buffer in a process of its own, and of a buffer server.

The naive size is that of both observations of every transition. Episodes have 1,000 steps; frames are those of a
ball and two bats on a still background, which compress as frames of simple games do.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness import Ratio, Table, report, scratch_folder
from rlightning.buffer import BufferConfig, ReplayBuffer, StorageConfig
from rlightning.buffer.remote_buffer import InsertClient, SampleClient
from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing import ServerProcess
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config.buffer import FrameStackConfig

STEPS, EPISODE, SIDE, DEPTH = 100_000, 1_000, 84, 4
NAIVE_MB = STEPS * 2 * DEPTH * SIDE * SIDE / 1e6
STORAGES = {
    "each observation once": StorageConfig(),
    "each frame once": StorageConfig(frame_stack={"observation": FrameStackConfig(axis=0)}),
    "each frame once, zlib": StorageConfig(
        frame_stack={"observation": FrameStackConfig(axis=0)}, compression={"observation": "zlib"}
    ),
}
# What a buffer server is filled with as well, by an env of so many rows.
SERVED = ("each frame once", "each frame once, zlib")
ROWS = 4


def episodes() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yields episodes of stacks, [steps, 4, 84, 84]."""
    rng = np.random.default_rng(0)
    background = (rng.random((SIDE, SIDE)) < 0.05).astype(np.uint8) * 90
    for _ in range(STEPS // EPISODE):
        frames = np.repeat(background[None], EPISODE + DEPTH, axis=0)
        paths = np.cumsum(rng.integers(-3, 4, (EPISODE + DEPTH, 4)), axis=0) % (SIDE - 12)
        for frame, (x, y, left, right) in zip(frames, paths.tolist(), strict=True):
            frame[x : x + 3, y : y + 3] = 255
            frame[left : left + 12, 2:4] = 200
            frame[right : right + 12, -4:-2] = 200
        stacks = np.lib.stride_tricks.sliding_window_view(frames, DEPTH, axis=0)
        stacks = np.moveaxis(stacks, -1, 1)
        ends = np.zeros(EPISODE, np.bool_)
        ends[-1] = True
        yield {
            "observation": stacks[:-1],
            "next_observation": stacks[1:],
            "action": rng.integers(0, 6, EPISODE),
            "reward": np.zeros(EPISODE, np.float32),
            "terminated": ends,
            "truncated": np.zeros(EPISODE, np.bool_),
        }


def resident_mb(pid: int | str = "self") -> float:
    """Returns what a process takes of the machine's memory, in MB."""
    gc.collect()
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def fill(name: str) -> float:
    """Fills a buffer; returns by how many MB this process has grown."""
    before = resident_mb()
    config = BufferConfig(
        type="ReplayBuffer", capacity=STEPS, storage=STORAGES[name], max_bytes=10**11
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    for episode in episodes():
        buffer.add_episode(episode)
    grown = resident_mb() - before
    assert buffer.size() == STEPS
    (batch,) = buffer.sample(256)
    check(batch)
    return grown


def check(batch: dict[str, Any]) -> None:
    """Asserts that what comes out is whole: the newer frames are the older ones of the next stack."""
    moved = batch["next_observation"][:, :-1] == batch["observation"][:, 1:]
    assert moved.all()


def steps() -> Iterator[tuple[EnvRet, PolicyResponse]]:
    """Yields what an env of `ROWS` rows returns, and the answers to it; the episodes of all rows end together."""
    running = np.zeros(ROWS, np.bool_)
    final: Any = None
    source = episodes()
    for group in iter(lambda: [one for _, one in zip(range(ROWS), source, strict=False)], []):
        seen = np.stack([one["observation"] for one in group], 1)
        for t, observation in enumerate(seen):
            info: dict[str, Any] = {}
            if t == 0 and final is not None:
                info = {"final_rows": np.arange(ROWS, dtype=np.int32), "final_observation": final}
            rewards = np.zeros(ROWS, np.float32)
            env_ret = EnvRet("env", observation, rewards, running | bool(info), running, info)
            yield env_ret, PolicyResponse("env", action=np.zeros(ROWS, np.int64))
        final = np.stack([one["next_observation"][-1] for one in group])
    info = {"final_rows": np.arange(ROWS, dtype=np.int32), "final_observation": final}
    yield (
        EnvRet("env", final, np.zeros(ROWS, np.float32), ~running, running, info),
        PolicyResponse("env", action=np.zeros(ROWS, np.int64)),
    )


async def serve(name: str, folder: Path) -> float:
    """Fills a buffer server through the network; returns by how many MB its process has grown."""
    storage = STORAGES[name].model_dump(exclude_defaults=True)
    section = {"type": "ReplayBuffer", "capacity": STEPS, "auto_truncate_episode": True}
    config = folder / "buffer.yaml"
    config.write_text(json.dumps({"buffer": {**section, "storage": storage}}))
    command = ["-m", "rlightning.services.buffer_server", "--config", str(config)]
    space = gym.spaces.Box(0, 255, (DEPTH, SIDE, SIDE), np.uint8)
    meta = EnvMeta("env", gym.spaces.Discrete(6), space, ROWS)
    with ServerProcess(command, folder, environment=MALLOC_ENV) as server:
        address = await asyncio.to_thread(server.address)
        async with InsertClient(address, spec=meta, window_bytes=2**25) as client:
            before = resident_mb(server.child.pid)
            for step in steps():
                await client.insert(*step)
            await client.flush(60)
            grown = resident_mb(server.child.pid) - before
        async with SampleClient(address, batch_size=256) as learner:
            check((await learner.next_batch(60)).columns)
    return grown


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the table; each storage is filled once, in a process of its own."""
    table = Table("MB", {"naive": [NAIVE_MB]})
    for name in STORAGES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.bench_memory", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        table.rounds[name] = [float(done.stdout)]
    for name in SERVED:
        with scratch_folder() as folder:
            table.rounds[f"buffer server, {name}"] = [
                asyncio.run(serve(name, Path(folder).resolve()))
            ]
    ceilings = dict.fromkeys(("each frame once", "buffer server, each frame once"), 0.2)
    ratios = [
        Ratio(f"{name} / naive", name, "naive", ceiling=ceilings.get(name))
        for name in (*STORAGES, *(f"buffer server, {name}" for name in SERVED))
    ]
    return report("Memory of 100,000 image steps, 84x84x4 uint8", table, ratios, slack=slack)


if __name__ == "__main__":
    print(fill(sys.argv[1]))
