"""Trains through the cluster and with Stable-Baselines3, at equal env steps: `make prove-learning`.

Each finished cell is a file in `benchmarks/learning/`, and is not run again. Arguments: cells
and numbers of seeds, such as `cartpole_ppo 3`; none for all cells and three seeds.
"""

from __future__ import annotations

import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "learning"
PAGE = ROOT / "docs" / "learning.md"
RLIGHTNING = Path(sys.executable).parent / "rlightning"
SB3_PYTHON = ROOT / ".venvs" / "sb3" / "bin" / "python"
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
BASELINE = "stable-baselines3"
CLUSTER = "rlightning"


@dataclass(frozen=True)
class Cell:
    """One task: what `rlightning train` is told beside its config, and how it is scored."""

    config: str
    steps: int
    last: int
    """The score is the mean return of so many last episodes of the budget."""
    overrides: Sequence[str] = ()


# The baseline has the hyperparameters of the Zoo; these are the same, as far as both have them.
CELLS = {
    "cartpole_ppo": Cell(
        "cartpole.yaml",
        100_000,
        100,
        (
            "env.num_envs=8",
            "learner.gae_lambda=0.8",
            "learner.gamma=0.98",
            "learner.epochs=20",
            "learner.anneal_lr=true",
            "train.lr=1e-3",
        ),
    ),
    "cartpole_dqn": Cell("cartpole_dqn.yaml", 50_000, 100),
    "pendulum_sac": Cell("pendulum_sac.yaml", 15_000, 10),
}


def main() -> None:
    words = sys.argv[1:]
    seeds = int(words.pop()) if words and words[-1].isdigit() else 3
    RESULTS.mkdir(exist_ok=True)
    for seed in range(seeds):
        for name in words or CELLS:
            for who in (CLUSTER, BASELINE):
                _run(name, who, seed)
                write_page()


def _run(name: str, who: str, seed: int) -> None:
    file = RESULTS / f"{name}-{who}-{seed}.json"
    if file.exists():
        return
    began = time.monotonic()
    cell = CELLS[name]
    episodes = _train(cell, seed) if who == CLUSTER else _train_baseline(name, seed)
    within = _within(episodes, cell.steps)
    result = {
        "cell": name,
        "who": who,
        "seed": seed,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "env_steps": cell.steps,
        "score": statistics.fmean(value for _, value in within[-cell.last :]),
        "wall_s": round(time.monotonic() - began, 1),
        "platform": platform.platform(),
        "episodes": [[length, round(value, 2)] for length, value in within],
    }
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(result) + "\n", encoding="utf-8")
    scratch.replace(file)
    print(f"{name} {who} seed {seed}: {result['score']:.1f} in {result['wall_s']} s", flush=True)


def _train(cell: Cell, seed: int) -> list[tuple[int, float]]:
    """Trains with local processes and returns length and return of each episode, in order."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *cell.overrides,
            # Nothing is executed before there is a learner, and nothing ends the run early.
            *("policy.initial_weights=none", "train.target_return=null"),
            *(f"train.max_env_steps={cell.steps}", f"train.seed={seed}", "log.backend=none"),
            "services.start_timeout_s=600",
        ]
        options = [word for setting in settings for word in ("--set", setting)]
        config = str(ROOT / "configs" / cell.config)
        command = [str(RLIGHTNING), "train", config, *options, "--name", "cell", "--quiet"]
        subprocess.run(command, cwd=folder, check=True)
        with (Path(folder) / "runs" / "cell" / "1" / "episodes.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["reason"] != "cut"]
        return [(int(row["length"]), float(row["return"])) for row in rows]


def _train_baseline(name: str, seed: int) -> list[tuple[int, float]]:
    script = Path(__file__).with_name("sb3_baseline.py")
    command = [str(SB3_PYTHON), str(script), name, str(seed)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(length, value) for length, value in json.loads(out.splitlines()[-1])]


def _within(episodes: list[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    """Returns the episodes that ended within the budget."""
    taken = 0
    for index, (length, _) in enumerate(episodes):
        taken += length
        if taken > steps:
            return episodes[:index]
    return episodes


def write_page() -> None:
    """Writes the table of all finished cells into docs/learning.md."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    lines = [
        "| task | env steps | episodes | who | seeds | score of each | mean |",
        "|---" * 7 + "|",
    ]
    for name, cell in CELLS.items():
        for who in (CLUSTER, BASELINE):
            mine = [r for r in results if (r["cell"], r["who"]) == (name, who)]
            if not mine:
                continue
            scores = [r["score"] for r in sorted(mine, key=lambda r: r["seed"])]
            each = ", ".join(f"{score:.1f}" for score in scores)
            figures = (f"{cell.steps:,}", f"last {cell.last}", who, str(len(scores)), each)
            lines.append(f"| `{name}` | {' | '.join(figures)} | {statistics.fmean(scores):.1f} |")
    dates = sorted({r["date"] for r in results})
    machines = sorted({r["platform"] for r in results})
    if not results:
        lines = ["Nothing was measured yet."]
    else:
        lines += ["", f"Measured {dates[0]} to {dates[-1]}; {'; '.join(machines)}."]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
