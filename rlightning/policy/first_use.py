"""How long it takes until published weights act."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_KEPT = 32


class FirstUse(NamedTuple):
    """When a version of the weights came and first acted, by this process's monotonic clock."""

    version: int
    """The version."""
    received_ns: int
    """When its weights began to come."""
    used_ns: int
    """When the first inference with them ended."""


class FirstUses:
    """Notes when versions come and first act; the last ones are kept.

    Attributes:
        version: The highest version that has acted.
    """

    def __init__(self) -> None:
        self.version = 0
        self._received: dict[int, int] = {}
        self._uses: deque[FirstUse] = deque(maxlen=_KEPT)

    def received(self, version: int, now_ns: int) -> None:
        """Notes when weights that are in use now began to come."""
        self._received[version] = now_ns

    def used(self, version: int, now_ns: int) -> float | None:
        """Notes that a version has acted.

        Returns:
            How many seconds its weights took to that from when they came; None if it is not known
            when they did, as after a restart.
        """
        self.version = version
        received_ns = self._received.pop(version, None)
        # Those that were replaced before they acted never will.
        self._received = {key: value for key, value in self._received.items() if key > version}
        if received_ns is None:
            return None
        self._uses.append(FirstUse(version, received_ns, now_ns))
        return (now_ns - received_ns) * 1e-9

    def last(self) -> list[FirstUse]:
        """Returns the last ones, oldest first."""
        return list(self._uses)
