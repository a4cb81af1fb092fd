"""ManiSkill's robot tasks on its CPU backend; needs the extra `maniskill` and a Vulkan device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.making import call_maker, checked, make_row, vectorise
from rlightning.env.utils.options import adapter_options, check_auto_reset
from rlightning.env.utils.video import EpisodeVideo, VideoOptions
from rlightning.errors import ConfigError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

_SCENE_CAMERA = "3rd_view_camera"
_DEFAULTS = {
    "camera": None,
    "task_descriptions": True,
    "binary_gripper": None,
    "ignore_terminations": False,
    "use_rel_reward": False,
    "use_fixed_reset_state_ids": False,
    "auto_reset": True,
    "video_cfg": None,
}
# What a task that is about grasping tells, and the documented reward is made of.
_GRASPING = ("is_src_obj_grasped", "consecutive_grasp", "success")
_TEXT_BYTES = 1024


@ENVS.register("maniskill")
class ManiskillEnv(GymnasiumEnv):
    """Hosts a ManiSkill task: `config.task` is its id, `init_params` the arguments of its make.

    Observations are those of the task's `obs_mode`, as arrays on the CPU. With a camera they are
    `images`, uint8 [C, H, W], and `task_descriptions`, the instruction as a text. Options, in
    `env_kwargs`:

    - `camera`: name of a camera; by default `3rd_view_camera` where the task has it.
    - `task_descriptions`: false leaves them out.
    - `binary_gripper`: the last number of an action above 0.5 opens the gripper, else it closes;
      by default where the task has a `3rd_view_camera`.
    - `ignore_terminations`: episodes end by truncation only.
    - `use_fixed_reset_state_ids`: a row begins each episode in the state of its first one.
    - `use_rel_reward`: the reward is how much it has grown in the step.
    - `video_cfg`: films of the camera, or else of what the task renders, see `VideoOptions`.
    - `auto_reset`: true, as several rows always are reset in the step that ends an episode.

    The reward is the task's own, by `init_params.reward_mode`; tasks that tell of grasping
    (`is_src_obj_grasped`, `consecutive_grasp`) give 0.1 for a grasp, 0.1 for one that lasts, and
    1.0 for success while grasping. `info["episode_info"]` adds `reward` (the mean), `success_once`
    and `fail_once`, where the task tells them, and `success_at_end`, `fail_at_end` when
    terminations are ignored.

    `policy_setup` decides the control mode of two known robots (see `EnvConfig`): name another one
    to keep `init_params.control_mode`. ManiSkill's CPU backend has one row in an env; several rows
    are several envs. For everything else see `GymnasiumEnv`.
    """

    option_names: ClassVar[Collection[str] | None] = tuple(_DEFAULTS)

    def _make(self, config: EnvConfig) -> Any:
        load_extra("mani_skill.envs", extra="maniskill", backend="maniskill")
        if config.num_envs == 1:
            return make_row(partial(make_task, config), config)
        if config.vectorization_mode == "vector_entry_point":
            raise ConfigError(
                "env.vectorization_mode: maniskill takes auto, sync, async or independent"
            )
        return vectorise([partial(make_task, config)] * config.num_envs, config)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the actions of a response; see `GymnasiumEnv.step`."""
        env_ret = super().step(policy_resp)
        stats = env_ret.info.get("episode_info")
        if stats is not None:
            ended = env_ret.info.get("final_info", {}) if self._batched else env_ret.info
            for name, value in ended.get("episode", {}).items():
                if not name.startswith("_"):  # gymnasium's masks
                    stats.setdefault(name, value)
            stats["reward"] = stats["return"] / stats["episode_len"]
        return env_ret


def make_task(config: EnvConfig) -> gym.Env[Any, Any]:
    """Makes one task as an ordinary gymnasium env, as `ManiskillEnv` says.

    Raises:
        ConfigError: There is no such task, it does not take the arguments, or has no such camera.
        EnvError: It could not be made; with no Vulkan device, for instance.
    """
    load_extra("mani_skill.envs", extra="maniskill", backend="maniskill")
    options = adapter_options(config, _DEFAULTS)
    kwargs = {} if config.init_params is None else dict(config.init_params.to_dict())
    if kwargs.pop("num_action_chunks", 1) != 1:
        raise ConfigError("env.init_params.num_action_chunks: expected 1")
    kwargs.pop("action_dim", None)  # the action space says it
    backend = kwargs.setdefault("sim_backend", "cpu")
    if "cpu" not in str(backend):
        raise ConfigError(f"env.init_params.sim_backend: expected 'cpu', got '{backend}'")
    kwargs.setdefault("render_backend", "cpu")
    # Else a reset without a seed draws from torch's own generator, which nobody has seeded.
    kwargs.setdefault("enhanced_determinism", True)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    record = bool(kwargs.pop("record_metrics", True))
    check_auto_reset(config, options)
    video = VideoOptions.of(options["video_cfg"])
    if video.save_video:
        kwargs.setdefault("render_mode", "rgb_array")
    made = call_maker(config, partial(gym.make, kwargs.pop("id", None) or config.task), kwargs)
    env = checked(_adapted(made, options, record), None)
    if video.save_video:
        env = EpisodeVideo(env, video, config.name, _seen_by(env))
    return env


