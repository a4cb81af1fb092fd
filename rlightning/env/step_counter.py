"""Counts the steps of each env within its episode."""

from __future__ import annotations

from collections.abc import Iterable


class EnvStepCounter:
    """Counts the steps of each env within its episode: -1 before a reset, 0 after it.

    Args:
        env_ids: The envs.
        max_steps_list: For each the steps at which its episode is truncated.

    Raises:
        ValueError: The arguments are no lists of equal length.
    """

    def __init__(self, env_ids: list[str], max_steps_list: list[int]) -> None:
        if not isinstance(env_ids, list) or not isinstance(max_steps_list, list):
            raise ValueError("env_ids and max_steps_list must be lists")
        if len(env_ids) != len(max_steps_list):
            raise ValueError(f"{len(env_ids)} env_ids, but {len(max_steps_list)} step limits")
        self._max_steps = dict(zip(env_ids, max_steps_list, strict=True))
        self._steps = dict.fromkeys(env_ids, -1)

    def add(self, env_id: str, max_steps: int) -> None:
        """Counts one more env, from -1; one that is counted already goes on."""
        self._max_steps[env_id] = max_steps
        self._steps.setdefault(env_id, -1)

    def __getitem__(self, env_id: str) -> int:
        return self._steps[env_id]

    def reset(self, env_id: str) -> None:
        """Sets an env to -1: its next count is that of its reset."""
        self._check(env_id)
        self._steps[env_id] = -1

    def reset_all(self) -> None:
        """Sets every env to -1."""
        self._steps = dict.fromkeys(self._steps, -1)

    def step(self, env_id: str) -> None:
        """Counts a reset or step of one env.

        Raises:
            ValueError: It is at its limit.
        """
        if self.is_reached_max_steps(env_id):
            limit = self._max_steps[env_id]
            raise ValueError(f"env {env_id!r} has reached its maximum of {limit} steps")
        self._steps[env_id] += 1

    def step_all(self) -> None:
        """Counts a reset or step of every env."""
        for env_id in self._steps:
            self.step(env_id)

    def get_steps(self, env_id: str) -> int:
        """Returns the count of an env."""
        self._check(env_id)
        return self._steps[env_id]

    def get_max_steps(self, env_id: str) -> int:
        """Returns the limit of an env."""
        self._check(env_id)
        return self._max_steps[env_id]

    def is_reached_max_steps(self, env_id: str) -> bool:
        """Whether an env is at its limit, so that it must be reset next."""
        self._check(env_id)
        return self._steps[env_id] >= self._max_steps[env_id]

    def get_truncations(self, env_ids: Iterable[str] | None = None) -> list[bool]:
        """Returns for each env whether it is at its limit; for all of them if None."""
        return [self.is_reached_max_steps(e) for e in (self._steps if env_ids is None else env_ids)]

    def _check(self, env_id: str) -> None:
        if env_id not in self._steps:
            raise KeyError(f"no env {env_id!r} is counted")
