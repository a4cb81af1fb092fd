"""Which action of which answer may be executed at a step: the action-chunk queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.env.remote_env.spool import SpooledStep
from rlightning.types import PolicyResponse

_PLAIN = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiDiscrete,
    gym.spaces.MultiBinary,
)


@dataclass(frozen=True)
class Answer:
    """What the policy answered to a step.

    Attributes:
        seq: Number of the step.
        index: How many times the env was stepped or reset before it.
        observed_ns: Monotonic time of its observation.
        actions: What to execute at this step, the next one, and so on; leaves [1, ...].
        response: The policy's response.
    """

    seq: int
    index: int
    observed_ns: int
    actions: list[Any]
    response: PolicyResponse

    @staticmethod
    def of(step: SpooledStep, response: PolicyResponse, space: gym.Space[Any]) -> Answer:
        """Returns the answer to a step of an env of one row."""
        actions = split_chunk(space, response.action)
        return Answer(step.seq, step.index, step.observed_ns, actions, response)


@dataclass(frozen=True)
class Chosen:
    """An action of an answer, chosen for a step.

    Attributes:
        action: Leaves [1, ...].
        answer: Where it is from.
        chunk_index: Which of its actions it is.
        age_ns: Time since the observation that was answered.
    """

    action: Any
    answer: Answer
    chunk_index: int
    age_ns: int


class ActionQueue:
    """Holds the newest answer. An action is for one step: asked + h, within the same episode.

    Another thread offers answers; neither ever waits.

    Args:
        max_age_ms: How old the observation may be, in milliseconds; None: as old as it is.

    Attributes:
        skipped: Actions whose step had passed when their answer came.
        too_old: Times that an action was there and not used because of its age.
    """

    def __init__(self, max_age_ms: float | None = None) -> None:
        self.skipped = 0
        self.too_old = 0
        self._max_age_ns = None if max_age_ms is None else int(max_age_ms * 1e6)
        self._offered: Answer | None = None
        self._answer: Answer | None = None
        self._begin = 0

    def offer(self, answer: Answer) -> None:
        """Takes an answer in place of older ones; for the other thread."""
        self._offered = answer

    def begin_episode(self, index: int) -> None:
        """Uses no answer to a step before this one any more."""
        self._begin = index

    def at(self, index: int, now_ns: int, *, any_age: bool = False) -> Chosen | None:
        """Returns the action for a step; None if there is none.

        Args:
            index: How many times the env was stepped or reset before.
            now_ns: Monotonic time.
            any_age: Use it however old the observation is.
        """
        answer = self._offered
        if answer is not self._answer and answer is not None:
            self._answer = answer
            self.skipped += min(index - answer.index, len(answer.actions))
        if answer is None or answer.index < self._begin:
            return None
        ahead = index - answer.index
        if ahead >= len(answer.actions):
            return None
        age_ns = now_ns - answer.observed_ns
        if not any_age and self._max_age_ns is not None and age_ns > self._max_age_ns:
            self.too_old += 1
            return None
        return Chosen(answer.actions[ahead], answer, ahead, age_ns)


def split_chunk(space: gym.Space[Any], action: Any) -> list[Any]:
    """Returns the actions of an answer.

    An answer has several if every leaf has one axis more than the space, after that of the rows:
    [rows, H, ...] instead of [rows, ...]. One that is neither is left as it is, for the env to
    refuse.

    Returns:
        Actions, leaves [rows, ...].
    """
    lengths: set[int] = set()

    def measure(space: gym.Space[Any], leaf: Any) -> Any:
        array, shape = np.asarray(leaf), space.shape or ()
        is_chunk = array.ndim == len(shape) + 2 and array.shape[2:] == shape
        lengths.add(array.shape[1] if is_chunk else 0)
        return leaf

    _map_space(measure, space, action)
    if len(lengths) != 1 or not (length := lengths.pop()):
        return [action]

    def taking(h: int) -> Callable[[gym.Space[Any], Any], Any]:
        return lambda _, leaf: np.asarray(leaf)[:, h]

    return [_map_space(taking(h), space, action) for h in range(length)]


def as_executed(space: gym.Space[Any], action: Any) -> Any:
    """Returns the actions of rows in the dtypes and shapes of their space, leaves [rows, ...]."""

    def fit(space: gym.Space[Any], leaf: Any) -> Any:
        return np.array(leaf, space.dtype).reshape((-1, *(space.shape or ())))

    return _map_space(fit, space, action)


def zero_action(space: gym.Space[Any]) -> Any:
    """Returns the action that is zero everywhere, leaves [...]."""
    if isinstance(space, gym.spaces.Dict):
        return {key: zero_action(child) for key, child in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(zero_action(child) for child in space.spaces)
    return np.zeros(space.shape or (), space.dtype)[()]


def is_plain(space: gym.Space[Any]) -> bool:
    """Whether all of a space are arrays of a fixed shape."""
    if isinstance(space, gym.spaces.Dict):
        return all(map(is_plain, space.spaces.values()))
    if isinstance(space, gym.spaces.Tuple):
        return all(map(is_plain, space.spaces))
    return isinstance(space, _PLAIN)


def _map_space(
    function: Callable[[gym.Space[Any], Any], Any], space: gym.Space[Any], action: Any
) -> Any:
    """Applies a function to every leaf of an action, with the space that it is of."""
    if isinstance(space, gym.spaces.Dict):
        return {
            key: _map_space(function, child, action[key]) for key, child in space.spaces.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            _map_space(function, child, part)
            for child, part in zip(space.spaces, action, strict=True)
        )
    return function(space, action)