def _seen_by(env: gym.Env[Any, Any]) -> Callable[[Any], Any]:
    """Returns what makes a frame: the picture in the observation, else what the task renders."""
    spaces = getattr(env.observation_space, "spaces", {})
    if set(spaces) in ({"images"}, {"images", "task_descriptions"}):
        return lambda observation: np.moveaxis(observation["images"], 0, -1)
    return lambda observation: env.render()


def _adapted(env: gym.Env[Any, Any], options: dict[str, Any], record: bool) -> gym.Env[Any, Any]:
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    task = env.unwrapped
    env = CPUGymWrapper(
        env, ignore_terminations=options["ignore_terminations"], record_metrics=record
    )
    env = _Reward(env, options["use_rel_reward"])
    if options["use_fixed_reset_state_ids"]:
        env = _SameStart(env)
    sensors = getattr(env.observation_space, "spaces", {}).get("sensor_data")
    cameras = {} if sensors is None else sensors.spaces
    camera = options["camera"] or (_SCENE_CAMERA if _SCENE_CAMERA in cameras else None)
    if camera is not None:
        if camera not in cameras or "rgb" not in cameras[camera].spaces:
            raise ConfigError(
                f"env.env_kwargs.camera: '{camera}' gives no picture; cameras that do, with an "
                f"obs_mode such as 'rgb': {', '.join(cameras) or 'none'}"
            )
        env = _Picture(env, task, camera, options["task_descriptions"])
    binary = options["binary_gripper"]
    if _SCENE_CAMERA in cameras if binary is None else binary:
        env = _BinaryGripper(env)
    return env


class _Reward(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the reward of grasping where the task tells of it, and only its growth if asked to."""

    def __init__(self, env: gym.Env[Any, Any], relative: bool) -> None:
        super().__init__(env)
        self._relative = relative
        self._last = 0.0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._last = 0.0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        value = grasp_reward(info) if all(key in info for key in _GRASPING) else float(reward)
        if self._relative:
            value, self._last = value - self._last, value
        return observation, value, bool(terminated), bool(truncated), info


def grasp_reward(info: dict[str, Any]) -> float:
    """Returns 0.1 for a grasp, 0.1 for one that lasts, and 1.0 for success while grasping."""
    grasped, lasting, success = (float(np.any(info[key])) for key in _GRASPING)
    return 0.1 * grasped + 0.1 * lasting + success * grasped


class _SameStart(gym.Wrapper[Any, Any, Any, Any]):
    """Resets with the seed of the first reset."""

    _seed: int | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed = seed
        elif self._seed is None:
            self._seed = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
        return self.env.reset(seed=self._seed, options=options)


class _Picture(gym.Wrapper[Any, Any, Any, Any]):
    """Shows what one camera sees, channels first, and what is to be done."""

    def __init__(self, env: gym.Env[Any, Any], task: Any, camera: str, described: bool) -> None:
        super().__init__(env)
        self._task = task
        self._camera = camera
        self._described = described
        height, width, channels = env.observation_space["sensor_data"][camera]["rgb"].shape  # type: ignore[index]
        spaces: dict[str, gym.Space[Any]] = {
            "images": gym.spaces.Box(0, 255, (channels, height, width), np.uint8)
        }
        if described:
            text = gym.spaces.Text(_TEXT_BYTES // 4)
            text.max_bytes = _TEXT_BYTES  # type: ignore[attr-defined]
            spaces["task_descriptions"] = text
        self.observation_space = gym.spaces.Dict(spaces)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        return self._seen(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *outcome = self.env.step(action)
        return (self._seen(observation), *outcome)  # type: ignore[return-value]

    def _seen(self, observation: Any) -> dict[str, Any]:
        picture = observation["sensor_data"][self._camera]["rgb"]
        seen: dict[str, Any] = {"images": np.ascontiguousarray(np.moveaxis(picture, -1, 0))}
        if self._described:
            tell = getattr(self._task, "get_language_instruction", None)
            seen["task_descriptions"] = str(tell()[0]) if tell is not None else self._task.spec.id
        return seen


class _BinaryGripper(gym.ActionWrapper[Any, Any, Any]):
    """Opens the gripper above 0.5, and closes it otherwise."""

    def action(self, action: Any) -> Any:
        action = np.array(action)
        action[-1] = 1.0 if action[-1] > 0.5 else -1.0
        return action
