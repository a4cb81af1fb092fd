"""Any gymnasium env: one, or many rows as one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.actions import ActionFitter
from rlightning.env.utils.autoreset import NextStepRows, mode_of
from rlightning.env.utils.infos import rows_of_info
from rlightning.env.utils.making import make_env, make_row, make_vector_env
from rlightning.env.utils.options import check_extras
from rlightning.env.utils.spaces import as_declared, one_row, stack, take
from rlightning.env.utils.workers import IndependentRows
from rlightning.errors import ConfigError, EnvError, ResetNeededError
from rlightning.types import ActionSource, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.conversions import map_leaves
from rlightning.utils.registry import ENVS


@ENVS.register("gymnasium")
class GymnasiumEnv(BaseEnv):
    """Hosts a gymnasium env, or an env of the user's that follows gymnasium's interface.

    `config.task` is a gymnasium id (`module:Id` imports the module first), or `module:attribute`
    for a class or function that gives an env; `env_kwargs` are its arguments.

    With `num_envs` = 1 it is a scalar env, as gymnasium has it: no leading dimensions, a float and
    two bools, and whoever steps it resets it when an episode has ended. With more, everything has
    the leading dimension `num_envs`: reward float32 [rows], flags bool [rows]. A row is reset in
    the step that ends its episode; its last observation is then in `info["final_observation"]` at
    the position that `info["final_rows"]` gives, its last info likewise in `info["final_info"]`.

    Actions are cast to the action space. Numbers outside its bounds are clipped; the EnvRet then
    says what was executed (`executed_action`) and in which rows it was clipped (`action_source`).
    With `config.seed` the first reset is seeded, each row of each worker differently (a native
    vector env has one generator for all its rows); later resets go on from there.

    Rows that are `independent` (`config.vectorization_mode`) are given when they are ready, some of
    them at a time (`EnvRet.rows`). So are those of a vector env that resets a row in the step after
    (NEXT_STEP) and cannot be told otherwise: one that has ended is left out until its next episode
    has begun. The next response is then for these rows only.

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group or server; None counts as 0.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Raises:
        ConfigError: There is no such env, or it does not take the arguments.
        EnvError: It could not be made.
    """

    option_names: ClassVar[Collection[str] | None] = ()
    vectorises = True

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        self._training_env: Any = None
        self._made_from = self.config  # or that of an evaluation
        self._is_reset = False
        self._use(self._make(self.config))
        self.row_seeds = self._draw_seeds()
        self._unused_seeds = self.row_seeds

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins a new episode in every row.

        Args:
            *args: None.
            **kwargs: `seed` and `options`, as gymnasium takes them.
        """
        seeds, self._unused_seeds = self._unused_seeds, None
        if seeds is not None and "seed" not in kwargs:
            kwargs["seed"] = seeds[0] if self._seeds_as is None else self._seeds_as(seeds)
        if self._broken:
            _terminate(self.env)
            self._use(self._make(self._made_from))
        env = self._some_rows or self.env
        try:
            observation, info = env.reset(*args, **kwargs)
        except Exception as error:
            self._note(error)
            raise
        self._is_reset = True
        rows = self.num_envs
        self._returns, self._lengths = np.zeros(rows), np.zeros(rows, np.int64)
        self._executed: list[Any] = [None] * rows
        self._sources = np.full(rows, ActionSource.POLICY, np.int8)
        if not self._batched:
            observation = as_declared(self._space, observation)
            return EnvRet(self.env_id, observation, 0.0, False, False, info)
        flags = np.zeros(rows, bool), np.zeros(rows, bool)
        return EnvRet(self.env_id, _copied(observation), np.zeros(rows, np.float32), *flags, info)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the actions of a response.

        Raises:
            ResetNeededError: There was no reset before.
            EnvError: An action is not one that the env can execute; it is not stepped then.
        """
        if not self._is_reset:
            raise ResetNeededError(f"env {self.env_id!r}: reset it before the first step")
        action = self._preprocess_fn(policy_resp)
        if self._some_rows is not None:
            return self._step_some(action, self._some_rows)
        return self._step_rows(action) if self._batched else self._step_one(action)

    def apply_evaluate_cfg(self) -> None:
        """Goes on with an env made from the config with `evaluate_cfg` on top; reset it then.

        Raises:
            ConfigError: `evaluate_cfg` changes `num_envs`.
        """
        if self.config.evaluate_cfg is None or self._training_env is not None:
            return
        config = EnvConfig(**{**self.config.to_dict(), **self.config.evaluate_cfg.to_dict()})
        check_extras(config, self.option_names, type(self).__name__)
        if config.num_envs != self.num_envs:
            raise ConfigError(
                f"env.evaluate_cfg.num_envs: expected {self.num_envs}, got {config.num_envs}"
            )
        evaluation_env = self._make(config)
        self._training_env, self._made_from = self.env, config
        self._use(evaluation_env)

    def restore_evaluate_cfg(self) -> None:
        """Goes back to the env from before `apply_evaluate_cfg`; reset it then."""
        if self._training_env is not None:
            _close(self.env, broken=self._broken)
            self._use(self._training_env)
            self._training_env, self._made_from = None, self.config

    def close(self) -> None:
        """Closes the env."""
        for env in (self.env, self._training_env):
            if env is not None:
                _close(env, broken=self._broken and env is self.env)
        self.env = self._training_env = None
        self._is_reset = False

    def _make(self, config: EnvConfig) -> Any:
        if config.num_envs > 1:
            return make_vector_env(config)
        return make_row(partial(make_env, config), config)

    def _use(self, env: Any) -> None:
        self.env = env
        self._batched = self.num_envs > 1
        self._seeds_as = self._row_seeding(env)
        late = self._batched and mode_of(env) is AutoresetMode.NEXT_STEP
        self._some_rows: NextStepRows | IndependentRows | None = None
        if late or isinstance(env, IndependentRows):
            self._some_rows = NextStepRows(env) if late else env
        self._is_reset = self._broken = False
        self._space: gym.Space[Any] = self.get_observation_space()  # type: ignore[assignment]
        self._fitter = self._fits(self.num_envs if self._batched else None)

    def _note(self, error: Exception) -> None:
        """Takes note that a process of rows has ended with an error; the others still step.

        Raises:
            EnvError: It ended without one.
        """
        self._broken = isinstance(self.env, AsyncVectorEnv)
        if self._broken and isinstance(error, (EOFError, ConnectionError)):
            # In these words, as it may be its env that raised it.
            raise EnvError(
                f"env {self.env_id!r}: the process of a row has ended "
                f"({type(error).__name__}: {error})"
            ) from error

    def _fits(self, rows: int | None) -> ActionFitter:
        action_space: gym.Space[Any] = self.get_action_space()  # type: ignore[assignment]
        return ActionFitter(action_space, rows, self.env_id)

    def _draw_seeds(self) -> list[int] | None:
        if self.config.seed is None:
            return None
        sequence = np.random.SeedSequence([self.config.seed, self.worker_index])
        words = sequence.generate_state(self.num_envs, np.uint32)
        seeds = [int(word) >> 1 for word in words]  # some envs take 31 bits
        return [seeds[0]] * self.num_envs if self._seeds_as is None else seeds

    def _row_seeding(self, env: Any) -> Callable[[list[int]], Any] | None:
        """Returns what makes the seeds of rows what an env takes; None: it takes but one."""
        kinds = (SyncVectorEnv, AsyncVectorEnv, IndependentRows)
        each = isinstance(getattr(env, "unwrapped", env), kinds)
        return list if each else None

    def _step_rows(self, action: Any) -> EnvRet:
        fitted = self._fitter.fit(action)
        try:
            observation, reward, terminated, truncated, info = self.env.step(fitted.action)
        except Exception as error:
            self._note(error)
            raise
        reward = np.array(reward, np.float32)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        self._returns += reward
        self._lengths += 1
        ended = terminated | truncated
        if ended.any():
            final_rows = np.flatnonzero(ended).astype(np.int32)
            info = self._with_final(info, final_rows)
            info["episode_info"] = self._finish(final_rows)
        observation = _copied(observation)
        env_ret = EnvRet(self.env_id, observation, reward, terminated, truncated, info)
        if fitted.source is not None:
            env_ret.executed_action, env_ret.action_source = fitted.executed, fitted.source
        return env_ret

    def _step_some(self, action: Any, vector: NextStepRows | IndependentRows) -> EnvRet:
        """Steps the rows that were shown last; shows those that have something to be acted on."""
        fitted = self._fits(len(vector.awaited)).fit(action)
        executed = action if fitted.source is None else fitted.executed
        source = ActionSource.POLICY if fitted.source is None else fitted.source
        sources = np.broadcast_to(source, len(vector.awaited))
        for i, row in enumerate(vector.awaited.tolist()):
            self._executed[row] = one_row(executed, i)
            self._sources[row] = sources[i]
        shown = vector.step(fitted.action)
        rows = np.arange(self.num_envs, dtype=np.int32) if shown.rows is None else shown.rows
        self._returns[rows] += shown.reward
        self._lengths[rows] += 1
        info = shown.info
        if shown.final_rows.size:
            info = {**info, "final_rows": shown.final_rows}
            info["final_observation"] = shown.final_observation
            if shown.final_info:
                info["final_info"] = shown.final_info
            info["episode_info"] = self._finish(rows[shown.final_rows])
        flags = shown.terminated, shown.truncated
        env_ret = EnvRet(self.env_id, _copied(shown.observation), shown.reward, *flags, info)
        env_ret.rows = shown.rows
        if (self._sources[rows] != ActionSource.POLICY).any():
            env_ret.executed_action = _stacked([self._executed[row] for row in rows.tolist()])
            env_ret.action_source = self._sources[rows]
        return env_ret

    def _step_one(self, action: Any) -> EnvRet:
        fitted = self._fitter.fit(action)
        observation, reward, terminated, truncated, info = self.env.step(fitted.action)
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        self._returns += reward
        self._lengths += 1
        if terminated or truncated:
            finished = self._finish(np.zeros(1, np.int32))
            info = {**info, "episode_info": {key: value[0] for key, value in finished.items()}}
        observation = as_declared(self._space, observation)
        env_ret = EnvRet(self.env_id, observation, reward, terminated, truncated, info)
        if fitted.source is not None:
            env_ret.executed_action, env_ret.action_source = fitted.executed, fitted.source
        return env_ret

    def _with_final(
        self, info: dict[str, Any], final_rows: npt.NDArray[np.int32]
    ) -> dict[str, Any]:
        """Returns the info with what gymnasium gives of ended episodes under our names."""
        final = info.get("final_obs")
        if final is None:
            rows = final_rows.tolist()
            raise EnvError(f"env {self.env_id!r}: rows {rows} ended without info['final_obs']")
        result = {key: value for key, value in info.items() if key not in _FINAL_KEYS}
        result["final_rows"] = final_rows
        if isinstance(final, np.ndarray) and final.dtype == object:
            final = stack(self._space, [final[row] for row in final_rows])
        else:
            final = take(self._space, final, final_rows)
        result["final_observation"] = final
        if info.get("final_info"):
            result["final_info"] = rows_of_info(info["final_info"], final_rows, self.num_envs)
        return result

    def _finish(self, rows: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
        """Returns the statistics of the episodes that end in these rows, which begin anew."""
        stats = {"return": self._returns[rows], "episode_len": self._lengths[rows]}
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        return stats


_FINAL_KEYS = frozenset({"final_obs", "_final_obs", "final_info", "_final_info"})


def _close(env: Any, *, broken: bool) -> None:
    """Closes an env, also rows in processes of which some have ended (`broken`: one surely)."""
    if broken:
        env._state = AsyncState.DEFAULT  # what it waits for does not come
    try:
        env.close()
    except (EOFError, OSError):
        if not isinstance(env, AsyncVectorEnv):
            raise
        _terminate(env)


def _terminate(env: AsyncVectorEnv) -> None:
    """Ends the processes of rows without asking them."""
    env._state = AsyncState.DEFAULT  # or it would wait for answers that do not come
    env.close(terminate=True)


def _stacked(items: list[Any]) -> Any:
    """Returns nested arrays of several rows as one nesting with a leading dimension."""
    first = items[0]
    if isinstance(first, dict):
        return {key: _stacked([item[key] for item in items]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(_stacked, map(list, zip(*items, strict=True))))
    return np.stack(items)


def _copied(observation: Any) -> Any:
    """Returns an observation that a vector env will not write to."""
    return map_leaves(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, observation
    )
