"""An env whose observations say where they belong, so that a stored transition proves itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.types import EnvMeta, EnvRet, PolicyResponse

SPACE = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
OUTPUTS = ("action", "log_prob", "value")

Ends = Callable[[int, int], tuple[int, bool]]


def meta(rows: int | None = 2, env_id: str = "env", observation: Any = SPACE) -> EnvMeta:
    return EnvMeta(env_id, gym.spaces.Discrete(10**6), observation, rows)


def never(row: int, episode: int) -> tuple[int, bool]:
    return 10**9, True


class ScriptedEnv:
    """A vector env with SAME_STEP autoreset; observation = (row, episode, step).

    Args:
        rows: Number of rows.
        ends: Length of an episode of a row, and whether it then terminates (or is truncated).
    """

    def __init__(self, rows: int = 2, ends: Ends = never, env_id: str = "env") -> None:
        self.env_id = env_id
        self.rows = np.arange(rows)
        self.step_count = np.zeros(rows, np.int64)
        self.episode = np.arange(rows)
        self._next = rows
        self._ends = ends

    @property
    def meta(self) -> EnvMeta:
        return meta(len(self.rows), self.env_id)

    def _observation(self) -> np.ndarray:
        return np.stack([self.rows, self.episode, self.step_count], 1).astype(np.float32)

    def _env_ret(self, **fields: Any) -> EnvRet:
        return EnvRet(
            self.env_id,
            self._observation(),
            episode_id=self.episode.copy(),
            step=self.step_count.copy(),
            **fields,
        )

    def reset(self) -> EnvRet:
        no = np.zeros(len(self.rows), bool)
        self.step_count[:] = 0
        self.episode = np.arange(self._next, self._next + len(self.rows))
        self._next += len(self.rows)
        return self._env_ret(
            last_reward=np.zeros(len(self.rows)), last_terminated=no, last_truncated=no
        )

    def step(self) -> EnvRet:
        self.step_count += 1
        ends = [
            self._ends(r, e) for r, e in zip(self.rows.tolist(), self.episode.tolist(), strict=True)
        ]
        over = self.step_count >= np.array([length for length, _ in ends])
        terminated = over & np.array([kind for _, kind in ends])
        reward = reward_of(self.rows, self.episode, self.step_count)
        info: dict[str, Any] = {}
        if over.any():
            info = {
                "final_rows": np.flatnonzero(over).astype(np.int32),
                "final_observation": self._observation()[over],
            }
            self.episode[over] = np.arange(self._next, self._next + over.sum())
            self._next += int(over.sum())
            self.step_count[over] = 0
        return self._env_ret(
            last_reward=reward,
            last_terminated=terminated,
            last_truncated=over & ~terminated,
            info=info,
        )


def reward_of(row: Any, episode: Any, step: Any) -> Any:
    """The reward that comes with the observation (row, episode, step)."""
    return np.asarray(step) * 4.0 + np.asarray(row) * 0.25


def action_of(observation: np.ndarray) -> np.ndarray:
    """The answer to an observation."""
    return (observation[..., 1] * 1000 + observation[..., 2]).astype(np.int64)


def answer(env_ret: EnvRet, version: int = 0) -> PolicyResponse:
    observation = env_ret.observation
    response = PolicyResponse(
        env_ret.env_id,
        action=action_of(observation),
        log_prob=-observation[..., 2],
        value=observation[..., 1],
    )
    response.policy_version = version
    return response


def check_transitions(columns: dict[str, Any]) -> int:
    """Asserts that every transition belongs together; returns how many there are."""
    before, after = columns["observation"], columns["next_observation"]
    np.testing.assert_array_equal(after[..., :2], before[..., :2])
    np.testing.assert_array_equal(after[..., 2], before[..., 2] + 1)
    np.testing.assert_array_equal(columns["episode_id"], before[..., 1])
    np.testing.assert_array_equal(columns["step"], before[..., 2])
    own = columns.get("policy_action", columns["action"])
    np.testing.assert_array_equal(own, action_of(before))
    np.testing.assert_array_equal(columns["log_prob"], -before[..., 2])
    np.testing.assert_array_equal(columns["value"], before[..., 1])
    expected = reward_of(after[..., 0], after[..., 1], after[..., 2])
    assert columns["reward"].dtype == np.float32
    np.testing.assert_array_equal(columns["reward"], expected.astype(np.float32))
    return int(columns["reward"].size)


def check_order(columns: dict[str, Any], *, lossless: bool = True) -> None:
    """Asserts that along time, rows continue each other unless they say otherwise: [T, N].

    Without a loss, a new episode is there from its first step on.
    """
    ended = columns["terminated"] | columns["truncated"] | columns["cut"]
    goes_on = ~ended[:-1]
    np.testing.assert_array_equal(
        columns["observation"][1:][goes_on], columns["next_observation"][:-1][goes_on]
    )
    if not lossless:
        return
    begins = columns["step"][1:][(columns["terminated"] | columns["truncated"])[:-1]]
    np.testing.assert_array_equal(begins, 0)
