"""A checkpoint of a size that a test can afford; `make prove-checkpoint` does the same with 2 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prove_checkpoint import MOST_SLOWER, p99, prove

MEGABYTES = 100


@pytest.mark.crash
@pytest.mark.timeout(300)
async def test_inserts_go_on_meanwhile_and_the_next_batches_are_the_same(tmp_path: Path) -> None:
    proof = await prove(MEGABYTES, tmp_path, "process", idle_s=2.0)
    assert proof.equal
    assert proof.nbytes > 0.9e6 * MEGABYTES
    # Twice the bound, or half a second, since tests run on machines that do other things.
    assert p99(proof.busy_ms) < max(2 * MOST_SLOWER * p99(proof.idle_ms), 500)
    assert proof.restore_s < 60
