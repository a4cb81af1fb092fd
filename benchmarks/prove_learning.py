"""Trains through the cluster and with Stable-Baselines3, at equal env steps: `make prove-learning`.

Each finished training is a file in `benchmarks/learning/`, and is not run again; one of ours that
was interrupted goes on from its last checkpoint, in `runs/learning/`. Arguments: cells and numbers of
seeds, such as `cartpole_ppo 3`; none for all cells, each with its own number.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlightning.utils.config.environment import child_environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "learning"
UNFINISHED = ROOT / "runs" / "learning"
PAGE = ROOT / "docs" / "learning.md"
PLOT = ROOT / "docs" / "learning.png"
RLIGHTNING = Path(sys.executable).parent / "rlightning"
SB3_PYTHON = ROOT / ".venvs" / "sb3" / "bin" / "python"
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
BASELINE = "stable-baselines3"
CLUSTER = "rlightning"
# Each process of both sides computes on one core, whatever its libraries would take.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Cell:
    """One task: what `rlightning train` is told beside its config, and how it is scored."""

    config: str
    steps: int
    last: int
    """The score is the mean return of so many last episodes of the budget."""
    overrides: Sequence[str] = ()
    save_interval: int = 5_000
    """Updates between checkpoints to go on from."""
    seeds: int = 3
    target: float | None = None
    """Score at which training ends before the budget does; it stands in for a baseline."""

    @property
    def sides(self) -> Sequence[str]:
        return (CLUSTER, BASELINE) if self.target is None else (CLUSTER,)


# The baseline has the hyperparameters of the Zoo; these are the same, as far as both have them.
# Short trainings come first.
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
        save_interval=50,
    ),
    "cartpole_dqn": Cell("cartpole_dqn.yaml", 50_000, 100),
    "pendulum_sac": Cell("pendulum_sac.yaml", 15_000, 10),
    "halfcheetah_sac": Cell("halfcheetah_sac.yaml", 100_000, 10),
    "halfcheetah_ppo": Cell("halfcheetah_ppo.yaml", 1_000_000, 100, save_interval=50),
    "pong_ppo": Cell("pong.yaml", 1_500_000, 100, save_interval=50, seeds=1, target=-15.0),
}


def main() -> None:
    words = sys.argv[1:]
    seeds = int(words.pop()) if words and words[-1].isdigit() else None
    RESULTS.mkdir(exist_ok=True)
    for name in words or CELLS:
        for seed in range(CELLS[name].seeds if seeds is None else seeds):
            for who in CELLS[name].sides:
                _run(name, who, seed)
                write_page()


def _run(name: str, who: str, seed: int) -> None:
    file = RESULTS / f"{name}-{who}-{seed}.json"
    if file.exists():
        return
    began = time.monotonic()
    cell = CELLS[name]
    episodes = _train(name, seed) if who == CLUSTER else _train_baseline(name, seed)
    # What was collected while the last update was made is beyond the budget.
    within = [episode for episode in sorted(episodes) if episode[0] <= cell.steps]
    if cell.target is not None:
        within = _until(within, cell.last, cell.target)
    result = {
        "cell": name,
        "who": who,
        "seed": seed,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "env_steps": within[-1][0] if cell.target is not None else cell.steps,
        "score": statistics.fmean(value for _, value in within[-cell.last :]),
        "platform": _platform(),
        # Env steps at which each episode ended, and its return.
        "episodes": [[at, round(value, 2)] for at, value in within],
    }
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(result) + "\n", encoding="utf-8")
    scratch.replace(file)
    if who == CLUSTER:
        shutil.rmtree(_unfinished(name, seed))
    took = time.monotonic() - began
    print(f"{name} {who} seed {seed}: {result['score']:.1f} in {took:.0f} s", flush=True)


def _platform() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def _train(name: str, seed: int) -> list[tuple[int, float]]:
    """Trains with local processes; returns at which env step each episode ended, and its return."""
    cell, folder = CELLS[name], _unfinished(name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        *cell.overrides,
        # Nothing is executed before there is a learner.
        "policy.initial_weights=none",
        f"train.target_return={'null' if cell.target is None else cell.target}",
        *(f"train.max_env_steps={cell.steps}", f"train.seed={seed}", "log.backend=none"),
        *(f"train.save_interval={cell.save_interval}", "buffer.data_dir=data"),
        "services.start_timeout_s=600",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    config = str(ROOT / "configs" / cell.config)
    command = [str(RLIGHTNING), "train", config, *options, "--name", "cell", "--quiet"]
    command += ["--resume", "latest", "--or-anew"]
    subprocess.run(command, cwd=folder, env=child_environment(ONE_THREAD), check=False)
    runs = sorted((folder / "runs" / "cell").glob("[0-9]*"), key=lambda run: int(run.name))
    outcome = _manifest(runs[-1])["outcome"]
    if outcome not in ("finished", "solved", "target_missed"):
        raise SystemExit(f"{config}: the run is {outcome}")
    found: list[tuple[int, float]] = []
    for run in runs:
        resumed = _manifest(run).get("resumed")
        before = 0 if resumed is None else _manifest(folder / resumed)["env_steps"]
        # What came after the checkpoint was not gone on from.
        found = [episode for episode in found if episode[0] <= before]
        with (run / "episodes.csv").open(encoding="utf-8") as file:
            endings = _endings(list(csv.DictReader(file)))
        found += [(before + at, value) for at, value in endings]
    return found


def _unfinished(name: str, seed: int) -> Path:
    return UNFINISHED / f"{name}-{seed}"


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def _endings(rows: list[dict[str, str]]) -> list[tuple[int, float]]:
    """Returns at which env step of the run each episode ended, and its return.

    The rows of an env take their steps side by side, so it is that of its row times their number.
    """
    taken: dict[tuple[str, str], int] = {}
    for row in rows:
        taken[row["env"], row["row"]] = 0
    endings = []
    for row in rows:
        key = row["env"], row["row"]
        taken[key] += int(row["length"])
        if row["reason"] != "cut":
            endings.append((taken[key] * len(taken), float(row["return"])))
    return endings


def _train_baseline(name: str, seed: int) -> list[tuple[int, float]]:
    script = Path(__file__).with_name("sb3_baseline.py")
    command = [str(SB3_PYTHON), str(script), name, str(seed), str(CELLS[name].steps)]
    env = child_environment(ONE_THREAD)
    out = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout
    return [(at, value) for at, value in json.loads(out.splitlines()[-1])]


def _until(episodes: list[tuple[int, float]], last: int, target: float) -> list[tuple[int, float]]:
    """Returns the episodes up to the first at which the mean of the last ones reached a target."""
    values = [value for _, value in episodes]
    for end in range(last, len(values) + 1):
        if statistics.fmean(values[end - last : end]) >= target:
            return episodes[:end]
    return episodes


def write_page() -> None:
    """Writes plot and table of all finished trainings into docs/learning.md."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    lines = [
        "| task | env steps | episodes | who | seeds | score of each | mean |",
        "|---" * 7 + "|",
    ]
    for name, cell in CELLS.items():
        for who in cell.sides:
            mine = [r for r in results if (r["cell"], r["who"]) == (name, who)]
            if not mine:
                continue
            scores = [r["score"] for r in sorted(mine, key=lambda r: r["seed"])]
            each = ", ".join(f"{score:.1f}" for score in scores)
            steps = f"{cell.steps:,}"
            if cell.target is not None:
                taken = statistics.fmean(r["env_steps"] for r in mine)
                steps = f"{taken:,.0f} of {steps}, until {cell.target:g}"
            figures = (steps, f"last {cell.last}", who, str(len(scores)), each)
            lines.append(f"| `{name}` | {' | '.join(figures)} | {statistics.fmean(scores):.1f} |")
    dates = sorted({r["date"] for r in results})
    machines = sorted({r["platform"] for r in results})
    if not results:
        lines = ["Nothing was measured yet."]
    else:
        _plot()
        lines += ["", f"Measured {dates[0]} to {dates[-1]}; {'; '.join(machines)}."]
        lines += ["", f"![Returns against env steps, of each task and side]({PLOT.name})"]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")


def _plot() -> None:
    lasts = {name: cell.last for name, cell in CELLS.items()}
    script = Path(__file__).with_name("plot_learning.py")
    command = [str(SB3_PYTHON), str(script), str(RESULTS), str(PLOT), json.dumps(lasts)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
