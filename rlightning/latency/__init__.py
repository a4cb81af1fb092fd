"""Clocks of other processes, durations by stage, and traces of single steps.

Durations come from the monotonic clock of one process. A one-way latency needs the offset between
two clocks, which is estimated from four stamps per exchange and always comes with its uncertainty.
"""

from rlightning.latency.clock import ClockOffset, Offset, boot_id, clock_id
from rlightning.latency.histogram import Histogram, SlidingHistogram
from rlightning.latency.stages import STAGES, ActTimes
from rlightning.latency.stats import LatencyStats

__all__ = [
    "STAGES",
    "ActTimes",
    "ClockOffset",
    "Histogram",
    "LatencyStats",
    "Offset",
    "SlidingHistogram",
    "boot_id",
    "clock_id",
]
