"""Small envs that the tests share."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.types import PolicyResponse
from rlightning.utils.config import EnvConfig


def config(task: str = "CartPole-v1", **values: Any) -> EnvConfig:
    defaults = {"name": "test", "backend": "gymnasium", "task": task}
    return EnvConfig(**{**defaults, **values})


def answer(env_id: str, action: Any, **data: Any) -> PolicyResponse:
    return PolicyResponse(env_id, action=action, **data)


class Counting(gym.Env[Any, Any]):
    """Counts its steps; an episode ends after 3 + (episode % 3) steps, by turns truncated."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, offset: int = 0, shift: int = 0) -> None:
        self.offset = offset + shift
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self._observation(), {"fresh": True}

    def step(self, action):
        self.steps += 1
        ended = self.steps == 3 + self.episode % 3
        truncated = ended and self.episode % 2 == 1
        reward = float(action[0]) + self.steps
        return self._observation(), reward, ended and not truncated, truncated, {"k": self.steps}

    def _observation(self):
        return np.array([self.offset + self.episode, self.steps], np.float32)


class OldReset(Counting):
    """Gives the observation alone, as gym did before gymnasium."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(Counting):
    """Gives one flag, as gym did before gymnasium."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class Nested(gym.Env[Any, Any]):
    """A Dict observation with a Text part, a Dict action; every second step ends an episode."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "pose": gym.spaces.Tuple(
                (gym.spaces.Box(-1, 1, (3,), np.float64), gym.spaces.Discrete(5))
            ),
            "task": gym.spaces.Text(20),
        }
    )
    action_space = gym.spaces.Dict(
        {"grip": gym.spaces.Discrete(2), "move": gym.spaces.Box(-1.0, 1.0, (2,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        self.last_action = action
        return self._observation(), 1.0, self.steps == 2, False, {}

    def _observation(self):
        return {
            "image": np.full((2, 2, 3), self.steps, np.uint8),
            "pose": (np.full(3, self.steps / 4), self.steps),
            "task": f"step {self.steps}"[:20],
        }


class WrongShape(Counting):
    """Declares another observation than it gives."""

    observation_space = gym.spaces.Box(-1, 1, (5,), np.float32)


class WrongLater(Counting):
    """Keeps to its observation space at reset only."""

    def step(self, action):
        observation, *outcome = super().step(action)
        return (observation[:1], *outcome)


class Breaking(Counting):
    """Raises in its second step, but for the first episode."""

    def step(self, action):
        if self.episode and self.steps == 1:
            raise RuntimeError("the arm fell off")
        return super().step(action)


class BreakingOrSlow(Counting):
    """Raises at once at an action above 0, and takes a while for others."""

    def step(self, action):
        if action[0] > 0:
            raise RuntimeError("the arm fell off")
        time.sleep(0.3)
        return super().step(action)


class AlwaysBreaking(Counting):
    """Raises in every step."""

    def step(self, action):
        raise RuntimeError("the arm fell off")


class SometimesBreaking(Counting):
    """Raises in the second step of every seventh episode."""

    def step(self, action):
        if self.episode % 7 == 6 and self.steps == 1:
            raise RuntimeError("the arm fell off")
        return super().step(action)


class SlowReset(Counting):
    """Takes a second to reset, or as long as it is told."""

    pause_s = 1.0

    def reset(self, *, seed=None, options=None):
        time.sleep(self.pause_s)
        return super().reset(seed=seed, options=options)


class Unmakeable(Counting):
    """Cannot be made."""

    def __init__(self):
        raise OSError("no licence")


def make_counting(offset: int = 7) -> Counting:
    return Counting(offset)


not_an_env = 3


class Gated(Counting):
    """Stands still in its third step while a file is there, if it was made first; 1 ends its process."""

    def __init__(self, folder):
        self.number = 0
        while not self._takes(Path(folder, str(self.number))):
            self.number += 1
        self.gate = Path(folder, "closed")
        super().__init__(100 * self.number)

    def _takes(self, place):
        try:
            place.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation, {**info, "pid": os.getpid()}

    def step(self, action):
        if action[0] == 1.0:
            os._exit(3)
        while self.number == 0 and self.steps == 2 and self.gate.exists():
            time.sleep(0.005)
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "pid": os.getpid()}


class Unclosable(Counting):
    """Cannot be closed."""

    def close(self):
        raise OSError("the arm is stuck")
