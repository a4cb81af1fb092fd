"""Strings of a ring: each distinct one is kept once, and rows hold its number."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Strings = npt.NDArray[np.object_]

_FIRST_SWEEP = 1024


class Texts:
    """Distinct strings by number; number 0 is the empty one.

    Strings that no row refers to any more are dropped by `sweep`, which is due whenever there are
    twice as many as the last one has left.

    Attributes:
        nbytes: Memory of the strings and of the table, in bytes.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": 0}
        self._strings: Strings = np.full(16, "", np.object_)
        self._free: list[int] = []
        self._sweep_at = _FIRST_SWEEP
        self._held_bytes = 0

    @property
    def nbytes(self) -> int:
        """Memory of the strings and of the table, in bytes."""
        return self._held_bytes + self._strings.nbytes + sys.getsizeof(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def put(self, strings: Strings) -> Ids:
        """Returns the numbers of strings, int32, in the same shape; new ones get one."""
        ids = self._ids
        flat: list[str] = strings.reshape(-1).tolist()
        found = [ids.get(string) for string in flat]
        for i, (number, string) in enumerate(zip(found, flat, strict=True)):
            if number is None:
                found[i] = ids[string] if string in ids else self._add(string)
        return np.array(found, np.int32).reshape(strings.shape)

    def get(self, ids: Ids) -> Strings:
        """Returns strings by number, in the same shape."""
        strings: Strings = self._strings.take(ids)
        return strings

    @property
    def sweep_is_due(self) -> bool:
        """Whether it is time to look which strings are still needed."""
        return len(self._ids) >= self._sweep_at

    def sweep(self, used: Iterable[Ids]) -> None:
        """Drops all strings whose numbers are in none of the arrays.

        What was never written in them may be any number.
        """
        alive = np.zeros(len(self._strings), np.bool_)
        alive[0] = True
        for ids in used:
            alive[ids[(ids >= 0) & (ids < len(alive))]] = True
        for string, number in list(self._ids.items()):
            if not alive[number]:
                del self._ids[string]
                self._strings[number] = ""
                self._held_bytes -= sys.getsizeof(string)
                self._free.append(number)
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._ids))

    def restore(self, numbers: Iterable[tuple[str, int]]) -> None:
        """Takes strings with the numbers that they had before, in place of all that are here."""
        self._ids = dict(numbers)
        length = max(self._ids.values(), default=0) + 1
        self._strings = np.full(max(16, length), "", np.object_)
        for string, number in self._ids.items():
            self._strings[number] = string
        self._free = sorted(set(range(length)) - set(self._ids.values()), reverse=True)
        self._held_bytes = sum(sys.getsizeof(string) for string in self._ids) - sys.getsizeof("")
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._ids))

    def _add(self, string: str) -> int:
        number = self._free.pop() if self._free else len(self._ids)
        if number >= len(self._strings):
            longer = np.full(2 * len(self._strings), "", np.object_)
            longer[: len(self._strings)] = self._strings
            self._strings = longer
        self._ids[string] = number
        self._strings[number] = string
        self._held_bytes += sys.getsizeof(string)
        return number
