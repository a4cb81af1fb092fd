"""Writers that insert while their server is killed again and again; nothing acked may be lost.

`python -m tests.integration.durability.crash KILLS` does it for longer than a test can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlightning.buffer.remote_buffer import BufferClient, InsertClient, SampleClient
from rlightning.testing import assert_eventually
from rlightning.testing.ports import free_address
from rlightning.testing.processes import ServerProcess
from rlightning.utils.config import RpcConfig
from rlightning.utils.failpoints import EXIT_CODE
from rlightning.v1 import buffer_service_pb2 as pb
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_transitions

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
RPC = RpcConfig(heartbeat_s=0.2, lease_s=5.0, resume_window_s=60.0, reconnect_max_ms=100)
WRITERS = 3
ROWS = 2
EVICTING = 200
"""A capacity that is overwritten at least once a second, also under load."""

# Every two steps between a message and its ack, and of a checkpoint, with a passage that is reached
# while they are busy.
FAILPOINTS = {
    "insert.journaled": 40,
    "insert.stored": 40,
    "journal.before_write": 12,
    "journal.half_written": 12,
    "journal.written": 12,
    "insert.settled": 12,
    "journal.segment_made": 1,
    "journal.segment_named": 1,
    "checkpoint.captured": 1,
    "checkpoint.data_written": 1,
    "checkpoint.before_rename": 1,
    "checkpoint.renamed": 1,
    "checkpoint.pruned": 1,
}
POWER_FAILPOINTS = {"journal.synced": 12}
# And of a batch that leaves.
LEAVING_FAILPOINTS = {"sample.lent": 12, "sample.released": 12}

QUEUE = {"rate_limiter": {"queue_size": 40}}
BATCH = 8
ROLLOUTS = {"type": "RolloutBuffer", "rollout_length": 8, "max_rollouts": 3}
LENGTH = 8


def ends(row: int, episode: int) -> tuple[int, bool]:
    """Episodes of 3 to 13 steps, every other one terminated."""
    return 3 + (episode * 7 + row) % 11, episode % 2 == 0


class RepeatingClient(InsertClient):
    """Sends all of its window again after a cut, also what the server says that it has."""

    async def _on_welcome(self, reader: Any) -> None:
        window = tuple(self._window)
        await super()._on_welcome(reader)
        assert self._session is not None
        epoch = pb.InsertRequest(insert=pb.InsertItems(epoch=self._session.epoch))
        for sent in window:
            await self._session.send_now(sent.data + epoch.SerializeToString())


@dataclass
class Outcome:
    """What happened.

    Attributes:
        deaths: How often the server died of what.
        transitions: What was inserted and acked.
        busy_s: For how long acks came, in seconds; not while it started again.
    """

    deaths: Counter[str] = field(default_factory=Counter)
    transitions: int = 0
    busy_s: float = 0.0

    def wraps_per_s(self, capacity: int) -> float:
        """How often a ring was overwritten, by second."""
        return self.transitions / capacity / self.busy_s


@dataclass
class Stop:
    """After how many steps the writers end; None while they go on."""

    at: int | None = None


@dataclass
class Writer:
    """An env that acts for as long as it may, and what the buffer should have of it."""

    client: InsertClient
    env: ScriptedEnv
    expected: list[list[tuple[int, int]]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.expected[0]) if self.expected else 0

    async def act(self, stop: Stop) -> None:
        self.expected = [[] for _ in self.env.rows]
        env_ret = self.env.reset()
        while stop.at is None or self.steps < stop.at:
            await self.client.insert(env_ret, answer(env_ret))
            for row, steps in enumerate(self.expected):
                steps.append((int(self.env.episode[row]), int(self.env.step_count[row])))
            env_ret = self.env.step()
            await asyncio.sleep(0.001)
        await self.client.insert(env_ret, None)
        await self.client.flush(PATIENCE_S)


class Server:
    """A buffer server process with a data directory, under one address."""

    def __init__(self, folder: Path, **buffer: Any) -> None:
        settings = {
            "type": "ReplayBuffer",
            "capacity": 10**6,
            "auto_truncate_episode": True,
            "durability": "process",
            "data_dir": str(folder / "data"),
            "restore": "latest",
            "checkpoint_interval_s": 0.15,
            **buffer,
        }
        rpc = RPC.model_dump(exclude_defaults=True)
        file = folder / "buffer.yaml"
        file.write_text(json.dumps({"buffer": settings, "services": {"buffer": {"rpc": rpc}}}))
        self.address = free_address()
        arguments = ["-m", "tests.integration.durability.server", "--config", str(file)]
        self.process = ServerProcess(
            [*arguments, "--listen", self.address],
            folder,
            environment={"PYTHONPATH": str(ROOT)},
        )

    def start(self, failpoints: str = "") -> None:
        self.process.environment["RLIGHTNING_FAILPOINTS"] = failpoints
        self.process.start()


async def crash(
    folder: Path,
    *,
    kills: int,
    seed: int = 0,
    failpoints: Mapping[str, int] = FAILPOINTS,
    plan: Sequence[str] = (),
    **server: Any,
) -> Outcome:
    """Kills a server `kills` times while writers write, and checks what is there at the end.

    Args:
        folder: For its data and its log.
        kills: How often.
        seed: Of what is random.
        failpoints: Where it may die by itself, and a passage that is soon reached there.
        plan: Where it dies, in this order; "" for a kill at a random moment. Default: half of each.
        server: Keys of the section `buffer`. What a queue or rollouts hand out is checked as it is
            used: each transition once, in order.

    Returns:
        What happened.
    """
    rng = random.Random(seed)
    outcome = Outcome()
    deaths = outcome.deaths
    running = Server(folder, **server)
    running.start()
    stop = Stop()
    leaves = "rate_limiter" in server or "type" in server
    if not plan:
        plan = [*failpoints, *[""] * len(failpoints)]
        rng.shuffle(plan)
    try:
        async with AsyncExitStack() as stack:
            writers = []
            for number in range(WRITERS):
                env = ScriptedEnv(ROWS, ends, f"env-{number}")
                env.rows = env.rows + number * ROWS  # so that a transition says whose it is
                client = RepeatingClient(running.address, spec=env.meta, rpc=RPC)
                writers.append(Writer(await stack.enter_async_context(client), env))
            batch_size = (0 if "type" in server else BATCH) if leaves else 16
            learner = await stack.enter_async_context(
                SampleClient(running.address, batch_size=batch_size, prefetch=1, rpc=RPC)
            )
            used: list[Any] = []
            asked = await stack.enter_async_context(BufferClient(running.address, rpc=RPC))
            acting = [asyncio.create_task(writer.act(stop)) for writer in writers]
            learning = asyncio.create_task(sample(learner, used))
            timing = asyncio.create_task(time_acks(writers, outcome))
            for kill in range(kills):
                name = plan[kill % len(plan)]
                if name:
                    hit = rng.randint(1, failpoints[name])
                    await die_at(running, name, hit, acting)
                    deaths[name] += 1
                else:
                    await progress(writers, rng.randint(1, 40), acting)
                    await asyncio.sleep(rng.uniform(0, 0.02))
                    running.process.kill()
                    deaths["kill -9"] += 1
                running.start()
            await progress(writers, 5, acting)
            if "capacity" in server:
                twice = 2 * server["capacity"] // (ROWS * len(writers))
                await progress(writers, max(0, twice - min(w.steps for w in writers)), acting)
            stop.at = (max(writer.steps for writer in writers) // LENGTH + 2) * LENGTH
            await asyncio.gather(*acting)
            check_alive([learning, timing])
            outcome.transitions = ROWS * sum(writer.steps for writer in writers)
            await asked.truncate([writer.env.env_id for writer in writers])
            if leaves:
                await all_used(used, len(writers) * ROWS * stop.at, learning)
                check_used(used, writers)
            else:
                check(await asked.get(), writers, server.get("capacity", 10**6))
            learning.cancel()
            timing.cancel()
            assert not any(writer.client.rebased for writer in writers)
    finally:
        if running.process.child.poll() is None:
            running.process.kill()
    return outcome


async def time_acks(writers: list[Writer], outcome: Outcome) -> None:
    """Adds up the time in which acks come."""
    before, begun = 0, time.monotonic()
    while True:
        await asyncio.sleep(0.1)
        acked, now = sum(writer.client.acked for writer in writers), time.monotonic()
        if acked > before:
            outcome.busy_s += now - begun
        before, begun = acked, now


async def die_at(server: Server, name: str, hit: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Restarts the server with a failpoint armed, and waits for its end."""
    server.process.kill()
    server.start(f"{name}=exit@{hit}")
    child = server.process.child

    def ended() -> bool:
        check_alive(tasks)
        return child.poll() is not None

    await assert_eventually(ended, PATIENCE_S, f"{name} is reached")
    assert child.poll() == EXIT_CODE, server.process.log[-3000:]


