"""Which envs of a group are reset in place of their next step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from rlightning.env.step_counter import EnvStepCounter
from rlightning.env.utils.agents import has_ended
from rlightning.types import EnvRet


class AutoReset:
    """Keeps the steps of envs within their episodes, between `begin` and `end`.

    Attributes:
        counter: Counts the steps; None while nothing is reset by itself.
        max_episode_steps: The limit that was given for every env.
    """

    def __init__(self) -> None:
        self.counter: EnvStepCounter | None = None
        self.max_episode_steps: int | None = None
        self._reset_on_done = False
        self._ended: set[str] = set()
        self._was_reset: set[str] = set()

    def begin(
        self,
        env_ids: Sequence[str],
        limits: list[int],
        *,
        max_episode_steps: int | None,
        reset_on_done: bool,
    ) -> None:
        """Counts from now on; an env that was reset before is taken to be at its reset.

        Args:
            env_ids: The envs.
            limits: Steps of each until its episode is truncated.
            max_episode_steps: The limit of envs that come later; None: their own.
            reset_on_done: Whether an env whose episode has ended is due as well.
        """
        counter = EnvStepCounter(list(env_ids), limits)
        for env_id in self._was_reset.intersection(env_ids):
            counter.step(env_id)
        self.counter = counter
        self.max_episode_steps = max_episode_steps
        self._reset_on_done = reset_on_done
        self._ended.clear()

    def end(self) -> None:
        """Counts no more."""
        self.counter = None
        self._reset_on_done = False
        self._ended.clear()

    def is_due(self, env_id: str) -> bool:
        """Whether an env has to be reset in place of its next step."""
        counter = self.counter
        if counter is None:
            return False
        if env_id in self._ended or counter.is_reached_max_steps(env_id):
            counter.reset(env_id)
        return counter[env_id] < 0

    def record_reset(self, env_id: str) -> None:
        """Takes note that an env is at its reset."""
        self._ended.discard(env_id)
        self._was_reset.add(env_id)
        if self.counter is not None:
            self.counter.reset(env_id)
            self.counter.step(env_id)

    def record(self, env_id: str, env_ret: EnvRet, *, resets_itself: bool) -> None:
        """Takes note of what an env returned from a step, or from the reset in place of one.

        Args:
            env_id: The env.
            env_ret: What it returned.
            resets_itself: Whether its rows begin their next episode by themselves.
        """
        counter = self.counter
        if counter is None:
            return
        if counter[env_id] < 0:
            self.record_reset(env_id)
            return
        counter.step(env_id)
        if self._reset_on_done and not resets_itself and has_ended(env_ret):
            self._ended.add(env_id)

    def truncations(self, env_ids: Iterable[str]) -> list[bool] | None:
        """Returns for each env whether it is at its limit; None while nothing is counted."""
        return None if self.counter is None else self.counter.get_truncations(env_ids)


def limit_of(env_id: str, own: int | None, given: int | None, *, stacklevel: int) -> int:
    """Returns the steps at which an episode of an env is truncated.

    Args:
        env_id: The env.
        own: The limit in its config.
        given: The limit for all envs of the group, which comes first; None: there is none.
        stacklevel: Of the warning that `own` gives way, above this function.

    Raises:
        ValueError: `given` is no positive integer, or there is no limit at all.
    """
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"max_steps must be a positive integer, got {given!r}")
        if own not in (None, given):
            warnings.warn(
                f"env {env_id!r}: its max_episode_steps {own} gives way to {given}",
                UserWarning,
                stacklevel=stacklevel + 1,
            )
        return given
    if own is None:
        raise ValueError(f"env {env_id!r} has no max_episode_steps, and none was given")
    return own
