"""A checkpoint of a size that a test can afford; `make prove-checkpoint` does the same with 2 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prove_checkpoint import p99, prove

MEGABYTES = 20


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_inserts_go_on_meanwhile_and_the_next_batches_are_the_same(tmp_path: Path) -> None:
    proof = await prove(MEGABYTES, tmp_path, "process", idle_s=0.5)
    assert proof.equal
    assert proof.nbytes > 0.9e6 * MEGABYTES
    # Generous, since tests run on machines that do other things: a loop that is held up takes longer.
    assert p99(proof.busy_ms) < 10e3
    assert proof.restore_s < 60
