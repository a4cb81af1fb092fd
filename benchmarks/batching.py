"""The policy server: what batching gains, what the first request costs, and how long probes wait."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import Ratio, Worker, report, run_rounds
from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing import ServerProcess

SESSIONS = 64
GAIN = 1.7
PROBE_MS = 100.0
FIRST = 2.0
# 50 MB of observations in one message.
LARGE_ROWS = 50_000_000 // (84 * 84 * 4)
POLICY = "type: 'benchmarks.bench_policy:BenchPolicy', torch_threads: 1, initial_weights: random"


@contextlib.contextmanager
def policy_server(**options: int) -> Iterator[ServerProcess]:
    """Starts a policy server for the benchmark's network, with options of section `policy`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = "".join(f", {key}: {value}" for key, value in options.items())
        config = folder / "config.yaml"
        config.write_text(f"policy: {{{POLICY}{own}}}\nservices: {{python_path: [.]}}\n")
        command = ["-m", "rlightning.services.policy_server", "--config", str(config)]
        with ServerProcess(command, folder, environment=MALLOC_ENV) as process:
            yield process


def _first_requests(worker: Worker, rounds: int, slack: float) -> bool:
    """Prints what the first request costs in a session that is open, at a server that just started.

    One round is one server, so there are more of them than of anything else.
    """
    found: dict[str, float] = {}

    def first() -> float:
        with policy_server() as server:
            job = {"what": "first", "address": server.address(), "kind": "cp", "n": 1}
            found.update(worker.job(**job, steady=500))
        return found["first"]

    cells = {
        "the first request of a server": first,
        "those after it, one by one": lambda: found["steady"],
        "those after it, 50 a second": lambda: found["paced"],
    }
    table = run_rounds(cells, rounds=3 * rounds, unit="us")
    subject, steady, paced = cells
    ratios = [
        Ratio("first request / p50 of those after it", subject, steady, ceiling=FIRST),
        Ratio("first request / p50 of those after it, 50 a second", subject, paced),
    ]
    return report("The first request", table, ratios, slack=slack)


def _batching(load: Worker, rounds: int, seconds: float, slack: float) -> bool:
    """Prints what batches gain: in answers a second, and in CPU of the server, whatever else runs."""
    used: dict[ServerProcess, float] = {}

    def answers(server: ServerProcess) -> float:
        """Answers a second to sessions of one row each."""
        job = {"what": "bare_sessions", "address": server.address(), "sessions": SESSIONS}
        done = load.job(**job, seconds=seconds, pid=server.child.pid)
        used[server] = done["cpu_us"]
        return float(done["per_s"])

    with policy_server() as together, policy_server(max_batch_rows=1) as apart:
        batched, single = "in batches", "one by one"
        table = run_rounds(
            {
                batched: lambda: answers(together),
                single: lambda: answers(apart),
                "CPU of an answer in batches, us": lambda: used[together],
                "CPU of an answer one by one, us": lambda: used[apart],
            },
            rounds=2 * rounds,
            unit="answers/s",
        )
    ratios = [
        Ratio(f"{SESSIONS} sessions of one row, batched", batched, single, floor=GAIN),
        Ratio("CPU of the server, one by one / in batches", *reversed(list(table.rounds)[2:])),
    ]
    return report(f"Batching, {SESSIONS} sessions of one row", table, ratios, slack=slack)


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables of batching, of the first request, and of probes."""
    with contextlib.ExitStack() as stack:
        load, prober = (Worker("benchmarks.act_worker") for _ in range(2))
        stack.callback(load.close)
        stack.callback(prober.close)
        pool = stack.enter_context(ThreadPoolExecutor(1))

        good = _batching(load, rounds, seconds, slack)
        good &= _first_requests(load, rounds, slack)

        def probe_while_loading() -> float:
            with policy_server() as server:
                return float(prober.job(what="probe", address=server.address())["max_ms"])

        def probe_while(address: str, **job: object) -> float:
            """The longest wait of a probe while there is load, in ms."""
            busy = pool.submit(load.job, address=address, seconds=seconds, **job)
            found = prober.job(what="probe", address=address, seconds=seconds)
            busy.result()
            return float(found["max_ms"])

        with policy_server() as small, policy_server() as large:
            cells = {
                "the promise": lambda: PROBE_MS,
                "loading": probe_while_loading,
                f"{SESSIONS} sessions": lambda: probe_while(
                    small.address(), what="sessions", sessions=SESSIONS
                ),
                "messages of 50 MB": lambda: probe_while(
                    large.address(), what="act", kind="img", n=LARGE_ROWS
                ),
            }
            table = run_rounds(cells, rounds=rounds, unit="ms")
        promise, *phases = cells
        ratios = [Ratio(f"{name} / promise", name, promise, ceiling=1.0) for name in phases]
        return report("The longest wait of a probe", table, ratios, slack=slack) and good
