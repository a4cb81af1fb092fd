"""Atari games of the Arcade Learning Environment; needs the extra `ale`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.making import call_maker, checked, make_row, vectorise
from rlightning.errors import ConfigError
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

# Options of AtariPreprocessing and their defaults, and what the vector env of ALE calls them.
_NATIVE_NAMES = {
    "noop_max": (30, ("noop_max",)),
    "frame_skip": (4, ("frameskip",)),
    "screen_size": (84, ("img_height", "img_width")),
    "terminal_on_life_loss": (False, ("episodic_life",)),
    "grayscale_obs": (True, ("grayscale",)),
    "frame_stack": (4, ("stack_num",)),
}
_NATIVE_KWARGS = {
    "game",
    "repeat_action_probability",
    "full_action_space",
    "continuous",
    "continuous_action_threshold",
}


@ENVS.register("ale")
class ALEEnv(GymnasiumEnv):
    """Hosts an Atari game: `config.task` is any id of ale_py, such as `ALE/Pong-v5`.

    Without `init_params` it is the env that the id makes: frames of the game. With them it is
    preprocessed: they are the options of gymnasium's `AtariPreprocessing`, and `frame_stack`, how
    many frames an observation holds (default 4; 1: no axis of frames). Observations are then uint8
    [4, 84, 84], the oldest frame first, and a step is `frame_skip` frames, also for
    `max_episode_steps`.

    Several preprocessed rows are stepped by ALE's own `AtariVectorEnv`, in threads of C++, unless
    `config.vectorization_mode` or an option that it does not have forbids it. Its rewards are not
    clipped, and `fire` is not pressed at resets: both would be another game.

    For everything else see `GymnasiumEnv`.
    """

    def _make(self, config: EnvConfig) -> Any:
        ale_py = load_extra("ale_py", extra="ale", backend="ale")
        gym.register_envs(ale_py)
        if config.init_params is None:
            return super()._make(config)
        if config.num_envs == 1:
            return make_row(partial(make_atari, config), config)
        mode = config.vectorization_mode
        if mode in ("auto", "vector_entry_point"):
            kwargs = _native_kwargs(config)
            if kwargs is not None:
                make = partial(ale_py.AtariVectorEnv, num_envs=config.num_envs)
                return call_maker(config, make, kwargs)
            if mode == "vector_entry_point":
                raise ConfigError(
                    "env.init_params: the vector env of ALE does not have all of these options"
                )
        return vectorise([partial(make_atari, config)] * config.num_envs, config)

    def _row_seeding(self, env: Any) -> Callable[[list[int]], Any] | None:
        import ale_py

        if isinstance(env, ale_py.AtariVectorEnv):
            return np.array
        return super()._row_seeding(env)


def make_atari(config: EnvConfig) -> gym.Env[Any, Any]:
    """Makes one preprocessed Atari env, as `ALEEnv` says.

    Raises:
        ConfigError: There is no such game, or it does not take the arguments.
        EnvError: It could not be made.
    """
    gym.register_envs(load_extra("ale_py", extra="ale", backend="ale"))
    return checked(call_maker(config, partial(_preprocessed, config), {}), config.max_episode_steps)


def _preprocessed(config: EnvConfig) -> gym.Env[Any, Any]:
    options = _options(config)
    frame_stack = options.pop("frame_stack", 4)
    # The wrapper skips the frames, which the env itself must not do as well.
    kwargs = {**config.env_kwargs.to_dict(), "frameskip": 1}
    env = gym.make(config.task, disable_env_checker=True, **kwargs)
    env = gym.wrappers.AtariPreprocessing(env, **options)
    return gym.wrappers.FrameStackObservation(env, frame_stack) if frame_stack > 1 else env


def _options(config: EnvConfig) -> dict[str, Any]:
    assert config.init_params is not None
    options = dict(config.init_params.to_dict())
    if isinstance(size := options.get("screen_size"), list):
        options["screen_size"] = tuple(size)
    return options


def _native_kwargs(config: EnvConfig) -> dict[str, Any] | None:
    """Returns the arguments of `AtariVectorEnv`; None where it cannot do what is asked for."""
    options = _options(config)
    try:
        kwargs = {**gym.spec(config.task).kwargs, **config.env_kwargs.to_dict()}
    except gym.error.Error as error:
        raise ConfigError(f"env.task '{config.task}': {error}") from error
    kwargs.pop("frameskip", None)
    limit = kwargs.pop("max_num_frames_per_episode", None)
    if options.keys() - _NATIVE_NAMES.keys() or kwargs.keys() - _NATIVE_KWARGS:
        return None
    if not isinstance(options.get("screen_size", 84), int) or options.get("frame_stack") == 1:
        return None
    for name, (default, names) in _NATIVE_NAMES.items():
        kwargs.update(dict.fromkeys(names, options.get(name, default)))
    if config.max_episode_steps is not None:
        limit = config.max_episode_steps * kwargs["frameskip"]
    if limit is not None:
        kwargs["max_num_frames_per_episode"] = limit
    return {
        **kwargs,
        "reward_clipping": False,
        "use_fire_reset": False,
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }
