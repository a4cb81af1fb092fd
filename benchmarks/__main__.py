"""`python -m benchmarks all|smoke|SUITE`: prints Markdown tables; exits 1 when a smoke run is far off."""

from __future__ import annotations

import sys
from datetime import datetime, timezone

from benchmarks import (
    act,
    batching,
    bench_buffer,
    bench_memory,
    buffer_net,
    codec,
    demo,
    durable,
    hosted,
    inference,
    latency_cost,
)
from benchmarks.harness import machine

SUITES = {
    "codec": codec.measure,
    "buffer": bench_buffer.measure,
    "durable": durable.measure,
    "buffer-net": buffer_net.measure,
    "memory": bench_memory.measure,
    "act": act.measure,
    "batching": batching.measure,
    "inference": inference.measure,
    "latency-cost": latency_cost.measure_cost,
    "hosted": hosted.measure,
    "demo": demo.measure,
}
# Needs what developers do not: `make bench-peers` installs it.
WITH_PEERS = "peers"
SMOKE = ("codec", "act", "batching")


def main() -> int:
    """Runs what was asked for."""
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    if what == WITH_PEERS:
        from benchmarks import peers

        SUITES[WITH_PEERS] = peers.measure
    if what not in {"all", "smoke", *SUITES}:
        known = ", ".join(["all", "smoke", *SUITES, WITH_PEERS])
        print(f"unknown benchmark '{what}'; one of: {known}", file=sys.stderr)
        return 2
    smoke = what == "smoke"
    print(f"## {datetime.now(timezone.utc):%Y-%m-%d}, `python -m benchmarks {what}`\n\n{machine()}")
    rounds, seconds, slack = (2, 0.2, 3.0) if smoke else (5, 0.5, 1.0)
    names = [what] if what in SUITES else SMOKE if smoke else list(SUITES)
    good = [SUITES[name](rounds, seconds, slack) for name in names]
    # A full run reports; only the smoke run, with its slack, is a test.
    return 1 if smoke and not all(good) else 0


if __name__ == "__main__":
    raise SystemExit(main())
