"""Solves CartPole on a Ray cluster of two nodes, one of which is removed in the middle.

Both nodes are on this machine (`ray.cluster_utils.Cluster`), with processes of their own. The run
has to be solved, with services on both nodes before and on one of them after.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.ray.nodes import nodes_of_services, two_nodes

_CONFIG = Path(__file__).parents[1] / "configs" / "cartpole.yaml"
# Far enough that the run has learned something, and not everything.
_REMOVE_AT_STEPS = 20_000
_LIMIT_S = 600.0


def main() -> int:
    """Prints the run and what happened; returns 0 if it was solved."""
    with two_nodes() as (cluster, other):
        return _prove(cluster, other)


def _prove(cluster: Any, other: Any) -> int:
    command = [
        *(Path(sys.executable).with_name("rlightning"), "train", _CONFIG, "--launcher", "ray"),
        *("--set", f"cluster.ray_address={cluster.address}"),
    ]
    began = time.monotonic()
    before, after, removed_s = set[str](), set[str](), None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if time.monotonic() - began > _LIMIT_S:
                run.terminate()
            steps = re.search(r"steps ([\d,]+)", line)
            if removed_s is None and steps and int(steps[1].replace(",", "")) > _REMOVE_AT_STEPS:
                before = nodes_of_services()
                cluster.remove_node(other, allow_graceful=False)
                removed_s = time.monotonic() - began
                print(f"-- services on {len(before)} nodes; one removed after {removed_s:.1f} s")
            if "SERVING again" in line and removed_s is not None:
                print(f"-- {time.monotonic() - began - removed_s:.1f} s after the removal")
            if line.startswith("solved"):
                after = nodes_of_services()
    code = run.returncode
    solved = code == 0 and len(before) == 2 and len(after) == 1
    print(f"-- exit {code}, services on {len(before)} nodes before and {len(after)} after")
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
