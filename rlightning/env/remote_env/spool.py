"""The steps that an env has executed and no server has taken yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from rlightning.types import EnvRet
from rlightning.utils.conversions import map_leaves


@dataclass(frozen=True)
class SpooledStep:
    """A step on its way to the server.

    Attributes:
        seq: Its number within the session, from 1 without gaps.
        index: How many times the env was stepped or reset before, those included that were dropped.
        env_ret: What the env returned.
        observed_ns: Monotonic time when it did.
        wants_action: Whether an answer to it is of use.
        dropped: Steps before it that are lost, since there was no room.
        nbytes: Size of its arrays.
    """

    seq: int
    index: int
    env_ret: EnvRet
    observed_ns: int
    wants_action: bool
    dropped: int
    nbytes: int


class Spool:
    """Steps in order, from the last one that a server has taken, in bounded room.

    One thread puts steps in, another one reads and releases them; neither ever waits.

    Args:
        max_steps: Steps that may wait for a server.
        max_bytes: Bytes of them, and of the last one that was taken.

    Attributes:
        taken: Number of the last step that a server has taken.
        newest: The last one that was put in; None before the first.
    """

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self.taken = 0
        self.newest: SpooledStep | None = None
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._steps: deque[SpooledStep] = deque()
        # Each is written by one thread alone.
        self._put_bytes = 0
        self._released_bytes = 0

    def __len__(self) -> int:
        newest = self.newest
        return 0 if newest is None else max(0, newest.seq - self.taken)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._put_bytes - self._released_bytes

    @property
    def is_half_empty(self) -> bool:
        """Whether there is room for many more."""
        return 2 * len(self) <= self._max_steps and 2 * self.nbytes <= self._max_bytes

    def is_last(self, nbytes: int) -> bool:
        """Tells whether a step of this size is the last that there is room for."""
        steps, total = len(self) + 1, self.nbytes + nbytes
        return steps >= self._max_steps or total + nbytes > self._max_bytes

    # For the thread that steps the env.

    def put(
        self,
        env_ret: EnvRet,
        *,
        index: int,
        observed_ns: int,
        nbytes: int,
        wants_action: bool = True,
        dropped: int = 0,
    ) -> None:
        """Takes a step, also if there is no room."""
        seq = 1 if self.newest is None else self.newest.seq + 1
        step = SpooledStep(seq, index, env_ret, observed_ns, wants_action, dropped, nbytes)
        self._put_bytes += nbytes
        self._steps.append(step)
        self.newest = step

    # For the thread that sends.

    def after(self, seq: int, *, steps: int, max_bytes: int) -> list[SpooledStep]:
        """Returns the steps after one, as many as asked for; one at least passes `max_bytes`."""
        found: list[SpooledStep] = []
        if not self._steps:
            return found
        position, nbytes = seq + 1 - self._steps[0].seq, 0
        while len(found) < steps and position < len(self._steps):
            step = self._steps[position]
            nbytes += step.nbytes
            if found and nbytes > max_bytes:
                break
            found.append(step)
            position += 1
        return found

    def replace(self, seq: int, env_ret: EnvRet) -> None:
        """Holds a step in another form from now on, unless it is gone already."""
        if self._steps and (position := seq - self._steps[0].seq) >= 0:
            before, nbytes = self._steps[position], nbytes_of(env_ret)
            self._steps[position] = replace(before, env_ret=env_ret, nbytes=nbytes)
            self._released_bytes += before.nbytes - nbytes

    def take(self, seq: int) -> None:
        """Takes note that a server has taken the steps up to one; keeps that one."""
        self.taken = seq
        while self._steps and self._steps[0].seq < seq:
            self._released_bytes += self._steps.popleft().nbytes


def nbytes_of(env_ret: EnvRet) -> int:
    """Returns the size in bytes of the arrays of an EnvRet, for the most part."""
    total = 0

    def add(leaf: object) -> object:
        nonlocal total
        if isinstance(leaf, (np.ndarray, np.generic)):
            total += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            total += len(leaf)
        else:
            total += 8
        return leaf

    map_leaves(add, (env_ret.observation, env_ret.info, env_ret._extra, env_ret.executed_action))
    return total
