"""What a writer has sent and knows no ack of: it takes room in the window, and may come again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer
from rlightning.wire.shared import SharedMemory
from rlightning.wire.tensor import take_out


class Sent(NamedTuple):
    """A message that is not acked yet."""

    seq: int
    epoch: int
    items: int
    data: bytes
    nbytes: int
    """What counts for the window: its size, and that of its tensors in shared memory."""
    keys: tuple[int, ...]
    """Under which keys it has tensors there."""
    sent_ns: int
    """When it was first sent, by this process's monotonic clock."""
    left_ns: int
    """When what it brings left the env, by the same clock."""


class Window:
    """The messages that are not acked, the oldest first.

    Args:
        max_items: Items that may be in it.
        max_bytes: Bytes that may be, unless it is a single message.

    Attributes:
        max_items: As given.
        max_bytes: As given.
        items: Items in it.
        nbytes: Bytes in it.
        memory: Where those tensors lie that are not in the messages; None if all are.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.items = 0
        self.nbytes = 0
        self.memory: SharedMemory | None = None
        self.max_items = max_items
        self.max_bytes = max_bytes
        self._sent: deque[Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[Sent]:
        return iter(self._sent)

    @property
    def first(self) -> Sent | None:
        """The oldest message; None if there is none."""
        return self._sent[0] if self._sent else None

    def is_full(self, items: int, nbytes: int) -> bool:
        """Tells whether nothing more may come while so much waits to be sent."""
        items += self.items
        nbytes += self.nbytes
        return items > 0 and (items >= self.max_items or nbytes >= self.max_bytes)

    def add(self, sent: Sent) -> None:
        """Adds the newest message."""
        self._sent.append(sent)
        self.items += sent.items
        self.nbytes += sent.nbytes

    def forget(self, seq: int) -> int:
        """Drops the messages up to a number, and what they have in memory.

        Returns:
            How many items they had.
        """
        before = self.items
        while self._sent and self._sent[0].seq <= seq:
            sent = self._sent.popleft()
            self.items -= sent.items
            self.nbytes -= sent.nbytes
            if self.memory is not None:
                for key in sent.keys:
                    self.memory.free(key)
        return before - self.items

    def move_to(self, memory: SharedMemory | None) -> None:
        """Lets tensors go to the memory of a new stream; those in the old one go by bytes."""
        old, self.memory = self.memory, memory
        if old is None:
            return
        for index, sent in enumerate(self._sent):
            if sent.keys:
                request, w = pb.InsertRequest.FromString(sent.data), Writer()
                take_out(request, old, w)
                self._sent[index] = sent._replace(data=w.finish(request), keys=())
