"""What a cluster's services take, by what they do, and what that means for many hosts: `make prove-scaling`.

Runs clusters with simulated envs on this machine, fits the model of `benchmarks.capacity` to some of them, holds it against
others, and prints the tables of docs/scaling.md. What is said of more hosts than were run is a prediction.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import capacity_learner
from benchmarks.capacity import (
    ROLES,
    US,
    Costs,
    Host,
    Limits,
    Measured,
    Memory,
    Work,
    cores_of,
    fit,
    most_hosts,
    needs,
    rate_at,
)
from benchmarks.capacity_networks import (
    MIB,
    Gpu,
    acting,
    acting_mib,
    layers,
    learning,
    learning_mib,
)
from benchmarks.capacity_site import GROUPS, WEIGHTS, Cluster, Site, network_bytes
from benchmarks.harness import machine

WINDOW_S = 3.0
KEPT = Path("build/scaling.json")

FIT = [
    Site(16, 1),
    Site(16, 64, batch=256),
    Site(16, 64),
    Site(16, 512, batch=1024, pause_s=0.02),
    Site(3_072, 16, batch=256),
    Site(3_072, 64),
    Site(28_224, 1, batch=32),
    Site(28_224, 8),
    Site(28_224, 32, batch=128, pause_s=0.05),
    Site(16, 16, workers=8, seconds=0.01, batch=64),
    Site(28_224, 4, workers=8, seconds=0.02),
    Site(16, 8, servers=3, workers=4, seconds=0.02, batch=512),
]
# Of other sizes, and of more env servers, than those that the model knows.
CHECK = [
    Site(64, 32, batch=128),
    Site(64, 32, servers=2, workers=2, batch=128),
    Site(1_024, 24, servers=4, batch=512, pause_s=0.02),
    Site(12_288, 8, servers=2, batch=64, pause_s=0.02),
    Site(64, 16, servers=2, workers=4, seconds=0.02, batch=128),
    Site(64, 16, servers=4, workers=4, seconds=0.05, batch=128),
    Site(64, 16, servers=8, workers=2, seconds=0.05, batch=128),
    Site(12_288, 2, servers=4, workers=4, seconds=0.1, batch=64, pause_s=0.05),
]
FEW, MANY = Site(16, 1, workers=1, seconds=0.5), Site(16, 1, workers=32, seconds=0.5)
SIMULATORS, CAMERAS = 50 * 64, 15 * 4  # env steps a second of a host
MLP = layers((64,), hidden=(256, 256), outputs=9)
CNN = layers(
    (4, 84, 84), convolutions=[(32, 8, 4), (64, 4, 2), (64, 3, 1)], hidden=(512,), outputs=7
)
# Policies that compute what the ones of configs/ do, for what the hosts below see: observations of 64 numbers, and pictures.
NETWORKS = [
    ("64 numbers, two hidden layers of 256", MLP, 256, SIMULATORS),
    ("84x84x4, three convolutions and 512", CNN, 28_224, CAMERAS),
]
# NVIDIA's data sheet of the H200 SXM.
GPU = Gpu("H200", flops=67e12)
ROWS = 1_024  # policy.max_batch_rows, and a minibatch
HOSTS = [
    Host("simulators, 4 groups of 16 envs, 256 B, 50 Hz", groups=4, rows=16, hz=50, nbytes=256),
    Host("the same in 1 group of 64 envs", groups=1, rows=64, hz=50, nbytes=256),
    Host("cameras, 4 groups of 1 robot, 27.6 KiB, 15 Hz", groups=4, rows=1, hz=15, nbytes=28_224),
]


def main() -> int:
    """Measures what was asked for (`fit`, `check`, `learner`, `report`; all), which is kept in build/, and prints the tables."""
    parts = sys.argv[1:] or ["fit", "check", "learner", "report"]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if "fit" in parts:
        kept["fit"] = [asdict(run) for run in _measure_all(FIT)]
        kept["extras"] = _measure_extras()
    if "check" in parts:
        kept["check"] = [asdict(run) for run in _measure_all(CHECK)]
    if "learner" in parts:
        kept["learner"] = {
            "fit": capacity_learner.measure(capacity_learner.FIT),
            "check": capacity_learner.measure(capacity_learner.CHECK),
        }
        _print_learner(**kept["learner"])
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept))
    if "report" in parts:
        costs = fit(_read(kept["fit"]))
        print(f"## {datetime.now(timezone.utc).date()}, capacity: `make prove-scaling`\n")
        print(f"{machine()}.\n")
        _print_costs(costs)
        _print_extras(kept["extras"])
        _print_check(_read(kept["check"]), costs)
        if "learner" not in parts:
            _print_learner(**kept["learner"])
        _print_predictions(costs, _memory_of(kept["extras"]))
        _print_gpu()
    return 0


def _read(runs: Iterable[dict[str, object]]) -> list[Measured]:
    return [Measured(run["name"], Work(**run["work"]), run["cores"]) for run in runs]  # type: ignore[arg-type]


def _measure_all(sites: Sequence[Site]) -> list[Measured]:
    runs = []
    for site in sites:
        with Cluster(site) as cluster:
            runs.append(cluster.measure(WINDOW_S))
            print(runs[-1], file=sys.stderr, flush=True)
    return runs


def _measure_extras() -> dict[str, float]:
    """Memory, what a learner's looks cost, and bytes on the wire."""
    found: dict[str, float] = {}
    with Cluster(FEW) as few:
        time.sleep(2)
        less = few.memory()
        found["publish_here_s"], found["publish_there_s"] = few.publish_s(20)
    with Cluster(MANY) as many:
        time.sleep(2)
        more = many.memory()
    groups = MANY.groups - FEW.groups
    for role, mib in less.items():
        found[f"{role}_mib"] = mib
        found[f"{role}_mib_per_group"] = max(0.0, (more[role] - mib) / groups)
    with Cluster(Site(16, 1, servers=4, seconds=0.1)) as several:
        found["look_s"] = several.look_s(200)
    for site in (Site(16, 64), Site(28_224, 8)):
        with Cluster(site) as cluster:
            before = network_bytes()
            run = cluster.measure(WINDOW_S)
            moved = (network_bytes() - before) / WINDOW_S
            found[f"wire_{site.nbytes}"] = (moved - 2 * run.work.bytes) / run.work.steps
    return found


