"""How old the rows are that a learner learns from, in versions of the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.latency import SlidingHistogram
from rlightning.latency.histogram import Counts

# Upper edges of the buckets that metrics have.
_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)


class Staleness:
    """Staleness of rows in versions. One thread may record while others read.

    Attributes:
        counts: All of them, for metrics.
    """

    def __init__(self) -> None:
        self.counts = Counts(_EDGES)
        self._window = SlidingHistogram()

    def record(self, versions: npt.NDArray[Any]) -> None:
        """Adds by how many versions the rows of a batch are older than the learner, [n]."""
        for older, count in zip(*np.unique(versions, return_counts=True), strict=True):
            self.counts.record(float(older), int(count))
        self._window.record_many(versions)

    def summary(self) -> dict[str, float]:
        """Returns {count, mean, p50, p90, p99, max} of the last minute, in versions but the count.

        Percentiles are exact below 32 versions, and right to 1/32 of the value above. Without a row
        only {count: 0}.
        """
        found = self._window.summary()
        # A bucket of up to 32 holds one whole number, its lower bound, and is told by its middle.
        return {key: value if key == "mean" else int(value) for key, value in found.items()}
