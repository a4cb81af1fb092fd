"""A ring as a queue: its transitions are handed out in their order, each once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.watcher import Slots

_ABSENT, _WAITING, _TAKEN = 0, 1, 2


class QueuedRows(NamedTuple):
    """Transitions of a queue, in their order."""

    slots: Slots
    """Where they are."""
    numbers: npt.NDArray[np.int64]
    """Which they are since the start: a slot may hold another one later."""


class TakeOnce:
    """Takes transitions out of a ring in their order; they leave it when that is confirmed.

    It becomes the `watcher` of the container, which counts transitions and overwrites the oldest.

    Args:
        container: The ring.

    Attributes:
        waiting: How many can be taken.
        taken: How many were taken, and neither removed nor put back yet.
    """

    def __init__(self, container: DataContainer) -> None:
        self.waiting = self.taken = 0
        self._container = container
        self._state = np.zeros(container.capacity, np.int8)
        self._rows: deque[QueuedRows] = deque()
        container.watcher = self

    def has_room(self, count: int) -> bool:
        """Tells whether the next `count` slots of the ring hold nothing that is still needed."""
        container = self._container
        slots = (container.pointer + np.arange(count)) % container.capacity
        return not self._state[slots].any()

    def take(self, count: int) -> QueuedRows:
        """Takes the oldest transitions; no more than `waiting`."""
        parts, missing = [], count
        while missing:
            rows = self._present(self._rows.popleft(), _WAITING)
            if len(rows.slots) > missing:
                self._rows.appendleft(QueuedRows(rows.slots[missing:], rows.numbers[missing:]))
                rows = QueuedRows(rows.slots[:missing], rows.numbers[:missing])
            parts.append(rows)
            missing -= len(rows.slots)
        taken = QueuedRows(
            np.concatenate([rows.slots for rows in parts]),
            np.concatenate([rows.numbers for rows in parts]),
        )
        self._state[taken.slots] = _TAKEN
        self.waiting -= count
        self.taken += count
        return taken

    def put_back(self, rows: QueuedRows) -> None:
        """Lets transitions be taken once more, before all that wait."""
        rows = self._present(rows, _TAKEN)
        self._state[rows.slots] = _WAITING
        self._rows.appendleft(rows)
        self.taken -= len(rows.slots)
        self.waiting += len(rows.slots)

    def remove(self, rows: QueuedRows) -> None:
        """Removes transitions from the ring, also such as were put back."""
        same = self._container.generation[rows.slots] == rows.numbers
        slots = rows.slots[same & (self._state[rows.slots] != _ABSENT)]
        self._container.remove(slots)

    def has_taken(self, rows: QueuedRows) -> bool:
        """Tells whether transitions that were taken are all still there."""
        return len(self._present(rows, _TAKEN).slots) == len(rows.slots)

    def order(self) -> QueuedRows:
        """Returns all transitions that wait, in their order."""
        none = np.zeros(0, np.int64)
        rows = [QueuedRows(none, none), *(self._present(one, _WAITING) for one in self._rows)]
        slots, numbers = zip(*rows, strict=True)
        return QueuedRows(np.concatenate(slots), np.concatenate(numbers))

    def restore(self, waiting: QueuedRows, taken: Sequence[QueuedRows]) -> None:
        """Sets what waits and what was taken, of transitions that are in the ring.

        Args:
            waiting: What `order` returned.
            taken: What `take` did, and was neither removed nor put back.
        """
        self._rows = deque([waiting] if len(waiting.slots) else [])
        self._state[waiting.slots] = _WAITING
        self.waiting = len(waiting.slots)
        for slots, numbers in taken:
            same = self._container.generation[slots] == numbers
            here = slots[same & (self._container.data_use_counter[slots] >= 0)]
            self._state[here] = _TAKEN
            self.taken += len(here)

    def _present(self, rows: QueuedRows, state: int) -> QueuedRows:
        """Returns those of the rows that are still there, and in that state."""
        slots, numbers = rows
        same = (self._container.generation[slots] == numbers) & (self._state[slots] == state)
        return QueuedRows(slots[same], numbers[same])

    # What the ring tells.

    def wrote(self, slots: Slots) -> None:
        """Queues new rows."""
        self._forget(slots)
        self._state[slots] = _WAITING
        self._rows.append(QueuedRows(slots, self._container.generation[slots]))
        self.waiting += len(slots)

    def released(self, slots: Slots) -> None:
        """Forgets rows that are gone."""
        self._forget(slots)
        self._state[slots] = _ABSENT

    def lowest(self, count: int) -> Slots:
        """Never asked for: a queue has no priorities."""
        raise NotImplementedError

    def _forget(self, slots: Slots) -> None:
        states = self._state[slots]
        self.waiting -= int(np.count_nonzero(states == _WAITING))
        self.taken -= int(np.count_nonzero(states == _TAKEN))
