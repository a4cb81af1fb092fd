"""The stages of a step, and their durations by name."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rlightning.latency.clock import OneWay
from rlightning.latency.histogram import SlidingHistogram

STAGES = {
    "encode": "from an observation's turn to be asked about until its request is encoded",
    "uplink": "from then until the policy server has the request; between two clocks",
    "queue": "from receipt until its batch begins to form, decoding included",
    "batch_wait": "from then until inference begins",
    "inference": "inference",
    "answer": "from the end of inference until the answer is sent, encoding included",
    "downlink": "from then until the answer is here; between two clocks",
    "decode": "from then until the actor has the answer",
    "insert": "handing observation and answer over to the buffer, which waits when it is full",
    "env_step": "executing the answer until the next observation is there",
}
"""What a step of the actor loop is made of, in order: each stage begins where the last one ends."""


class LatencyStats(dict[str, SlidingHistogram]):
    """Durations of the last minute by name; a name is made by its first use. Not thread-safe.

    Args:
        names: Names that are there from the start, as another thread needs that reads meanwhile.
        enabled: False records nothing.

    Attributes:
        enabled: Whether anything is recorded.
    """

    WINDOW_S = SlidingHistogram.WINDOW_S

    def __init__(self, *names: str, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        for name in names:
            self[name]

    def __missing__(self, name: str) -> SlidingHistogram:
        histogram = self[name] = SlidingHistogram(enabled=self.enabled)
        return histogram

    def record(self, name: str, seconds: float, uncertainty_s: float = 0.0) -> None:
        """Adds one duration under `name`; see `SlidingHistogram.record`."""
        self[name].record(seconds, uncertainty_s)

    def record_all(self, durations: Iterable[tuple[str, float]]) -> None:
        """Adds durations by name that belong together, for less than each alone would cost.

        Raises:
            ValueError: One is negative or not a number; those before it are recorded.
        """
        if not self.enabled:
            return
        now = time.monotonic()
        for name, seconds in durations:
            self[name].record_at(now, seconds)

    def merge(self, others: Mapping[str, SlidingHistogram]) -> None:
        """Adds every duration of other histograms of this process, name by name."""
        for name, histogram in others.items():
            self[name].merge(histogram)

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns `SlidingHistogram.summary` by name: of the last minute, in seconds."""
        return {name: histogram.summary() for name, histogram in self.items()}


class ActTimes(NamedTuple):
    """Where the time of one answer of a policy server went, in nanoseconds.

    Stamps are those of the asking process's monotonic clock.
    """

    seq: int
    """Number of the request."""
    begun_ns: int
    """When it was its turn to be encoded."""
    encoded_ns: int
    """When it was encoded."""
    queue_ns: int
    """From its receipt until its batch began to form."""
    batch_wait_ns: int
    """From then until inference began."""
    inference_ns: int
    """Inference."""
    server_ns: int
    """From its receipt until its answer was sent."""
    heard_ns: int
    """When the answer was here."""
    done_ns: int
    """When the actor had it."""
    ways: OneWay | None
    """How long the request and the answer were under way; None while that is unknown."""

    @property
    def answer_ns(self) -> int:
        """From the end of inference until the answer was sent."""
        return max(0, self.server_ns - self.queue_ns - self.batch_wait_ns - self.inference_ns)

    def record(self, stats: LatencyStats) -> None:
        """Records every stage, and the whole as `act`."""
        ways = self.ways
        if ways is not None:
            stats.record("uplink", ways.uplink_s, ways.uncertainty_s)
            stats.record("downlink", ways.downlink_s, ways.uncertainty_s)
        stats.record_all(
            (
                ("encode", (self.encoded_ns - self.begun_ns) * 1e-9),
                ("queue", self.queue_ns * 1e-9),
                ("batch_wait", self.batch_wait_ns * 1e-9),
                ("inference", self.inference_ns * 1e-9),
                ("answer", self.answer_ns * 1e-9),
                ("decode", (self.done_ns - self.heard_ns) * 1e-9),
                ("act", (self.done_ns - self.begun_ns) * 1e-9),
            )
        )
