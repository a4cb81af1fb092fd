"""Which of several policies answers an env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Router(Protocol):
    """Chooses a policy for each env that asks."""

    def choose(self, env_id: str, loads: Sequence[int]) -> int:
        """Returns the index of a policy.

        Args:
            env_id: Who asks.
            loads: Requests that each policy has to answer now, those just routed included.
        """
        ...


class LeastLoaded:
    """The policy with the fewest requests to answer; of equal ones, the first."""

    def choose(self, env_id: str, loads: Sequence[int]) -> int:
        """Returns the index of a policy, see `Router`."""
        return loads.index(min(loads))


class Sticky:
    """The policy that answered the env before; of a new one, that with the fewest envs."""

    def __init__(self) -> None:
        self._chosen: dict[str, int] = {}

    def choose(self, env_id: str, loads: Sequence[int]) -> int:
        """Returns the index of a policy, see `Router`."""
        if env_id not in self._chosen:
            counts = [0] * len(loads)
            for index in self._chosen.values():
                counts[index] += 1
            self._chosen[env_id] = counts.index(min(counts))
        return self._chosen[env_id]
