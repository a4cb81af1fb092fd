"""Memory of 100,000 steps of stacks of 4 frames of 84x84 pixels, as a process of its own takes it.

The naive size is that of both observations of every transition. Episodes have 1,000 steps; frames are those of a
ball and two bats on a still background, which compress as frames of simple games do.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Ratio, Table, report
from rlightning.buffer import BufferConfig, ReplayBuffer, StorageConfig
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


def resident_mb() -> float:
    """Returns what this process takes of the machine's memory, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
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
    # What comes out is whole: within an episode the newer frames are the older ones of the next stack.
    moved = batch["next_observation"][:, :-1] == batch["observation"][:, 1:]
    assert moved.all()
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
    ceilings = {"each frame once": 0.2}
    ratios = [
        Ratio(f"{name} / naive", name, "naive", ceiling=ceilings.get(name)) for name in STORAGES
    ]
    return report("Memory of 100,000 image steps, 84x84x4 uint8", table, ratios, slack=slack)


if __name__ == "__main__":
    print(fill(sys.argv[1]))
