"""What a ring tells of its slots."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]


class Watcher(Protocol):
    """Follows what happens to the slots of a ring."""

    def wrote(self, slots: Slots) -> None:
        """Takes note that new rows are in slots."""

    def released(self, slots: Slots) -> None:
        """Takes note that slots hold nothing any more."""

    def lowest(self, count: int) -> Slots:
        """Returns the slots to write anew when removal goes by priority."""
