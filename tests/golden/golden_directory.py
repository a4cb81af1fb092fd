"""Data directories of a buffer server, as each version of their format has them.

`python -m tests.golden.golden_directory` writes those of the format of now, from the root of the
repository; the last version of a format writes what stays of it here.
"""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlightning.buffer.durable.directory import FORMAT
from rlightning.buffer.remote_buffer import InsertClient
from rlightning.testing import assert_eventually
from rlightning.types import EnvRet
from tests.integration.buffer.harness import asking, buffer_server, inserting, sampling
from tests.unit.buffer.scripted import ScriptedEnv, answer

TABLE: dict[str, Any] = {"type": "ReplayBuffer", "auto_truncate_episode": True, "capacity": 64}
BUFFER: dict[str, Any] = {
    **TABLE,
    "tables": {
        "replay": {**TABLE, "sampler": {"type": "prioritised", "seed": 3}},
        "queue": {**TABLE, "rate_limiter": {"queue_size": 60}},
    },
    "durability": "process",
}
OUTCOMES: dict[str, Any] = {
    **TABLE,
    "tables": {
        "replay": {**TABLE, "capacity": 200},
        "steps": {
            **TABLE,
            "capacity": 200,
            "functions": {"postprocess_fn": "tests.integration.buffer.test_functions:three_steps"},
        },
        "rollouts": {"type": "RolloutBuffer", "rollout_length": 4, "max_rollouts": 16},
    },
    "durability": "process",
}
"""Tables with an extra field `last_time`; the observation tells what it is, see `timed`."""
PRIORITY = 7.0
STEPS = 12


def archive(version: int, what: str = "") -> Path:
    """Returns where a directory of a format is."""
    return Path(__file__).parent / f"buffer-format-{version}{what}.tar.xz"


def ends(row: int, episode: int) -> tuple[int, bool]:
    return 4 + (episode + row) % 3, True


async def write_directory(folder: Path) -> None:
    """Does to a buffer server something of all that its directory has to have."""
    env = ScriptedEnv(2, ends)
    async with (
        buffer_server(**BUFFER, data_dir=str(folder)) as buffers,
        inserting(buffers.address, env.meta, tables=["replay", "queue"]) as writer,
        asking(buffers.address) as asked,
    ):
        queue = buffers.service._tables["queue"]
        env_ret = env.reset()
        for step in range(STEPS):
            await writer.insert(env_ret, answer(env_ret, step))
            env_ret = env.step()
            if step != STEPS - 4:
                continue
            await writer.flush(10)
            async with sampling(
                buffers.address, table="queue", batch_size=4, prefetch=0, client_id="learner"
            ) as learner:
                await learner.next_batch(5)
            await assert_eventually(lambda: queue.lending is not None and not queue.lending.lent)
            async with sampling(
                buffers.address, table="replay", batch_size=4, prefetch=0
            ) as learner:
                columns = (await learner.next_batch(5)).columns
            where, which = columns["sample_index"], columns["sample_generation"]
            await asked.update_priorities(
                where, np.full(4, PRIORITY), generations=which, table="replay"
            )
            await asked.checkpoint()
        await writer.flush(10)


def timed(env_ret: EnvRet) -> EnvRet:
    """Adds the extra field `last_time`: ten times the step."""
    env_ret._extra = {"last_time": 10 * np.asarray(env_ret.step)}
    return env_ret


async def act_timed(writer: InsertClient, env: ScriptedEnv, steps: int) -> None:
    """Inserts steps with an extra field."""
    env_ret = env.reset()
    for _ in range(steps):
        await writer.insert(timed(env_ret), answer(env_ret))
        env_ret = env.step()
    await writer.flush(10)


async def write_outcomes(folder: Path) -> None:
    """Has rows with an extra field `last_time` in a checkpoint, and those of another env after."""
    one, two = (ScriptedEnv(2, ends, name) for name in ("one", "two"))
    tables = [*OUTCOMES["tables"]]
    async with (
        buffer_server(**OUTCOMES, data_dir=str(folder)) as buffers,
        asking(buffers.address) as asked,
        inserting(buffers.address, one.meta, tables=tables) as first,
    ):
        await act_timed(first, one, STEPS)
        await asked.checkpoint()
        async with inserting(buffers.address, two.meta, tables=tables) as second:
            await act_timed(second, two, STEPS)


async def main() -> None:
    for what, write in (("", write_directory), ("-outcomes", write_outcomes)):
        with TemporaryDirectory() as folder:
            await write(Path(folder))
            with tarfile.open(archive(FORMAT, what), "w:xz") as file:
                file.add(folder, arcname=".")


if __name__ == "__main__":
    asyncio.run(main())
