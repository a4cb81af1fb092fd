"""Rounds of interleaved cells, run by long-lived child processes, judged by medians of per-round ratios.

Absolute numbers move by half between two runs on a shared machine; a ratio of two cells measured within seconds
of each other does not. So every contender is started before round 0 (a warm-up that is thrown away), each round
runs all cells in the same order, and a verdict is the median over rounds of subject / reference in that round.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Cell = Callable[[], float]


class Worker:
    """A child process `python -m MODULE *ARGS` that answers one JSON line per JSON line."""

    def __init__(
        self,
        module: str,
        *args: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        self._process = subprocess.Popen(
            ["env", *variables, python, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"worker {self._process.args}: {answer['error']}")
        return answer

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def job(self, **job: Any) -> dict[str, Any]:
        """Runs one job and waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Job = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def answer_jobs(jobs: Mapping[str, Job], out: TextIO | None = None) -> None:
    """Answers the jobs of a `Worker` by their name, `what`, until stdin closes.

    Args:
        jobs: What answers each.
        out: Where answers go; None: stdout.
    """
    running = asyncio.get_running_loop()
    print(json.dumps({"ready": True}), file=out, flush=True)
    while line := await running.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        try:
            answer = await jobs[job["what"]](job)
        except Exception as error:  # the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


@dataclass(frozen=True)
class Ratio:
    """A line of a results table: `subject / reference`, and the floor or ceiling it is held against."""

    name: str
    subject: str
    reference: str
    floor: float | None = None
    ceiling: float | None = None


@dataclass
class Table:
    """Values of every cell by round."""

    unit: str
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, cell: str) -> float:
        """The cell's median over rounds."""
        return statistics.median(self.rounds[cell])

    def ratio(self, ratio: Ratio) -> float:
        """The median over rounds of the per-round ratio."""
        pairs = zip(self.rounds[ratio.subject], self.rounds[ratio.reference], strict=True)
        return statistics.median(subject / reference for subject, reference in pairs)


def run_rounds(cells: Mapping[str, Cell], *, rounds: int, unit: str) -> Table:
    """Runs every cell once per round, after one round that is thrown away."""
    table = Table(unit, {name: [] for name in cells})
    for number in range(rounds + 1):
        for name, cell in cells.items():
            value = cell()
            if number:
                table.rounds[name].append(value)
    return table


def report(title: str, table: Table, ratios: Sequence[Ratio], *, slack: float = 1.0) -> bool:
    """Prints absolute numbers and ratios as Markdown.

    Args:
        title: Heading of the section.
        table: What was measured.
        ratios: What to compare.
        slack: How far past its bound a ratio may be before this returns False; 1.0 is the bound itself.

    Returns:
        Whether every ratio that has a bound is within it, times the slack.
    """
    print(f"\n### {title}\n\n| cell | median, {table.unit} |\n|---|---|")
    for cell in table.rounds:
        print(f"| {cell} | {table.median(cell):,.4g} |")
    print("\n| ratio | reached | target | |\n|---|---|---|---|")
    good = True
    for ratio in ratios:
        value = table.ratio(ratio)
        target, met, tolerable = "", True, True
        if ratio.floor is not None:
            target, met, tolerable = (
                f">= {ratio.floor:g}",
                value >= ratio.floor,
                value >= ratio.floor / slack,
            )
        if ratio.ceiling is not None:
            target, met, tolerable = (
                f"<= {ratio.ceiling:g}",
                value <= ratio.ceiling,
                value <= ratio.ceiling * slack,
            )
        good &= tolerable
        print(f"| {ratio.name} | {value:.3f} | {target} | {'' if met else 'missed'} |")
    sys.stdout.flush()
    return good


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the checkout, since `/tmp` may be memory; gone after a `with`."""
    Path("build").mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir="build")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, to the hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """One line about the machine and the versions that matter."""
    import grpc
    import numpy as np

    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, grpcio {grpc.__version__}, numpy {np.__version__}"