async def progress(
    writers: list[Writer], messages: int, tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Waits until each writer has so many acks more."""
    wanted = [writer.client.acked + messages for writer in writers]

    def reached() -> bool:
        check_alive(tasks)
        return all(w.client.acked >= n for w, n in zip(writers, wanted, strict=True))

    await assert_eventually(reached, PATIENCE_S)


def check_alive(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises what ended a task that should go on."""
    for task in tasks:
        if task.done():
            task.result()


async def sample(learner: SampleClient, used: list[Any]) -> None:
    """Checks that what is sampled meanwhile belongs together."""
    while True:
        columns = (await learner.next_batch()).columns
        check_transitions(columns)
        used.append(columns)


async def all_used(used: list[Any], total: int, learning: asyncio.Task[None]) -> None:
    """Waits until so many transitions were used, or more."""

    def reached() -> bool:
        check_alive([learning])
        return sum(columns["reward"].size for columns in used) >= total

    await assert_eventually(reached, PATIENCE_S)


def check_used(used: list[Any], writers: list[Writer]) -> None:
    """Asserts that every transition was handed out once, in the order of its row."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for columns in used:
        rows = columns["observation"][..., 0].ravel().tolist()
        pairs = zip(columns["episode_id"].ravel(), columns["step"].ravel(), strict=True)
        for row, (episode, step) in zip(rows, pairs, strict=True):
            seen.setdefault(int(row), []).append((int(episode), int(step)))
    for writer in writers:
        for row, expected in zip(writer.env.rows.tolist(), writer.expected, strict=True):
            assert seen[row] == expected, row


def check(columns: dict[str, Any], writers: list[Writer], capacity: int) -> None:
    """Asserts that everything acked is there once, in order, but for what was overwritten."""
    count = check_transitions(columns)
    total = sum(len(steps) for writer in writers for steps in writer.expected)
    assert count == min(total, capacity), (count, total)
    for writer in writers:
        for row, expected in zip(writer.env.rows.tolist(), writer.expected, strict=True):
            mine = columns["observation"][:, 0] == row
            pairs = zip(columns["episode_id"][mine], columns["step"][mine], strict=True)
            found = [(int(episode), int(step)) for episode, step in pairs]
            # The ring begins anywhere; from there on, they are in the order in which they came.
            begin = found.index(min(found)) if found else 0
            assert found[begin:] + found[:begin] == expected[len(expected) - len(found) :], row


def main(arguments: Sequence[str] | None = None) -> None:
    """Kills as often as the command line says.

    Raises:
        AssertionError: The ring was overwritten less than once in a second.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    kills = parser.parse_args(arguments).kills
    variants: list[dict[str, Any]] = [
        {},
        {"capacity": EVICTING},
        {"durability": "power", "failpoints": {**FAILPOINTS, **POWER_FAILPOINTS}},
        {**QUEUE, "failpoints": {**FAILPOINTS, **LEAVING_FAILPOINTS}},
        {**ROLLOUTS, "failpoints": {**FAILPOINTS, **LEAVING_FAILPOINTS}},
    ]
    for number, variant in enumerate(variants):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            count = -(-kills // len(variants))
            outcome = asyncio.run(crash(Path(folder), kills=count, seed=number, **variant))
        deaths, took = outcome.deaths, time.monotonic() - begun
        print(f"{variant}: {deaths.total()} deaths in {took:.0f} s")
        for name, times in sorted(deaths.items()):
            print(f"  {times:4d} {name}")
        if "capacity" in variant:
            wraps = outcome.wraps_per_s(EVICTING)
            print(f"  overwritten {wraps:.1f} times a second")
            assert wraps >= 1, f"overwritten {wraps:.2f} times a second, expected at least once"


if __name__ == "__main__":
    main()
