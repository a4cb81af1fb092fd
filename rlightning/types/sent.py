"""When what travels left where it comes from, and how long ago that is."""

from __future__ import annotations

import copyreg
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

# When something left, in ns of this process's monotonic clock, and how far that may be off.
Left = tuple[int, int]
WhenLeft = Callable[[], Left | None]
"""Returns that if it is asked; None where it is not known."""


class Sent:
    """What was sent by this process, or came from another one.

    Classes of it have a slot `_left`: a moment of this process's clock is none of their data, and
    means nothing to another process, to which pickling may take them.
    """

    __slots__ = ()

    _left: Left | WhenLeft

    # Before Python 3.11 there is no default to ask.
    def __getstate__(self) -> dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]:
        names = copyreg._slotnames(type(self))  # type: ignore[attr-defined]
        slots = {name: getattr(self, name) for name in names if hasattr(self, name)}
        slots.pop("_left", None)
        return (self.__dict__, slots) if slots else self.__dict__

    def mark_left(self, left: Left | WhenLeft) -> Self:
        """Notes when this left, as `corrected_latency` goes by; returns itself.

        Args:
            left: When, in nanoseconds of this process's monotonic clock, and how far that may be
                off; or what returns them if it is asked, None where that is not known.
        """
        self._left = left  # type: ignore[misc]  # a slot of each class of it
        return self

    def corrected_latency(self, now_ns: int | None = None) -> tuple[float, float] | None:
        """Returns the seconds since this left, and how far they may be off.

        By monotonic clocks: that of this process and, of what came from another one, that one's as
        far as its offset is known.

        Args:
            now_ns: Monotonic time in nanoseconds; now if None.

        Returns:
            Two numbers of seconds, the first at least 0.0; None while that is not known: of what
            nobody has sent, of a copy that was pickled, and while the clock of who sent it is not
            known. So it is of a policy server's answer that was asked for twice, or with
            `log.latency: false`.
        """
        left = getattr(self, "_left", None)
        if callable(left):
            left = left()
        if left is None:
            return None
        left_ns, within_ns = left
        elapsed_ns = (time.monotonic_ns() if now_ns is None else now_ns) - left_ns
        return max(0, elapsed_ns) * 1e-9, within_ns * 1e-9


def sent_latency(sent_ns: Any, now_ns: int | None) -> float:
    """Returns seconds from a stamp to `now_ns` (now if None), at least 0.0; 0.0 if no number.

    Both are Unix times in nanoseconds, by wall clocks.
    """
    try:
        sent = int(sent_ns)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    now = time.time_ns() if now_ns is None else now_ns
    return max(0.0, (now - sent) / 1e9)
