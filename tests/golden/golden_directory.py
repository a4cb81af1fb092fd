"""Data directories of a buffer server, as each version of their format has them.

`python -m tests.golden.golden_directory` writes that of the format of now, from the root of the
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
from rlightning.testing import assert_eventually
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
PRIORITY = 7.0
STEPS = 12


def archive(version: int) -> Path:
    """Returns where the directory of a format is."""
    return Path(__file__).parent / f"buffer-format-{version}.tar.xz"


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


async def main() -> None:
    with TemporaryDirectory() as folder:
        await write_directory(Path(folder))
        with tarfile.open(archive(FORMAT), "w:xz") as file:
            file.add(folder, arcname=".")


if __name__ == "__main__":
    asyncio.run(main())
