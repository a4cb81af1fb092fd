"""A data directory of an older format opens with the rows that it had, and is of the newest then."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_directory import BUFFER, OUTCOMES, PRIORITY, STEPS, act_timed, archive, ends

from rlightning.buffer.durable.directory import FORMAT
from rlightning.buffer.remote_buffer import BufferClient
from tests.integration.buffer.harness import Buffers, asking, buffer_server, inserting, sampling
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions

# Transitions of each episode. Of 12 steps of two rows, the last has no outcome.
EPISODES = {2: 6, 3: 5, 4: 6, 5: 5}


@pytest.mark.parametrize("version", range(1, FORMAT))
async def test_a_directory_of_an_older_format_has_its_rows(version: int, tmp_path: Path) -> None:
    with tarfile.open(archive(version)) as file:
        file.extractall(tmp_path, filter="data")
    title = tmp_path / "FORMAT"
    assert title.read_text() == f"rlightning buffer, format {version}\n"
    for again in range(2):  # what it is then, is read too
        async with (
            buffer_server(**BUFFER, data_dir=str(tmp_path), restore="latest") as buffers,
            asking(buffers.address) as asked,
        ):
            assert title.read_text() == f"rlightning buffer, format {FORMAT}\n"
            for table in ("replay", "queue"):
                columns = await asked.get(table=table)
                assert check_transitions(columns) == sum(EPISODES.values())
                episodes, counts = np.unique(columns["episode_id"], return_counts=True)
                assert dict(zip(episodes.tolist(), counts.tolist(), strict=True)) == EPISODES
            sampler: Any = buffers.service._tables["replay"].sampler
            chances = {1.0, PRIORITY**sampler.alpha}  # of the first rows, and of what came later
            assert set(sampler._tree.values[: sum(EPISODES.values())].tolist()) == chances
            async with sampling(
                buffers.address, table="queue", batch_size=4, prefetch=0
            ) as learner:
                batch = await learner.next_batch(5)  # which was given back
                assert batch.batch_id == 2 + again
                assert batch.columns["episode_id"].tolist() == [3] * 4
                assert batch.columns["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("env_id", ["one", "three"])
async def test_a_directory_without_outcomes_of_extra_fields_goes_on_without(
    env_id: str, tmp_path: Path
) -> None:
    with tarfile.open(archive(1, "-outcomes")) as file:
        file.extractall(tmp_path, filter="data")
    env, counts = ScriptedEnv(2, ends, env_id), []
    tables = [*OUTCOMES["tables"]]
    for _ in range(2):  # also once the checkpoint is of the newest format
        async with (
            buffer_server(**OUTCOMES, data_dir=str(tmp_path), restore="latest") as buffers,
            asking(buffers.address) as asked,
        ):
            counts.append(await check_without_outcomes(buffers, asked))
            async with inserting(buffers.address, env.meta, tables=tables) as writer:
                await act_timed(writer, env, STEPS)
            counts.append(await check_without_outcomes(buffers, asked))
            await asked.checkpoint()
    assert counts[0] < counts[1] <= counts[2] < counts[3]


async def check_without_outcomes(buffers: Buffers, asked: BufferClient) -> int:
    """Checks what the tables have; returns how many transitions."""
    rollout = buffers.service._tables["rollouts"].take()
    assert rollout is not None
    for columns in (
        rollout.columns(),
        await asked.get(table="steps"),
        await asked.get(table="replay"),
    ):
        assert "time" not in columns
        np.testing.assert_array_equal(columns["last_time"], columns["step"] * 10)
    return check_transitions(columns)
