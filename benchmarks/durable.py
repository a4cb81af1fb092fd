"""What durability costs: acked inserts of 64 rows with `process` and `power` against `none`.

In one process a table takes the rows as a server does, without the network; a window of eight messages may be
unacked. Through the network one client writes to a server process, by bytes: a journal has no use for shared memory,
and what that saves is in `buffer-net`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.harness import Ratio, report, run_rounds, scratch_folder
from rlightning.buffer.buffer_table import BufferTable, insert_into
from rlightning.buffer.durable.store import DurableStore
from rlightning.buffer.pipeline import Item
from rlightning.buffer.remote_buffer import InsertClient
from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing.processes import ServerProcess
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig, RpcConfig
from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer, fill_env_ret, fill_policy_response

ROWS, WINDOW = 64, 8
MODES = ("none", "process", "power")
# Capacity, and steps of an episode.
KINDS = {"vec": (100_000, 100), "img": (8_000, 20)}
SPACES: dict[str, gym.Space[Any]] = {
    "vec": gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "img": gym.spaces.Box(0, 255, (84, 84, 4), np.uint8),
}
TARGETS = {("network", "img"): 0.9, ("network", "vec"): 0.9, ("in process", "img"): 0.8}

Steps = list[tuple[EnvRet, PolicyResponse]]


def meta(kind: str) -> EnvMeta:
    """The env that is written."""
    return EnvMeta("env", gym.spaces.Discrete(4), SPACES[kind], ROWS)


def steps(kind: str) -> Steps:
    """One episode of 64 rows, which the env cuts off at its end."""
    rng, length = np.random.default_rng(0), KINDS[kind][1]
    seen: list[Any] = [
        rng.normal(size=(ROWS, 4)).astype(np.float32)
        if kind == "vec"
        else rng.integers(0, 255, (ROWS, 84, 84, 4), np.uint8)
        for _ in range(5)
    ]
    pairs = []
    for number in range(length):
        last = np.full(ROWS, number == 0)
        info = {}
        if number == 0:
            info = {
                "final_rows": np.arange(ROWS, dtype=np.int32),
                "final_observation": seen[-1],
            }
        env_ret = EnvRet(
            "env",
            seen[number % 5],
            last_reward=rng.normal(size=ROWS).astype(np.float32),
            last_terminated=np.zeros(ROWS, np.bool_),
            last_truncated=last,
            info=info,
        )
        pairs.append((env_ret, PolicyResponse("env", action=rng.integers(0, 4, ROWS))))
    return pairs


def message(seq: int, env_ret: EnvRet, response: PolicyResponse) -> bytes:
    """An encoded insert."""
    writer, request = Writer(), pb.InsertRequest()
    request.insert.seq = seq
    item = request.insert.items.add()
    fill_env_ret(item.env_ret, env_ret, writer)
    fill_policy_response(item.response, response, writer)
    return writer.finish(request)


def settings(kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """Section `buffer`."""
    kept = {} if mode == "none" else {"data_dir": str(folder / f"{kind}-{mode}")}
    return {
        "type": "ReplayBuffer",
        "capacity": KINDS[kind][0],
        "auto_truncate_episode": True,
        "durability": mode,
        "max_bytes": 2**30,
        **kept,
    }


class InProcess:
    """A table and its store."""

    def __init__(self, kind: str, mode: str, folder: Path) -> None:
        config = BufferConfig(**settings(kind, mode, folder))
        self.table = BufferTable("default", config)
        self.store = DurableStore(config, {"default": self.table}, lambda *_: [])
        self.pairs = steps(kind)
        self.messages = [message(1, *pair) for pair in self.pairs]
        self.number = 0
        self.kind = kind

    async def start(self) -> None:
        """Opens the store."""
        self.store.open()
        await self.store.begin(on_full=lambda _: None, on_lost=lambda _: None)
        self.table.open_writer(meta(self.kind), "writer")

    async def run(self, seconds: float) -> float:
        """Inserts for a while; returns acked rows per second."""
        window: deque[asyncio.Task[None]] = deque()
        begun, first = time.perf_counter(), self.number
        while time.perf_counter() - begun < seconds:
            index = self.number % len(self.pairs)
            self.number += 1
            insert_into((self.table,), "env", [Item(*self.pairs[index])], self._journal(index))
            if self.store.durable:
                window.append(asyncio.create_task(self.store.settled()))
                if len(window) >= WINDOW:
                    await window.popleft()
            elif self.number % WINDOW == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*window)
        return ROWS * (self.number - first) / (time.perf_counter() - begun)

    def _journal(self, index: int) -> Callable[[], None]:
        return lambda: self.store.insert(
            ["default"], "writer", "env", self.number, self.messages[index]
        )

    async def close(self) -> None:
        """Closes the store."""
        await self.store.close()


class Network:
    """A server process and a client of it."""

    def __init__(self, kind: str, mode: str, folder: Path) -> None:
        own = folder / f"server-{kind}-{mode}"
        own.mkdir()
        file = own / "buffer.yaml"
        file.write_text(json.dumps({"buffer": settings(kind, mode, folder)}))
        arguments = ["-m", "rlightning.services.buffer_server", "--config", str(file)]
        self.server = ServerProcess(arguments, own, environment=MALLOC_ENV)
        self.kind = kind
        self.pairs = steps(kind)
        self.number = 0

    async def start(self) -> None:
        """Starts the server and connects to it."""
        self.server.start()
        address = await asyncio.to_thread(self.server.address, 30.0)
        self.client = InsertClient(
            address,
            spec=meta(self.kind),
            window_items=WINDOW,
            window_bytes=2**28,
            rpc=RpcConfig(shared_memory_bytes=0),
        )
        await self.client.start()

    async def run(self, seconds: float) -> float:
        """Inserts for a while; returns acked rows per second."""
        begun, first = time.perf_counter(), self.number
        while time.perf_counter() - begun < seconds:
            await self.client.insert(*self.pairs[self.number % len(self.pairs)])
            self.number += 1
        await self.client.flush(60)
        return ROWS * (self.number - first) / (time.perf_counter() - begun)

    async def close(self) -> None:
        """Stops the server."""
        await self.client.close()
        self.server.kill()


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables."""
    good = True
    _tune_malloc()
    # One loop for all: the clients live on from one cell to the next.
    with closing(asyncio.new_event_loop()) as loop:
        wait = loop.run_until_complete
        for where, make in (("in process", InProcess), ("network", Network)):
            for kind in KINDS:
                with scratch_folder() as folder:
                    cells = {}
                    running = {mode: make(kind, mode, Path(folder).resolve()) for mode in MODES}
                    for mode, one in running.items():
                        wait(one.start())
                        wait(one.run(2 * seconds))
                        cells[mode] = lambda one=one: wait(one.run(seconds))
                    table = run_rounds(cells, rounds=rounds, unit="acked rows/s")
                    for one in running.values():
                        wait(one.close())
                floor = TARGETS.get((where, kind))
                ratios = [
                    Ratio(f"{where}, {kind}: process / none", "process", "none", floor),
                    Ratio(f"{where}, {kind}: power / none", "power", "none"),
                ]
                title = f"durability, {where}, blocks of 64, {kind}"
                good &= report(title, table, ratios, slack=slack)
    return good


def _tune_malloc() -> None:
    """Gives this process the allocator of a server, which `MALLOC_ENV` sets where it starts."""
    options = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # of mallopt(3)
    for name, value in MALLOC_ENV.items():
        assert ctypes.CDLL(None).mallopt(options[name], int(value)) == 1
