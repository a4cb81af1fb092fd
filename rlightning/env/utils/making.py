"""Makes the gymnasium env that a config names."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rlightning.env.utils.autoreset import ResetsAtOnce, mode_of
from rlightning.env.utils.extras import load_named
from rlightning.env.utils.spaces import mismatch
from rlightning.env.utils.workers import IndependentRows, ProcessEnv
from rlightning.errors import ConfigError, EnvError, ObservationError
from rlightning.utils.config import EnvConfig

# Native vector envs that reset in the next step only, and what takes their place.
_SAME_STEP = {
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": (
        "rlightning.env.utils.cartpole:SameStepCartPole"
    ),
}


def make_env(config: EnvConfig) -> gym.Env[Any, Any]:
    """Makes one env of the config's `task`.

    Args:
        config: `task` is a gymnasium id, `module:Id` to import `module` before, or
            `module:attribute` for a class or function that gives an env. `env_kwargs` are its
            arguments, `max_episode_steps` truncates its episodes.

    Raises:
        ConfigError: There is no such env, or it does not take the arguments.
        EnvError: It could not be made.
    """
    target = _resolve(config.task)
    kwargs = config.env_kwargs.to_dict()
    limit = config.max_episode_steps
    if isinstance(target, EnvSpec):
        # _CheckedEnv takes the place of gymnasium's checker, in one line and without warnings.
        make = partial(gym.make, target, max_episode_steps=limit, disable_env_checker=True)
        return _CheckedEnv(call_maker(config, make, kwargs))
    env = call_maker(config, target, kwargs)
    if not isinstance(env, gym.Env):
        raise ConfigError(f"env.task '{config.task}' gave {type(env).__name__}, no gymnasium.Env")
    return checked(env, limit)


def checked(env: gym.Env[Any, Any], max_episode_steps: int | None) -> gym.Env[Any, Any]:
    """Returns an env whose observations are compared with its space, and episodes truncated.

    Args:
        env: The env.
        max_episode_steps: Steps after which an episode is truncated; None: it is left to the env.
    """
    if max_episode_steps is not None:
        env = gym.wrappers.TimeLimit(env, max_episode_steps)
    return _CheckedEnv(env)


def make_vector_env(config: EnvConfig) -> VectorEnv[Any, Any, Any]:
    """Makes `config.num_envs` rows of the config's `task`.

    Rows reset in the step that ends their episode wherever the env leaves a choice; only a vector
    env of a module may have the autoreset mode NEXT_STEP.

    `config.vectorization_mode` says who steps the rows. With `auto` a vector env of the task's own
    does, if it resets so and has the spaces of the single env; otherwise single envs are stepped
    one after the other.

    Args:
        config: As for `make_env`; `task` may also name a vector env of a module.

    Returns:
        A vector env whose observations are good until its next step.

    Raises:
        ConfigError: There is no such env, it does not take the arguments, or has no vector env of
            its own although the config wants it.
        EnvError: It could not be made.
    """
    target, mode = _resolve(config.task), config.vectorization_mode
    if inspect.isclass(target) and issubclass(target, VectorEnv):
        return _own_vector_env(config, target)
    if isinstance(target, EnvSpec) and mode in ("auto", "vector_entry_point"):
        native = _native(config, target)
        if native is not None:
            return native
    if mode == "vector_entry_point":
        raise ConfigError(
            f"env.vectorization_mode: '{config.task}' has no vector env that takes these arguments "
            "and gives what the single env does"
        )
    return vectorise([partial(make_env, config)] * config.num_envs, config)


def make_row(make: Callable[[], gym.Env[Any, Any]], config: EnvConfig) -> gym.Env[Any, Any]:
    """Makes an env that has one row.

    Args:
        make: Makes it; in a process of its own, with `async` or `independent`.
        config: Its `vectorization_mode`.

    Raises:
        ConfigError: As `make`.
        EnvError: It could not be made.
    """
    return ProcessEnv(make) if config.vectorization_mode in ("async", "independent") else make()


def vectorise(
    make_each: Sequence[Callable[[], gym.Env[Any, Any]]], config: EnvConfig
) -> VectorEnv[Any, Any, Any]:
    """Makes single envs the rows of one that resets a row in the step that ends its episode.

    Args:
        make_each: Makes each row; also in another process, with `async` or `independent`.
        config: Its `vectorization_mode` is `async` for worker processes that wait for each other,
            `independent` for those that do not.

    Returns:
        A vector env whose observations are good until its next step.

    Raises:
        EnvError: A row could not be made in its process.
    """
    if config.vectorization_mode == "independent":
        return IndependentRows(make_each)
    same_step = AutoresetMode.SAME_STEP
    if config.vectorization_mode != "async":
        return SyncVectorEnv(make_each, copy=False, autoreset_mode=same_step)
    # Spawned, since a fork of a process with threads, such as gRPC's, may stand still for ever.
    make = partial(AsyncVectorEnv, make_each, copy=False, context="spawn", autoreset_mode=same_step)
    try:
        try:
            return make(shared_memory=True)
        except (TypeError, ValueError):  # shapes that vary have no place in shared memory
            return make(shared_memory=False)
    except (ConfigError, EnvError):
        raise
    except Exception as error:
        raise EnvError(f"env '{config.task}': {type(error).__name__}: {error}") from error


class _CheckedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Compares every observation with its space, and what comes with it with gymnasium's order."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._space = env.observation_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        outcome: Any = self.env.reset(seed=seed, options=options)
        # The older interface gave the observation alone, whose elements would pass for the two.
        if not (
            isinstance(outcome, Sequence) and len(outcome) == 2 and isinstance(outcome[1], Mapping)
        ):
            raise ObservationError("reset has to return (observation, info), info being a dict")
        observation, info = outcome
        self._check(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        outcome = self.env.step(action)
        if len(outcome) != 5:
            raise ObservationError(
                "step has to return (observation, reward, terminated, truncated, info), "
                f"returned {len(outcome)} values"
            )
        self._check(outcome[0])
        return outcome

    def _check(self, observation: Any) -> None:
        space = self._space
        if (
            type(observation) is np.ndarray
            and observation.shape == space.shape
            and observation.dtype == space.dtype
        ):
            return  # by far the most
        difference = mismatch(space, observation)
        if difference is not None:
            raise ObservationError(f"an observation is not in its space: {difference}")


def _resolve(task: str) -> EnvSpec | Callable[..., Any]:
    """Returns the spec of a gymnasium id, or what a module holds under a name."""
    module_name, _, name = task.rpartition(":")
    if module_name:
        target = load_named(module_name, f"env.task '{task}'")
        for part in name.split("."):
            target = getattr(target, part, None)
        if callable(target):
            return cast("Callable[..., Any]", target)
    try:
        return gym.spec(name)
    except gym.error.UnregisteredEnv as error:
        where = f", nor has {module_name} a class or function of that name" if module_name else ""
        near = difflib.get_close_matches(name, gym.registry, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"env.task '{task}': gymnasium has no env '{name}'{where}{hint}"
        ) from error
    except gym.error.Error as error:  # a malformed id, or a version that is gone
        raise ConfigError(f"env.task '{task}': {error}") from error


def _native(config: EnvConfig, spec: EnvSpec) -> VectorEnv[Any, Any, Any] | None:
    """Makes the vector env that belongs to a gymnasium id, if it behaves like the single env."""
    entry = spec.vector_entry_point
    if entry is None or spec.additional_wrappers:
        return None
    known = _SAME_STEP.get(entry) if isinstance(entry, str) else None
    kwargs = {**spec.kwargs, **config.env_kwargs.to_dict()}
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    try:
        parameters = inspect.signature(_load(known or entry)).parameters
    except ImportError:  # an extra that is not installed; the single env may do without it
        return None
    if not kwargs.keys() <= parameters.keys():
        return None
    if known is None:
        if "autoreset_mode" not in parameters:
            return None
        kwargs["autoreset_mode"] = AutoresetMode.SAME_STEP
    spec = copy.deepcopy(spec)
    spec.vector_entry_point = known or entry
    make = partial(gym.make_vec, spec, config.num_envs, "vector_entry_point")
    native = cast("VectorEnv[Any, Any, Any]", call_maker(config, make, kwargs))
    if known is None and not _has_spaces_of_single(native, config):
        native.close()
        return None
    return native


def _has_spaces_of_single(native: VectorEnv[Any, Any, Any], config: EnvConfig) -> bool:
    # Such as Atari's, which scales and stacks frames while the single env does not.
    single = make_env(config)
    same = (
        native.single_observation_space == single.observation_space
        and native.single_action_space == single.action_space
    )
    single.close()
    return same


def _own_vector_env(
    config: EnvConfig, target: type[VectorEnv[Any, Any, Any]]
) -> VectorEnv[Any, Any, Any]:
    kwargs = {**config.env_kwargs.to_dict(), "num_envs": config.num_envs}
    if "autoreset_mode" in inspect.signature(target).parameters:
        kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
    env = cast("VectorEnv[Any, Any, Any]", call_maker(config, target, kwargs))
    return normalised(env, f"env.task '{config.task}'")


def normalised(env: VectorEnv[Any, Any, Any], name: str) -> VectorEnv[Any, Any, Any]:
    """Returns a vector env that resets rows by itself, in the same step if that can be had.

    Args:
        env: Any autoreset mode.
        name: What to call it in errors.

    Raises:
        ConfigError: It does not say its mode.
    """
    mode = mode_of(env)
    if mode is None:
        given = env.metadata.get("autoreset_mode")
        known = ", ".join(mode.name for mode in AutoresetMode)
        raise ConfigError(
            f"{name}: its metadata has autoreset_mode {given}, expected one of {known}"
        )
    return ResetsAtOnce(env) if mode is AutoresetMode.DISABLED else env


def _load(entry: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(entry):
        return entry
    module_name, _, name = entry.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module_name), name))


def call_maker(config: EnvConfig, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Calls what makes an env, which is code of others, and says what it was if that fails.

    Raises:
        ConfigError: It does not take the arguments, or something that it needs is not installed.
        EnvError: It raised anything else.
    """
    try:
        return make(**kwargs)
    except (ConfigError, EnvError):
        raise
    except (TypeError, gym.error.Error, ImportError) as error:
        raise ConfigError(f"env.task '{config.task}': {error}") from error
    except Exception as error:
        raise EnvError(f"env '{config.task}': {type(error).__name__}: {error}") from error
