"""A data directory of an older format opens with the rows that it had, and is of the newest then."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_directory import BUFFER, PRIORITY, archive

from rlightning.buffer.durable.directory import FORMAT
from tests.integration.buffer.harness import asking, buffer_server, sampling
from tests.unit.buffer.scripted import check_transitions

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
