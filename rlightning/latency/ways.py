"""How long messages between two clocks were under way, as far as the offset is known."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class OneWay(NamedTuple):
    """How long the two messages of an exchange were under way, in seconds.

    Each true time lies within `uncertainty_s` of its figure; neither figure is ever negative.
    """

    uplink_s: float
    downlink_s: float
    uncertainty_s: float

    @classmethod
    def of(cls, up_ns: float, down_ns: float, lower_ns: float, upper_ns: float) -> OneWay | None:
        """Returns the times of an exchange; None while they are unknown.

        Arguments are those of `one_way`, of which this is one exchange: for few numbers, arrays
        cost more than all else about a trace.
        """
        most_up, most_down = up_ns - lower_ns, down_ns + upper_ns
        if not (most_up >= 0 and most_down >= 0):
            return None
        least_up, least_down = max(0.0, up_ns - upper_ns), max(0.0, down_ns + lower_ns)
        half = max(most_up - least_up, most_down - least_down) / 2
        up, down = (least_up + most_up) / 2, (least_down + most_down) / 2
        return cls(up * 1e-9, down * 1e-9, half * 1e-9)


def one_way(up: Array, down: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array]:
    """Returns how long the two messages of exchanges were under way, all in nanoseconds.

    Args:
        up: When the peer had the request, by its clock, minus when it was sent, by this one.
        down: When the answer was here, by this clock, minus when the peer sent it, by its own.
        lower: The least that the peer's clock may be ahead of this one; NaN while it is unknown.
        upper: The most.

    Returns:
        Uplink, downlink, and how far each may be off; NaN where they are unknown, or somebody
        stamped who does not read these clocks.
    """
    least_up, most_up = _one_message(up, lower, upper)
    least_down, most_down = _one_message(down, -upper, -lower)
    half = np.maximum(most_up - least_up, most_down - least_down) / 2
    known = np.minimum(most_up, most_down) >= 0
    return (
        np.where(known, (least_up + most_up) / 2, math.nan),
        np.where(known, (least_down + most_down) / 2, math.nan),
        np.where(known, half, math.nan),
    )


def one_message(apparent: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Returns how long messages were under way, and how far that may be off, in nanoseconds.

    Args:
        apparent: When the receiver had it, by its clock, minus when it was sent, by the sender's.
        lower: The least that the receiver's clock may be ahead of the sender's; NaN while it is
            unknown.
        upper: The most.

    Returns:
        NaN where they are unknown, as `one_way`.
    """
    least, most = _one_message(apparent, lower, upper)
    known = most >= 0
    return np.where(known, (least + most) / 2, math.nan), np.where(
        known, (most - least) / 2, math.nan
    )


def one_message_s(apparent: float, lower: float, upper: float) -> tuple[float, float] | None:
    """Returns `one_message` of one, in seconds; None while it is unknown."""
    taken = _of_one(apparent, lower, upper)
    return None if taken is None else (taken[0] * 1e-9, taken[1] * 1e-9)


def left_at(
    sent_ns: int, received_ns: int, lower_ns: float, upper_ns: float
) -> tuple[int, int] | None:
    """Returns when a message left its sender, by this clock, and how far that may be off.

    Args:
        sent_ns: When it was sent, by the sender's clock.
        received_ns: When it was here.
        lower_ns: The least that the sender's clock may be ahead of this one; NaN while it is
            unknown.
        upper_ns: The most.

    Returns:
        Two numbers of nanoseconds; None while that is unknown.
    """
    taken = _of_one(received_ns - sent_ns, -upper_ns, -lower_ns)
    return None if taken is None else (received_ns - round(taken[0]), round(taken[1]))


def _of_one(apparent: float, lower: float, upper: float) -> tuple[float, float] | None:
    """Returns `one_message` of one; None while it is unknown."""
    taken, half = one_message(*map(np.asarray, (apparent, lower, upper)))
    return None if math.isnan(taken) else (float(taken), float(half))


def _one_message(apparent: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Returns the least and the most that it took: nothing arrives before it was sent."""
    return np.maximum(0.0, apparent - upper), apparent - lower
