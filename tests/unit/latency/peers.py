"""Simulated peers, whose clocks nobody here can read."""

from __future__ import annotations

import random

SECOND = 10**9


class Peer:
    """A simulated peer: its clock is offset, drifts, is set and stands still; the ways there and back take their time."""

    def __init__(self, offset_s: float, drift_ppm: float, jitter_s: float = 0.001, seed: int = 0):
        self.offset_ns = int(offset_s * SECOND)
        self.drift_ppm = drift_ppm
        self.jitter_s = jitter_s
        self.random = random.Random(seed)

    def clock(self, local_ns: int) -> int:
        return local_ns + self.offset_ns + int(local_ns * self.drift_ppm / 10**6)

    def way(self, base_s: float) -> int:
        return int((base_s + self.random.expovariate(1 / self.jitter_s)) * SECOND)

    def exchange(self, now: int, up_s: float, down_s: float) -> tuple[int, int, int, int, int, int]:
        """The four stamps, and how long the two ways took in nanoseconds of the local clock."""
        up, work, down = self.way(up_s), self.way(0.0005), self.way(down_s)
        received, answered = now + up, now + up + work
        stamps = now, self.clock(received), self.clock(answered), answered + down
        return *stamps, up, down
