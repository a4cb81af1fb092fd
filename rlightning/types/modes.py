"""What an action is asked for; the numbers equal those on the wire."""

from __future__ import annotations

from enum import IntEnum


class Mode(IntEnum):
    """Whether the policy may try things out."""

    EXPLORE = 1
    """Draw from the policy's distribution."""
    EXPLOIT = 2
    """The policy's best action."""


class Purpose(IntEnum):
    """What an action is for. Only `TRAIN` reaches replay."""

    TRAIN = 1
    """Experience to learn from."""
    EVAL = 2
    """A measurement of the policy."""
    RECORD = 3
    """A recording."""
