"""Plots returns against env steps, in a venv that has matplotlib; see prove_learning.py.

Usage: `python plot_learning.py RESULTS PICTURE LASTS`, the last being episodes by cell, as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

POINTS = 200
COLORS = {"rlightning": "tab:blue", "stable-baselines3": "tab:orange"}


def curve(episodes: list[list[float]], last: int, steps: Any) -> Any:
    """Returns the mean return of the last episodes that had ended by each of some env steps."""
    ends = np.array([at for at, _ in episodes])
    sums = np.concatenate([[0.0], np.cumsum([value for _, value in episodes])])
    upto = np.searchsorted(ends, steps, side="right")
    since = np.maximum(upto - last, 0)
    with np.errstate(invalid="ignore"):
        return (sums[upto] - sums[since]) / (upto - since)


def draw(axes: Any, name: str, results: list[dict[str, Any]], last: int) -> None:
    """Draws one task: the mean of the seeds, and from the lowest to the highest of them."""
    for who, color in COLORS.items():
        mine = [r["episodes"] for r in results if (r["cell"], r["who"]) == (name, who)]
        if not mine:
            continue
        # As far as every seed has come.
        steps = np.linspace(0, min(episodes[-1][0] for episodes in mine), POINTS)
        curves = np.array([curve(episodes, last, steps) for episodes in mine])
        axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.2, linewidth=0)
        label = f"{who}, {len(mine)} seed{'s' * (len(mine) > 1)}"
        axes.plot(steps, curves.mean(0), color=color, label=label)
    axes.set_title(f"{name}, mean of the last {last} episodes", fontsize=9)
    axes.set_xlabel("env steps", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main(folder: str, picture: str, lasts: str) -> None:
    results = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    names = [name for name in json.loads(lasts) if any(r["cell"] == name for r in results)]
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    for name, axes in zip(names, grid.flat, strict=False):
        draw(axes, name, results, json.loads(lasts)[name])
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    scratch = Path(picture).with_suffix(".part.png")
    figure.savefig(scratch, dpi=110)
    scratch.replace(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
