"""Solves CartPole with ten seeds in a row: `make prove-demo`, or `python -m benchmarks.prove_demo SEEDS [ARGS...]`.

Each run is the demo as a user starts it, one after the other. Prints a Markdown table and exits 1 when a seed failed, or took
longer than a minute from all services SERVING to the target.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WITHIN_S = 60.0


def solve(seed: int, extra: list[str]) -> tuple[int, float, dict[str, Any]]:
    """Runs `rlightning train` with one seed; returns exit code, wall seconds, its closing JSON line."""
    command = [
        str(Path(sys.executable).parent / "rlightning"),
        "train",
        "configs/cartpole.yaml",
        "--json",
    ]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--set", f"train.seed={seed}", *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    return done.returncode, time.perf_counter() - start, json.loads(lines[-1]) if lines else {}


def main() -> int:
    """Runs every seed and reports."""
    seeds, extra = int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2:]
    print(
        "| seed | exit | wall s | solved after s | env steps | mean return |\n|---|---|---|---|---|---|"
    )
    failed = 0
    for seed in range(seeds):
        code, wall, summary = solve(seed, extra)
        took = summary.get("elapsed_s", float("nan"))
        failed += not (code == 0 and took <= WITHIN_S)
        print(
            f"| {seed} | {code} | {wall:.1f} | {took:.1f} "
            f"| {summary.get('env_steps', 0):,} | {summary.get('mean_return', float('nan')):.1f} |",
            flush=True,
        )
    print(f"\n{seeds - failed} of {seeds} solved within {WITHIN_S:g} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