def _print_costs(costs: Costs) -> None:
    print("### Cost of each unit of work, us of CPU\n")
    kinds = list(dict.fromkeys(kind for kinds in ROLES.values() for kind in kinds))
    units = {"bytes": 1024, "batch_bytes": 1024}
    names = {
        **dict.fromkeys(kinds, ""),
        "steps": "step of a group",
        "rows": "row",
        "bytes": "KiB",
        "threaded": "step in a thread",
        "batches": "batch",
        "batch_rows": "row of a batch",
        "batch_bytes": "KiB of a batch",
    }
    print("| service | " + " | ".join(names[kind] for kind in kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for role in ROLES:
        cells = []
        for kind in kinds:
            cost = costs[role].get(kind)
            cells.append("" if cost is None else f"{cost / US * units.get(kind, 1):.3g}")
        print(f"| {role} | " + " | ".join(cells) + " |")


def _print_extras(found: dict[str, float]) -> None:
    print("\n### Beside that\n\n| | |\n|---|---|")
    for role in ("env", "policy", "buffer"):
        print(f"| {role} server, resident, with {GROUPS} groups | {found[f'{role}_mib']:.0f} MiB |")
        print(f"| and for each group more | {found[f'{role}_mib_per_group']:.2f} MiB |")
    mib = WEIGHTS / 2**20
    print(
        f"| publishing {mib:g} MiB of weights: learner | {1e3 * found['publish_here_s']:.1f} ms |"
    )
    print(f"| and each policy server | {1e3 * found['publish_there_s']:.1f} ms |")
    print(f"| a look of the learner at one env server | {1e3 * found['look_s']:.2f} ms |")
    for nbytes, rows in ((16, 64), (28_224, 8)):
        extra = found[f"wire_{nbytes}"]
        print(
            f"| bytes of a step of {rows} rows of {nbytes:,} B, request, answer, insert and ack "
            f"together, beyond the observation twice | {extra:,.0f} |"
        )


def _print_check(runs: Sequence[Measured], costs: Costs) -> None:
    print("\n### Predicted and measured, of runs that the model was not fitted to\n")
    roles = list(ROLES)
    print("| cluster | steps/s | steps for a second of CPU | " + " | ".join(roles) + " |")
    print("|---|---|---|" + "---|" * len(roles))
    errors: dict[str, list[float]] = {role: [] for role in roles}
    for run in runs:
        predicted = cores_of(run.work, costs)
        cells = []
        for role in roles:
            used = run.cores[role]
            error = predicted[role] / used - 1
            errors[role].append(error)
            cells.append(f"{predicted[role]:.3f} / {used:.3f} ({100 * error:+.0f} %)")
        share, done = rate_at(1.0, run.work * (1 / run.work.steps), costs), run.work.steps
        reached = done / sum(run.cores.values())
        rate = f"{share:,.0f} / {reached:,.0f} ({100 * (share / reached - 1):+.0f} %)"
        print(f"| {run.name} | {done:,.0f} | {rate} | " + " | ".join(cells) + " |")
    print(
        "\nPredicted / measured; of services, cores. Median and largest size of the errors: ",
        end="",
    )
    told = []
    for role, found in errors.items():
        sizes = [abs(error) for error in found]
        told.append(f"{role} {100 * statistics.median(sizes):.0f} and {100 * max(sizes):.0f} %")
    print("; ".join(told) + ".")


def _memory_of(extras: Mapping[str, float]) -> dict[str, Memory]:
    """Returns what servers are resident with; a learner's memory goes by its network, not by groups."""
    return {
        role: Memory(extras[f"{role}_mib"] * MIB, extras[f"{role}_mib_per_group"] * MIB)
        for role in ("policy", "buffer")
    }


def _print_predictions(costs: Costs, memory: Mapping[str, Memory]) -> None:
    limits = Limits()
    for host in HOSTS:
        print(f"\n### Predicted, not run: each host has {host.name}\n")
        full = ", ".join(
            f"{role} {most_hosts(host, role, costs, limits, memory):,.0f}"
            for role in ("policy", "buffer", "learner")
        )
        own = cores_of(host.work(1), costs)["env"]
        print(
            f"One process is enough for so many hosts: {full}. A host's own env server uses {own:.2f} cores"
        )
        print("beside its envs.\n")
        print("| hosts | env steps/s | MB/s in | service | cores | GiB | processes | because of |")
        print("|---|---|---|---|---|---|---|---|")
        for hosts in (10, 100, 1000):
            work = host.work(hosts)
            for number, need in enumerate(needs(host, hosts, costs, limits, memory)):
                first = (f"{hosts:,}", f"{work.rows:,.0f}", f"{work.bytes / 1e6:,.1f}")
                cells = first if not number else ("", "", "")
                gib = f"{need.memory / 2**30:,.1f}" if need.role in memory else ""
                print(
                    "| " + " | ".join(cells) + f" | {need.role} | {need.cores:.2f} | {gib} | "
                    f"{need.processes} | {need.because} |"
                )


def _print_learner(fit: Sequence[float], check: Sequence[float]) -> None:
    memory = capacity_learner.fit(fit)
    print("\n### Memory of a learner on the CPU\n\n| | |\n|---|---|")
    print(f"| with small networks and batches | {memory.base_mib:.0f} MiB |")
    print(
        f"| and for each MiB of weights, target networks not counted | {memory.weights:.1f} MiB |"
    )
    print(f"| and for each MiB of observations in a batch | {memory.batch:.1f} MiB |")
    print(f"| and for each MiB that layers put out for a batch | {memory.outputs:.1f} MiB |")
    print("\n| weights | observations | outputs of layers | fitted or predicted, MiB | measured |")
    print("|---|---|---|---|---|")
    runs = [*zip(capacity_learner.FIT, fit, strict=True)]
    runs += zip(capacity_learner.CHECK, check, strict=True)
    for number, (training, found) in enumerate(runs):
        size, said = training.size, memory.mib(training.size)
        kind = "fitted" if number < len(fit) else f"{said:.0f} ({100 * (said / found - 1):+.0f} %)"
        cells = (f"{one / MIB:.1f}" for one in (size.weights, size.batch, size.outputs))
        print("| " + " | ".join((*cells, kind, f"{found:.0f}")) + " |")


def _print_gpu() -> None:
    print(
        f"\n### Computed, not measured: part of one {GPU.name}, at {GPU.reached:.0%} of its float32\n"
    )
    print("| policy | hosts | acting | learning | policy server, MiB | learner, MiB |")
    print("|---|---|---|---|---|---|")
    for name, network, nbytes, steps in NETWORKS:
        memory = (
            f"{acting_mib(network, ROWS, nbytes):,.0f}",
            f"{learning_mib(network, ROWS, nbytes):,.0f}",
        )
        for number, hosts in enumerate((10, 100, 1000)):
            rate = hosts * steps
            parts = (f"{acting(network, rate, GPU):.2%}", f"{learning(network, rate, GPU):.2%}")
            first, last = (name, memory) if not number else ("", ("", ""))
            print("| " + " | ".join((first, f"{hosts:,}", *parts, *last)) + " |")


if __name__ == "__main__":
    sys.exit(main())
