"""An env whose observations say which they are, and which notices an action that is for another."""

from __future__ import annotations

import secrets
from typing import Any

import gymnasium as gym
import numpy as np

# Columns of an observation.
INSTANCE, EPISODE, STEP, WRONG = range(4)
_LARGEST = 2**40


def length_of(episode: Any) -> Any:
    """Steps of an episode: 1 to 7."""
    return 1 + episode * 5 % 7


def is_truncated(episode: Any) -> Any:
    """Whether an episode ends by truncation; else by termination."""
    return episode % 3 == 0


def reward_of(episode: Any, step: Any) -> Any:
    """Reward of the action that follows the observation `step`."""
    return (episode % 1000) * 10 + step


class Counting(gym.Env[np.ndarray, np.ndarray]):
    """Counts episodes and steps, and the actions that were not the answer to the last observation.

    Observation: int64 [4], (instance, episode, step, wrong actions so far).
    Action: int64 [3], (instance, episode, step) of the observation that it answers.
    """

    observation_space = gym.spaces.Box(0, _LARGEST, (4,), np.int64)
    action_space = gym.spaces.Box(0, _LARGEST, (3,), np.int64)

    def __init__(self) -> None:
        self._state = np.array([secrets.randbelow(_LARGEST), -1, 0, 0])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self._state[EPISODE] += 1
        self._state[STEP] = 0
        return self._state.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not np.array_equal(action, self._state[:WRONG]):
            self._state[WRONG] += 1
        _, episode, step, _ = self._state
        self._state[STEP] += 1
        ended = bool(self._state[STEP] == length_of(episode))
        truncated = ended and bool(is_truncated(episode))
        reward = float(reward_of(episode, step))
        return self._state.copy(), reward, ended and not truncated, truncated, {}


class Endless(Counting):
    """Has one episode, which never ends, and says so when it is closed."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}

    def close(self) -> None:
        print("the env is closed", flush=True)
