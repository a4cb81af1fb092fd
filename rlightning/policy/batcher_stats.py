"""What a batcher has done so far: counters, durations, and when weights first acted."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlightning.latency import LatencyStats
from rlightning.latency.histogram import Counts
from rlightning.latency.stages import BATCH, WAIT
from rlightning.policy.first_use import FirstUses
from rlightning.policy.pending import Batch


@dataclass(slots=True)
class BatcherStats:
    """What a batcher has done so far.

    Attributes:
        requests: Requests that got their actions.
        rows: Their rows.
        batches: Inferences that succeeded.
        inline_batches: Those that ran on the event loop.
        errors: Requests whose inference failed, or gave no action that is one.
        expired: Requests dropped since their deadline had passed before inference.
        overloaded: Requests refused since the queue was full.
        latency: In seconds: `queue` from receipt until the batch began to form, `batch_wait` from
            then until inference began, `inference`, one sample per batch, and `first_use` of
            weights.
        batch_rows: Rows of the batches.
        first_uses: When weights came and first acted.
    """

    requests: int = 0
    rows: int = 0
    batches: int = 0
    inline_batches: int = 0
    errors: int = 0
    expired: int = 0
    overloaded: int = 0
    latency: LatencyStats = field(
        default_factory=lambda: LatencyStats("queue", "batch_wait", "inference", "first_use")
    )
    batch_rows: Counts = field(default_factory=lambda: Counts(tuple(2.0**n for n in range(14))))
    first_uses: FirstUses = field(default_factory=FirstUses)

    def record(self, batch: Batch) -> None:
        """Counts a batch whose inference succeeded."""
        answered = [pending for pending in batch.pendings if not pending.failed]
        rows, failed = batch.rows, len(batch.pendings) - len(answered)
        if failed:
            self.errors += failed
            rows = sum(pending.rows for pending in answered)
        self.batches += 1
        self.rows += rows
        self.requests += len(answered)
        self.batch_rows.record(batch.rows)
        latency = self.latency
        version = answered[0].policy_version if answered else 0
        if version > self.first_uses.version:
            taken_s = self.first_uses.used(version, batch.end_ns)
            if taken_s is not None:
                latency.record("first_use", taken_s)
        if not latency.enabled:
            return
        if not answered:
            latency.record("inference", (batch.end_ns - batch.start_ns) * 1e-9)
            return
        formed_ns, start_ns = batch.formed_ns, batch.start_ns
        first, *others = answered
        latency.record_stamps(BATCH, (batch.end_ns, start_ns, formed_ns, first.received_ns))
        for pending in others:
            latency.record_stamps(WAIT, (start_ns, formed_ns, pending.received_ns))
