"""Lets SIGTERM, and a terminal that closes, end a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOOK_S = 0.5


def interrupt_without_parent() -> None:
    """From now on, ends this process as SIGTERM does once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextmanager
def interruptible() -> Iterator[None]:
    """Does on SIGTERM and SIGHUP what Ctrl-C does; call it in the main thread. May be nested.

    That is to raise KeyboardInterrupt(number), unless something handles SIGINT in its own way. A
    SIGHUP that is ignored, as under nohup, stays so; Windows has none. Libraries that raise
    something else once they are interrupted, as TensorDict does in a context, still end as
    interrupted.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(ctrl_c) and ctrl_c is not signal.default_int_handler:
            ctrl_c(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt(number)

    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if hasattr(signal, "SIGHUP"):
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup is not signal.SIG_IGN:
            before[signal.SIGHUP] = hangup
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt(*error.__context__.args) from error
        raise
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:  # else it is for somebody else by now
                signal.signal(number, handler)


@contextmanager
def one_line_interrupt() -> Iterator[None]:
    """Makes a process `interruptible` from its start: all that it does is inside, its imports too.

    SIGTERM would kill it before that, and the first process of a container would not even hear it.
    An interrupt that nothing inside deals with is one line on stderr and exit status 130.
    """
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(128 + signal.SIGINT) from None
