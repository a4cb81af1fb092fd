"""CartPole to its target, by wall time: the cluster of processes against the same code in one process."""

from __future__ import annotations

import itertools

from benchmarks.harness import Ratio, report, run_rounds
from benchmarks.prove_demo import solve


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the table; a round is one seed, the same for both. `seconds` has no effect."""
    seeds = {"cluster": itertools.count(), "in process": itertools.count()}

    def elapsed(launcher: str, option: str) -> float:
        code, _, summary = solve(next(seeds[launcher]), ["--launcher", option])
        if code:
            raise RuntimeError(f"{launcher}: not solved: {summary}")
        return float(summary["elapsed_s"])

    cells = {
        "cluster": lambda: elapsed("cluster", "local"),
        "in process": lambda: elapsed("in process", "in-process"),
    }
    table = run_rounds(cells, rounds=rounds, unit="s from SERVING to the target")
    # Whether a seed is quick or slow differs between the two, since collection is asynchronous: only the
    # medians over the seeds compare.
    table.rounds = {cell: [table.median(cell)] for cell in table.rounds}
    ratio = Ratio("CartPole to 475, cluster / one process", "cluster", "in process", ceiling=1.5)
    return report("CartPole by wall time", table, [ratio], slack=slack)
