"""Gymnasium envs in worker processes: one by itself, or rows that do not wait for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from rlightning.env.utils.autoreset import Rows, Shown
from rlightning.env.utils.infos import rows_of_info
from rlightning.env.utils.spaces import stack
from rlightning.env.utils.venv import call_all, close_all, receive_all, start_all
from rlightning.errors import EnvError

MakeEnv = Callable[[], gym.Env[Any, Any]]

# Rows that are about to be ready are waited for, by at most this share of the fastest row's step.
_PATIENCE = 0.1


class ProcessEnv(gym.Env[Any, Any]):
    """An env in a process of its own; the thread that steps it holds no lock of the interpreter.

    A process that has ended is started anew at the next reset.

    Args:
        make: Makes the env, there.

    Raises:
        ConfigError: As `make`.
        EnvError: It could not be made.
    """

    def __init__(self, make: MakeEnv) -> None:
        self._make = make
        self._worker = start_all([make])[0]
        for name in ("observation_space", "action_space", "metadata", "render_mode"):
            setattr(self, name, self._worker.get_env_attr(name))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode, as `gymnasium.Env.reset`."""
        if self._worker.has_ended:
            self._worker.close()
            self._worker = start_all([self._make])[0]
        outcome: tuple[Any, dict[str, Any]] = self._worker.call("reset", seed=seed, options=options)
        return outcome

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Executes an action, as `gymnasium.Env.step`."""
        outcome: tuple[Any, float, bool, bool, dict[str, Any]] = self._worker.call("step", action)
        return outcome

    def render(self) -> Any:
        """Returns what the env renders."""
        return self._worker.call("render")

    def close(self) -> None:
        """Closes the env and ends its process."""
        self._worker.close()


class IndependentRows(VectorEnv[Any, Any, Any]):
    """Rows in processes of their own, each of which steps and resets at its own pace.

    A step begins those of the rows that were shown last, and returns as soon as any row is ready,
    with all that are. So a row that is slow, or resets for long, holds no other one: it is shown
    when it is ready. A row that is due in a moment is waited for, for a tenth of the shortest step
    at most, since rows that are shown together cost one message instead of several.

    The process of a row that has ended is started anew at the next reset, which all rows take part
    in; what they were doing is given up.

    Args:
        make_each: Makes each row, in its process.

    Attributes:
        awaited: The rows that were shown last, ascending, which the next actions are for.

    Raises:
        ConfigError: As `make_each`.
        EnvError: A row could not be made.
    """

    def __init__(self, make_each: Sequence[MakeEnv]) -> None:
        self._makers = [partial(_Row, make) for make in make_each]
        self._workers = start_all(self._makers)
        self.num_envs = len(self._workers)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        first = self._workers[0]
        self.single_observation_space = first.get_env_attr("observation_space")
        self.single_action_space = first.get_env_attr("action_space")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.awaited: Rows = np.arange(self.num_envs, dtype=np.int32)
        # When the step of each row began that is not ready, and how long its last one took.
        self._begun: dict[int, float] = {}
        self._took = [0.0] * self.num_envs

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode in every row.

        Args:
            seed: Of each row; one number is that of the first, those after it follow on.
            options: Of each row.
        """
        for row in self._begun:
            with contextlib.suppress(EnvError):  # which the reset makes good
                self._workers[row].recv()
        self._begun.clear()
        for row, worker in enumerate(self._workers):
            if worker.has_ended:
                worker.close()
                self._workers[row] = start_all([self._makers[row]])[0]
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + row for row in range(self.num_envs)]
        else:
            seeds = list(seed)
        named = [{"seed": one, "options": options} for one in seeds]
        workers = list(zip(self._workers, named, strict=True))
        outcomes = call_all("reset", [(worker, (), given) for worker, given in workers])
        self.awaited = np.arange(self.num_envs, dtype=np.int32)
        infos = self._infos({row: info for row, (_, info) in enumerate(outcomes)})
        return stack(self.single_observation_space, [one for one, _ in outcomes]), infos

    def step(self, actions: Any) -> Shown:  # type: ignore[override]  # of some rows
        """Begins a step of the rows that were shown last; shows those that are ready.

        Args:
            actions: Of these rows, leaves [k, ...] of the action space.

        Raises:
            EnvError: A row failed.
        """
        given = iterate(batch_space(self.single_action_space, len(self.awaited)), actions)
        for row, action in zip(self.awaited.tolist(), given, strict=True):
            self._workers[row].send("step", action)
            self._begun[row] = time.perf_counter()
        rows = sorted(self._ready())
        for row in rows:
            del self._begun[row]
        outcomes: list[_Outcome] = receive_all([self._workers[row] for row in rows])
        for row, outcome in zip(rows, outcomes, strict=True):
            self._took[row] = outcome.seconds
        self.awaited = np.array(rows, np.int32)
        return self._shown(outcomes)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the rows and ends their processes."""
        close_all(self._workers)

    def _ready(self) -> set[int]:
        """Waits for a row that is ready; returns it and those that are ready with it."""
        waiting = {self._workers[row].pipe: row for row in self._begun}
        ready = {waiting.pop(pipe) for pipe in _readable(waiting)}
        deadline = time.perf_counter() + _PATIENCE * min(self._took)
        while waiting and (left_s := deadline - time.perf_counter()) > 0:
            if not any(self._begun[row] + self._took[row] < deadline for row in waiting.values()):
                break
            ready |= {waiting.pop(pipe) for pipe in _readable(waiting, left_s)}
        return ready

    def _shown(self, outcomes: list[_Outcome]) -> Shown:
        rows, space = self.awaited, self.single_observation_space
        finals = [(i, one.final) for i, one in enumerate(outcomes) if one.final is not None]
        final_rows = np.array([i for i, _ in finals], np.int32)
        some = len(rows) < self.num_envs
        infos = self._infos(dict(zip(rows.tolist(), (one.info for one in outcomes), strict=True)))
        final_infos = self._infos({int(rows[i]): info for i, (_, info) in finals})
        return Shown(
            rows if some else None,
            stack(space, [one.observation for one in outcomes]),
            np.array([one.reward for one in outcomes], np.float32),
            np.array([one.terminated for one in outcomes], bool),
            np.array([one.truncated for one in outcomes], bool),
            rows_of_info(infos, rows, self.num_envs) if some else infos,
            final_rows,
            stack(space, [one for _, (one, _) in finals]) if finals else None,
            rows_of_info(final_infos, rows[final_rows], self.num_envs) if finals else None,
        )

    def _infos(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Returns the infos of some rows as gymnasium's vector envs do, of all rows."""
        joined: dict[str, Any] = {}
        for row, info in infos.items():
            joined = self._add_info(joined, info, row)
        return joined


@dataclass(frozen=True)
class _Outcome:
    """What came of a step of one row.

    Attributes:
        observation: Of the next episode if this one has ended.
        reward: Of the step.
        terminated: Of the step.
        truncated: Of the step.
        info: What belongs to the observation.
        final: Last observation and info of an episode that has ended.
        seconds: How long it took, with the reset.
    """

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final: tuple[Any, dict[str, Any]] | None
    seconds: float


class _Row:
    """An env that is reset in the step that ends its episode; lives in the worker's process."""

    def __init__(self, make: MakeEnv) -> None:
        self._env = make()
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.close = self._env.close
        self.reset = self._env.reset

    def step(self, action: Any) -> _Outcome:
        begun = time.perf_counter()
        observation, reward, terminated, truncated, info = self._env.step(action)
        final = None
        if terminated or truncated:
            final = (observation, info)
            observation, info = self._env.reset()
        seconds = time.perf_counter() - begun
        ended = bool(terminated), bool(truncated)
        return _Outcome(observation, float(reward), *ended, info, final, seconds)


def _readable(pipes: dict[Connection, int], timeout_s: float | None = None) -> list[Connection]:
    ready: list[Any] = wait(list(pipes), timeout_s)
    return ready
