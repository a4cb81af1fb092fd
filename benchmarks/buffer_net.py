"""Insert and sample through the buffer server process against a bare gRPC sink and source of the same bytes.

One item is 64 rows; the bare sink gets one item a message. Everything runs over TCP on loopback; of images, inserts do so a second
time with the pictures in shared memory. Where a Python called `python-reverb` lies beside this one, which has `dm-reverb[tensorflow]`,
Reverb is measured as well.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.bench_buffer import KINDS
from benchmarks.buffer_net_worker import EPISODE, ROWS
from benchmarks.harness import Ratio, Worker, report, run_rounds
from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing import ServerProcess

FLOOR = 0.7
# By how much to be ahead of Reverb.
REVERB = {
    ("insert", "vec"): 20.0,
    ("insert", "img"): 4.0,
    ("sample", "vec"): 12.0,
    ("sample", "img"): 1.5,
}


def _server(stack: contextlib.ExitStack, folder: Path, kind: str) -> str:
    """Starts a buffer server for one kind of rows; returns its address."""
    (folder / kind).mkdir()
    config = folder / f"{kind}.yaml"
    settings = {"type": "ReplayBuffer", "capacity": KINDS[kind], "auto_truncate_episode": True}
    config.write_text(json.dumps({"buffer": settings}))
    command = ["-m", "rlightning.services.buffer_server", "--config", str(config)]
    server = ServerProcess(command, folder / kind, environment=MALLOC_ENV)
    return stack.enter_context(server).address()


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables."""
    good = True
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [Worker("benchmarks.echo", environment=MALLOC_ENV)]
        workers += [Worker("benchmarks.buffer_net_worker", environment=MALLOC_ENV)]
        for worker in workers:
            stack.callback(worker.close)
        bare, client = workers[0].hello["address"], workers[1]
        reverb = None
        if (python := Path(sys.executable).with_name("python-reverb")).exists():
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
            reverb = Worker("benchmarks.reverb_worker", environment=quiet, python=str(python))
            stack.callback(reverb.close)
        for kind in KINDS:
            address = _server(stack, folder, kind)
            # Until the buffer is full, and everything that it needs was written once.
            items = KINDS[kind] // ROWS + 2 * EPISODE
            client.job(what="insert", address=address, kind=kind, items=items, seconds=0.0)
            size = client.job(what="sample", address=address, seconds=0.1)["bytes"]

            def job(
                what: str,
                kind: str = kind,
                address: str = address,
                size: int = size,
                shared: bool = False,
            ) -> float:
                where = address if what in ("insert", "sample") else bare
                job = {"what": what, "address": where, "kind": kind, "bytes": size}
                return float(client.job(**job, seconds=seconds, shared=shared)["per_s"])

            names = {"insert": "insert", "sink": "bare sink", "sample": "sample"}
            names["source"] = "bare source"
            cells: dict[str, Callable[[], float]] = {
                name: (lambda what=what, job=job: job(what)) for what, name in names.items()
            }
            if kind == "img":
                cells["insert, shared memory"] = partial(job, "insert", shared=True)
            if reverb is not None:
                reverb.job(what="fill", kind=kind, capacity=KINDS[kind])
                for what in ("insert", "sample"):
                    cells[f"Reverb: {what}"] = lambda what=what, kind=kind: reverb.job(
                        what=what, kind=kind, seconds=seconds
                    )["per_s"]
            table = run_rounds(cells, rounds=rounds, unit="transitions/s")
            ratios = [
                Ratio(f"{kind} insert, acked / bare sink", "insert", "bare sink", floor=FLOOR),
                Ratio(f"{kind} sample / bare source", "sample", "bare source", floor=FLOOR),
            ]
            if kind == "img":
                shared = "insert, shared memory"
                ratios.append(Ratio("img insert, shared memory / bare sink", shared, "bare sink"))
                ratios.append(Ratio("img insert, shared memory / TCP", shared, "insert"))
            if reverb is not None:
                ratios += [
                    Ratio(
                        f"{kind} {what} / Reverb", what, f"Reverb: {what}", floor=REVERB[what, kind]
                    )
                    for what in ("insert", "sample")
                ]
            title = f"Buffer over the network, {kind}, inserts of 64, samples of 256, prefetched"
            good &= report(title, table, ratios, slack=slack)
    return good
