"""Durations by name: recorded one by one or, at every step, all of them by their stamps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from rlightning.latency.histogram import SETTLING, SlidingHistogram, sort_columns
from rlightning.latency.ways import Array

# Stamps of a kind that wait to be sorted in.
_MOST_GATHERED = 2048


class Durations(NamedTuple):
    """What many sets of stamps say.

    Attributes:
        columns: Of each name of the `StampKind`, in nanoseconds, [names, sets]; NaN where a
            duration is not known.
        uncertainty: How far those of some names may be off, in nanoseconds, [sets].
    """

    columns: Sequence[Array]
    uncertainty: Mapping[str, Array]


class StampKind:
    """Stamps that are recorded together, and the durations between them.

    Stamps are kept as float64, which is exact for nanoseconds of 104 days, and to 8 ns for those of
    two years.

    Args:
        names: Of the durations.
        width: How many stamps there are, other numbers among them. The first is the newest, in
            nanoseconds of `time.monotonic_ns`: when they are recorded.
        read: Makes durations of many sets of stamps, [stamps, sets].
    """

    def __init__(
        self, names: Sequence[str], width: int, read: Callable[[Array], Durations]
    ) -> None:
        self.names = tuple(names)
        self.pack = Struct(f"{width}d").pack
        self.read = read


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
        self._gathered: dict[StampKind, _Gathered] = {}
        for name in names:
            self[name]

    def __missing__(self, name: str) -> SlidingHistogram:
        histogram = self[name] = SlidingHistogram(enabled=self.enabled, feed=self._sort_in)
        return histogram

    def record(self, name: str, seconds: float, uncertainty_s: float = 0.0) -> None:
        """Adds one duration under `name`; see `SlidingHistogram.record`."""
        self[name].record(seconds, uncertainty_s)

    def record_stamps(self, kind: StampKind, stamps: tuple[float, ...]) -> None:
        """Adds the durations between some stamps, for less than one duration alone would cost."""
        # Every call counts here, on paths that are rarely in the processor's caches.
        gathered = self._gathered.get(kind)
        if gathered is None:
            if not self.enabled:
                return
            gathered = self._gathered[kind] = _Gathered(kind, [self[name] for name in kind.names])
        packed = kind.pack(*stamps)
        gathered.new.append(packed)  # by itself, so that a reader cannot take the list in between
        if len(gathered.new) >= _MOST_GATHERED:
            with SETTLING:
                gathered.sort_in()

    def merge(self, others: Mapping[str, SlidingHistogram]) -> None:
        """Adds every duration of other histograms of this process, name by name."""
        for name, histogram in others.items():
            self[name].merge(histogram)

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns `SlidingHistogram.summary` by name: of the last minute, in seconds."""
        return {name: histogram.summary() for name, histogram in list(self.items())}

    def clear(self) -> None:
        """Forgets everything."""
        super().clear()
        self._gathered.clear()

    def _sort_in(self) -> None:
        for gathered in self._gathered.values():
            gathered.sort_in()


class _Gathered:
    """Stamps of one kind that are not in their histograms yet.

    Attributes:
        new: The stamps, packed.
    """

    __slots__ = ("_histograms", "_kind", "new")

    def __init__(self, kind: StampKind, histograms: Sequence[SlidingHistogram]) -> None:
        self.new: list[bytes] = []
        self._kind = kind
        self._histograms = histograms

    def sort_in(self) -> None:
        """Moves what there is into the histograms; call while `SETTLING` is held."""
        new, self.new = self.new, []
        if not new:
            return
        stamps = np.frombuffer(b"".join(new)).reshape(len(new), -1).T
        slots = stamps[0] // (SlidingHistogram.SLOT_S * 1e9)
        if (slots == slots[0]).all():
            self._take(stamps, int(slots[0]))
            return
        for slot in np.unique(slots):
            self._take(stamps[:, slots == slot], int(slot))

    def _take(self, stamps: Array, slot: int) -> None:
        durations = self._kind.read(stamps)
        columns = sort_columns(np.stack(durations.columns) * 1e-9)
        for name, histogram, column in zip(
            self._kind.names, self._histograms, columns, strict=True
        ):
            uncertainty = durations.uncertainty.get(name)
            uncertainty_s = 0.0 if uncertainty is None else _greatest(uncertainty) * 1e-9
            histogram.take(column, slot, uncertainty_s)


def _greatest(values: Array) -> float:
    """Returns the greatest that is a number; 0 without any."""
    return float(np.fmax.reduce(values, initial=0.0))
