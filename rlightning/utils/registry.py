"""Names under which a config finds envs, buffers and policies."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class Registry:
    """Classes and factories by name.

    Args:
        name: What is registered here, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: dict[str, Any] = {}

    def register(self, key: str) -> Callable[[_T], _T]:
        """Returns a decorator that registers a class or factory and gives it back unchanged.

        Raises:
            KeyError: The key is taken.
        """

        def decorate(entry: _T) -> _T:
            if key in self._entries:
                raise KeyError(f"{self.name} {key!r} is already registered")
            self._entries[key] = entry
            return entry

        return decorate

    def get(self, key: str) -> Any:
        """Returns what is registered under a key.

        Raises:
            KeyError: Nothing is; the message names similar keys.
        """
        try:
            return self._entries[key]
        except KeyError:
            near = difflib.get_close_matches(key, self._entries, n=3)
            known = ", ".join(sorted(self._entries)) or "none"
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {known}"
            raise KeyError(f"no {self.name} {key!r} is registered; {hint}") from None

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


ENVS = Registry("env backend")
"""Subclasses of `BaseEnv` by backend."""

BUFFERS = Registry("buffer")
"""Subclasses of `DataBuffer` by `buffer.type`."""

POLICY = Registry("policy")
"""Subclasses of `BasePolicy` by `policy.type`."""
