"""Isaac Lab's vectorised RL envs; needs Isaac Lab, see docs/environments.md."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.env.base_env import BaseEnv
from rlightning.env.utils.actions import ActionFitter
from rlightning.env.utils.agents import one_space
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.making import call_maker
from rlightning.env.utils.options import adapter_options
from rlightning.env.utils.spaces import take
from rlightning.errors import ConfigError, EnvError, ResetNeededError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

_DEFAULTS: dict[str, Any] = {"launcher": None, "env_spec": None, "env_cfg": {}, "device": "cpu"}
# Isaac has one simulation context in a process.
_simulation = threading.Lock()


class IsaacEnv(BaseEnv):
    """What Isaac Lab's single- and multi-agent envs share; see `IsaacManagerBasedRLEnv`."""

    backend = ""
    option_names: ClassVar[Collection[str] | None] = tuple(_DEFAULTS)

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        if self.num_envs < 2:
            raise ConfigError(f"env.num_envs: backend '{self.backend}' takes 2 rows or more, got 1")
        options = adapter_options(self.config, _DEFAULTS)
        self._unused_seeds: list[int] | None = None
        if not _simulation.acquire(blocking=False):
            raise ConfigError(
                "Isaac has one simulation in a process: set env.num_workers and "
                "services.env.pipeline_depth to 1"
            )
        try:
            self.env = self._make(options)
            self._device = self.env.unwrapped.device
            space = one_space(self.get_observation_space())
            action_space = one_space(self.get_action_space())
            if space is None or action_space is None:
                raise EnvError(f"env '{self.config.task}' says no observation or action space")
        except BaseException:
            _simulation.release()
            raise
        self._space = space
        self._fitter = ActionFitter(action_space, self.num_envs, self.env_id)
        self._is_reset = False

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Begins a new episode in every row.

        Args:
            *args: None.
            **kwargs: `seed` and `options`, as Isaac takes them.
        """
        seeds, self._unused_seeds = self._unused_seeds, None
        if seeds is not None:
            kwargs.setdefault("seed", seeds[0])
        observation, extras = self.env.reset(**kwargs)
        self._is_reset = True
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        return self._first(observation, extras)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the actions of a response.

        Raises:
            ResetNeededError: There was no reset before.
            EnvError: An action is not one that the env can execute; it is not stepped then.
        """
        if not self._is_reset:
            raise ResetNeededError(f"env {self.env_id!r}: reset it before the first step")
        fitted = self._fitter.fit(self._preprocess_fn(policy_resp))
        env_ret = self._stepped(*self.env.step(self._to_device(fitted.action)))
        if fitted.source is not None:
            env_ret.executed_action, env_ret.action_source = fitted.executed, fitted.source
        return env_ret

    def close(self) -> None:
        """Ends the simulation; another one may be made in the process then."""
        if self.env is not None:
            self._is_reset = False
            self.env.close()
            self.env = None
            _simulation.release()

    def _first(self, observation: Any, extras: Mapping[str, Any]) -> EnvRet:
        raise NotImplementedError

    def _stepped(self, *outcome: Any) -> EnvRet:
        raise NotImplementedError

    def _make(self, options: dict[str, Any]) -> Any:
        if options["launcher"] is not None:
            app = load_extra("isaaclab.app", extra="isaac", backend=self.backend)
            app.AppLauncher(**dict(options["launcher"]))
        tasks = load_extra("isaaclab_tasks.utils", extra="isaac", backend=self.backend)
        # Registers the ids.
        load_extra("isaaclab_tasks", extra="isaac", backend=self.backend)
        try:
            if options["env_spec"] is not None:
                importlib.import_module(options["env_spec"])
            cfg = self._cfg(dict(options["env_cfg"]), options["device"], tasks)
        except ConfigError:
            raise
        except Exception as error:  # Isaac's own code, and the user's
            raise ConfigError(f"env.task '{self.config.task}': {error}") from error
        make = partial(gym.make, self.config.task, disable_env_checker=True)
        return call_maker(self.config, make, {"cfg": cfg})

    def _cfg(self, given: dict[str, Any], device: str, tasks: Any) -> Any:
        """Returns the task's configuration with what this config says of it."""
        name = given.get("module")
        if name is None:
            cfg = tasks.parse_env_cfg(self.config.task, device=device, num_envs=self.num_envs)
        else:
            module_name, _, class_name = name.partition("::")
            cfg = getattr(importlib.import_module(module_name), class_name)()
            cfg.scene.num_envs = self.num_envs
            cfg.sim.device = device
        _override(cfg, given.get("override") or {}, "env.env_kwargs.env_cfg.override")
        cfg.compute_final_obs = True
        if self.config.seed is not None:
            word = np.random.SeedSequence([self.config.seed, self.worker_index]).generate_state(1)
            cfg.seed = int(word[0]) >> 1
            self.row_seeds = self._unused_seeds = [cfg.seed] * self.num_envs
        if self.max_episode_steps is not None:
            cfg.episode_length_s = self.max_episode_steps * cfg.decimation * cfg.sim.dt
        return cfg

    def _to_device(self, action: Any) -> Any:
        import torch

        if isinstance(action, dict):
            return {key: self._to_device(value) for key, value in action.items()}
        return torch.as_tensor(action, device=self._device)

    def _finals(
        self, info: dict[str, Any], final: Any, ended: npt.NDArray[np.bool_], reward: Any
    ) -> None:
        """Counts a step, and puts what is known of the rows that ended into the info."""
        self._returns += reward
        self._lengths += 1
        rows = np.flatnonzero(ended).astype(np.int32)
        if not rows.size:
            return
        info["final_rows"] = rows
        info["final_observation"] = take(self._space, final, rows)
        stats = {"return": self._returns[rows], "episode_len": self._lengths[rows]}
        info["episode_info"] = {**info.get("episode_info", {}), **stats}
        self._returns[rows] = 0.0
        self._lengths[rows] = 0


