"""A checkpoint of a size that a test can afford; `make prove-checkpoint` does the same with 2 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prove_checkpoint import LEAST_BUSY, MOST_RESTORE_S, MOST_SLOWER, p99, prove

MEGABYTES = 100


@pytest.mark.crash
@pytest.mark.timeout(300)
async def test_inserts_go_on_meanwhile_and_the_next_batches_are_the_same(tmp_path: Path) -> None:
    proof = await prove(MEGABYTES, tmp_path, "process", idle_s=2.0)
    assert proof.equal
    assert proof.nbytes > 0.9e6 * MEGABYTES
    print(f"p99 of acked inserts {proof.slower:.2f}x idle, restored in {proof.restore_s:.1f} s")
    assert len(proof.busy_ms) >= LEAST_BUSY
    # Twice the bound, or as much as other programs hold one of few inserts up for.
    assert p99(proof.busy_ms) <= max(2 * MOST_SLOWER * p99(proof.idle_ms), 100)
    assert proof.restore_s <= MOST_RESTORE_S
