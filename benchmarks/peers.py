"""Acting, batching and inference against Ray's actors and TorchRL's inference server, on the same work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from benchmarks import batching
from benchmarks.act import CELLS, policy_server
from benchmarks.harness import Ratio, Worker, report, run_rounds

RAY_FLOORS = dict(zip(CELLS, (4.0, 3.5, 2.4, 6.0, 4.5, 1.7), strict=True))
TORCHRL_FLOORS = dict(zip(CELLS, (1.4, 1.3, 1.1, 1.5, 1.4, 1.5), strict=True))
SMALL_ENVS = 8


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables of one group, of many sessions and of several small envs."""
    with contextlib.ExitStack() as stack:
        ours, torchrl, ray = (
            Worker(f"benchmarks.{name}") for name in ("act_worker", "peer_torchrl", "peer_ray")
        )
        for worker in (ours, torchrl, ray):
            stack.callback(worker.close)
        address = stack.enter_context(policy_server())

        def steps(worker: Worker, **job: object) -> float:
            return float(worker.job(what="loop", **job, seconds=seconds)["steps_per_s"])

        cells: dict[str, Callable[[], float]] = {}
        ratios = []
        for kind, n in CELLS:
            name, job = f"{kind} N={n}", {"kind": kind, "n": n}
            cells[f"cluster, {name}"] = lambda job=job: steps(
                ours, address=address(job["kind"]), groups=1, **job
            )
            cells[f"cluster, same host, {name}"] = lambda job=job: steps(
                ours, address=address(job["kind"]), groups=1, shared=True, **job
            )
            cells[f"Ray actors, {name}"] = lambda job=job: steps(ray, **job)
            cells[f"TorchRL, {name}"] = lambda job=job: steps(torchrl, **job)
            for how, subject, peer, floors in (
                ("TCP", "cluster", "Ray actors", RAY_FLOORS),
                ("same host", "cluster, same host", "TorchRL", TORCHRL_FLOORS),
            ):
                title = f"{how}, 1 group / {peer}, {name}"
                names = f"{subject}, {name}", f"{peer}, {name}"
                ratios.append(Ratio(title, *names, floor=floors[kind, n]))
        table = run_rounds(cells, rounds=rounds, unit="env steps/s")
        good = report("One group of N rows", table, ratios, slack=slack)

        small = {"kind": "cp", "n": 1, "groups": SMALL_ENVS}
        cells = {
            "cluster": lambda: steps(ours, address=address("cp"), **small),
            "Ray actors": lambda: steps(ray, **small),
        }
        ratio = Ratio("TCP / Ray actors", "cluster", "Ray actors")
        table = run_rounds(cells, rounds=rounds, unit="env steps/s")
        good &= report(f"{SMALL_ENVS} envs of one row, batched", table, [ratio], slack=slack)

        asked = {"what": "sessions", "sessions": batching.SESSIONS, "seconds": seconds}
        cells = {
            "cluster": lambda: float(ours.job(address=address("cp"), **asked)["per_s"]),
            "TorchRL": lambda: float(torchrl.job(**asked)["per_s"]),
        }
        ratio = Ratio("TCP / TorchRL", "cluster", "TorchRL")
        table = run_rounds(cells, rounds=rounds, unit="answers/s")
        title = f"{batching.SESSIONS} clients of one row, batched"
        return report(title, table, [ratio], slack=slack) and good
