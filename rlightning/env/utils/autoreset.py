"""Vector envs that reset otherwise than in the step that ends an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, iterate

from rlightning.env.utils.infos import rows_of_info
from rlightning.env.utils.spaces import stack, take
from rlightning.utils.conversions import map_leaves

Rows = npt.NDArray[np.int32]


def mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """Returns when a vector env resets a row; None if it does not say, or in words of its own."""
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        return None


class ResetsAtOnce(VectorWrapper):
    """Resets the rows of a vector env without autoreset in the step that ends their episode.

    Args:
        env: Its autoreset mode is DISABLED: it takes `reset_mask` among the options of `reset`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps every row.

        Returns:
            What gymnasium's vector envs return in the mode SAME_STEP.
        """
        observation, reward, terminated, truncated, info = self.env.step(actions)
        # Copied, since the reset writes to the env's own arrays.
        reward, terminated, truncated = (
            np.array(reward),
            np.array(terminated, bool),
            np.array(truncated, bool),
        )
        ended = terminated | truncated
        if ended.any():
            final = map_leaves(_copied, observation)
            observation, first_info = self.env.reset(options={"reset_mask": ended.copy()})
            info = {
                **_merged(info, first_info, ended),
                "final_obs": final,
                "_final_obs": ended,
                "final_info": info,
            }
        return observation, reward, terminated, truncated, info


@dataclass(frozen=True)
class Shown:
    """What some rows return from a step, with leaves [k, ...].

    Attributes:
        rows: Which rows, ascending; None: all.
        observation: Of the next episode where `final_rows` says so.
        reward: Of the last step of each row.
        terminated: Likewise.
        truncated: Likewise.
        info: Of these rows.
        final_rows: Positions of rows that have ended an episode, ascending.
        final_observation: Their last observations; None if there are none.
        final_info: Their last infos; None if there are none.
    """

    rows: Rows | None
    observation: Any
    reward: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[str, Any]
    final_rows: Rows
    final_observation: Any
    final_info: dict[str, Any] | None


@dataclass(frozen=True)
class _Held:
    """How the last step of a row ended its episode; leaves [1, ...] in what it observed."""

    reward: float
    terminated: bool
    truncated: bool
    observation: Any
    info: dict[str, Any]


class NextStepRows:
    """Steps a vector env that resets a row in the step after the end of its episode (NEXT_STEP).

    In the step that ends an episode such a row has no first observation of the next one yet. It is
    held back: the step shows the other rows only, the next one, whose action the env ignores for
    it, shows the row again, with the outcome of the step that ended the episode. So rows return
    the same as from an env that resets in the same step, and a reset is never a transition. When
    all rows have ended at once, the env is stepped once more.

    Args:
        env: The vector env.

    Attributes:
        awaited: The rows that were shown last, ascending, which the next actions are for.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self._env = env
        self._space = env.single_observation_space
        self._rows = env.num_envs
        self.awaited: Rows = np.arange(self._rows, dtype=np.int32)
        self._actions: list[Any] = []
        self._held: dict[int, _Held] = {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Resets every row, as `VectorEnv.reset`."""
        self.awaited = np.arange(self._rows, dtype=np.int32)
        self._held.clear()
        return self._env.reset(**kwargs)

    def step(self, actions: Any) -> Shown:
        """Steps the rows that were shown last.

        Args:
            actions: Of these rows, leaves [k, ...] of the action space.
        """
        self._take_actions(actions)
        while True:
            shown = self._step()
            if shown is not None:
                return shown

    def _take_actions(self, actions: Any) -> None:
        given = list(
            iterate(batch_space(self._env.single_action_space, len(self.awaited)), actions)
        )
        if len(self.awaited) == self._rows:
            self._actions = given
        else:  # what was held back keeps its last action, which the env ignores
            for row, action in zip(self.awaited.tolist(), given, strict=True):
                self._actions[row] = action

    def _step(self) -> Shown | None:
        actions = stack(self._env.single_action_space, self._actions)
        observation, reward, terminated, truncated, info = self._env.step(actions)
        reward = np.array(reward, np.float32)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        ended = terminated | truncated
        begun, self._held = self._held, {}
        for row, held in begun.items():
            reward[row] = held.reward
            terminated[row], truncated[row] = held.terminated, held.truncated
            ended[row] = False
        if ended.any():
            for row in np.flatnonzero(ended).tolist():
                one = np.array([row], np.int32)
                self._held[row] = _Held(
                    float(reward[row]),
                    bool(terminated[row]),
                    bool(truncated[row]),
                    # Copied, since the env may write to its arrays in the next step.
                    take(self._space, observation, one),
                    rows_of_info(info, one, self._rows),
                )
        rows = np.flatnonzero(~ended).astype(np.int32)
        if not rows.size:
            return None
        self.awaited = rows
        final_rows = np.array([i for i, row in enumerate(rows.tolist()) if row in begun], np.int32)
        finals = [begun[int(rows[i])] for i in final_rows]
        partial = len(rows) < self._rows
        final_observation: Any = None
        if finals:
            kept = batch_space(self._space, 1)
            lasts = [next(iter(iterate(kept, final.observation))) for final in finals]
            final_observation = stack(self._space, lasts)
        return Shown(
            rows if partial else None,
            take(self._space, observation, rows) if partial else observation,
            reward[rows],
            terminated[rows],
            truncated[rows],
            rows_of_info(info, rows, self._rows) if partial else info,
            final_rows,
            final_observation,
            _joined_infos([final.info for final in finals]) if finals else None,
        )


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _merged(
    info: Mapping[str, Any], first: Mapping[str, Any], rows: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """Returns an info in which the rows of a mask have what a reset gave them."""
    result = dict(info)
    for key, value in first.items():
        old = info.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            result[key] = _merged(old, value, rows)
        elif isinstance(value, np.ndarray) and isinstance(old, np.ndarray):
            mask = rows.reshape(-1, *[1] * (value.ndim - 1))
            result[key] = np.where(mask, value, old) if value.shape == old.shape else value
        else:
            result[key] = value
    return result


def _joined_infos(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins infos of single rows, as far as all of them have a key."""
    result: dict[str, Any] = {}
    for key in parts[0]:
        values = [part[key] for part in parts if key in part]
        if len(values) < len(parts):
            continue
        if all(isinstance(value, Mapping) for value in values):
            result[key] = _joined_infos(values)
        elif all(isinstance(value, np.ndarray) and value.ndim for value in values):
            result[key] = np.concatenate(values)
    return result