@ENVS.register("isaac_manager_based")
class IsaacManagerBasedRLEnv(IsaacEnv):
    """Hosts an RL env of Isaac Lab, manager-based or direct: `config.task` is its id.

    Observation: what the group `policy` holds, on the CPU. All groups are in
    `info["observations"]`, and the log of a reset is in `info["episode_info"]`. Rows are reset in
    the step that ends their episode. `terminated` and `truncated` are Isaac's own; an episode is
    truncated after `max_episode_steps`, or what the task says. There are 2 rows or more, and one
    such env in a process.

    Options, in `env_kwargs`:

    - `device`: where the simulation runs, such as `cuda:0`; `cpu` by default.
    - `env_cfg.override`: values of the task's configuration, nested as it is; `env_cfg.module`:
      `module::Class` of another configuration.
    - `env_spec`: a module that registers the task's id.
    - `launcher`: arguments of Isaac Sim's `AppLauncher`, such as `headless`; without them it is not
      started, as Newton's physics need none.

    Args:
        config: Its section of the config; copied.
        worker_index: Number of this env among those of its group or server; None counts as 0.
        preprocess_fn: Makes the action of a response; None takes `response.action`.

    Raises:
        ConfigError: There is no such task, an option is wrong, Isaac Lab is missing, or this
            process has such an env already.
        EnvError: It could not be made.
    """

    backend = "isaac_manager_based"

    @property
    def num_actions(self) -> int:
        """Length of one row's action, as runners of RSL-RL ask for it."""
        return gym.spaces.flatdim(self.get_action_space())

    def get_observations(self) -> Any:
        """Returns what the rows saw last, arrays [rows, ...] of the group `policy`.

        Raises:
            ResetNeededError: There was no reset before.
        """
        if not self._is_reset:
            raise ResetNeededError(f"env {self.env_id!r}: reset it first")
        return self._seen

    def get_observation_space(self) -> gym.Space[Any]:
        """Returns the space of the group `policy` of one row."""
        space = self.env.unwrapped.single_observation_space
        grouped = isinstance(space, gym.spaces.Dict) and "policy" in space.spaces
        policy: gym.Space[Any] = space["policy"] if grouped else space
        return policy

    def get_action_space(self) -> gym.Space[Any]:
        """Returns the space of one row's action."""
        space: gym.Space[Any] = self.env.unwrapped.single_action_space
        return space

    def _first(self, observation: Any, extras: Mapping[str, Any]) -> EnvRet:
        observations = to_arrays(observation)
        flags = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        reward = np.zeros(self.num_envs, np.float32)
        info = {"observations": observations}
        self._seen = _policy(observations)
        return EnvRet(self.env_id, self._seen, reward, *flags, info)

    def _stepped(self, *outcome: Any) -> EnvRet:
        observations, reward, terminated, truncated, extras = map(to_arrays, outcome)
        info: dict[str, Any] = {"observations": observations, "time_outs": truncated}
        ended = terminated | truncated
        if ended.any() and extras.get("log"):
            info["episode_info"] = dict(extras["log"])
        # There from the first end on; only that of this step says anything.
        final = _policy(extras["final_obs"]) if ended.any() else None
        self._finals(info, final, ended, reward)
        self._seen = _policy(observations)
        return EnvRet(self.env_id, self._seen, reward, terminated, truncated, info)


def _policy(observations: Any) -> Any:
    grouped = isinstance(observations, dict) and "policy" in observations
    return observations["policy"] if grouped else observations


def to_arrays(value: Any) -> Any:
    """Returns nested tensors as arrays of their own: Isaac writes to its tensors in every step."""
    if isinstance(value, Mapping):
        return {key: to_arrays(child) for key, child in value.items()}
    if hasattr(value, "detach"):
        return np.array(value.detach().cpu().numpy())
    return value


def _override(cfg: Any, values: Mapping[str, Any], path: str) -> None:
    for key, value in values.items():
        if not hasattr(cfg, key):
            raise ConfigError(f"{path}.{key}: {type(cfg).__name__} has no such value")
        if isinstance(value, Mapping) and not isinstance(getattr(cfg, key), Mapping):
            _override(getattr(cfg, key), value, f"{path}.{key}")
        else:
            setattr(cfg, key, value)
