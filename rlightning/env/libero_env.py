"""LIBERO's tasks of a robot arm at a table; needs the extra `libero`."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.extras import load_extra
from rlightning.env.utils.libero_utils import (
    get_benchmark_overridden,
    get_libero_image,
    get_libero_state,
    get_libero_wrist_image,
)
from rlightning.env.utils.making import call_maker, checked, make_row, vectorise
from rlightning.env.utils.options import adapter_options, check_auto_reset
from rlightning.env.utils.video import EpisodeVideo, VideoOptions
from rlightning.errors import ConfigError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

SETTLE_STEPS = 15
"""Steps after a reset in which nothing is done, until all objects lie still."""

_DEFAULTS = {
    "cameras": True,
    "task_descriptions": True,
    "group_size": 1,
    "specific_reset_id": None,
    "use_ordered_reset_state_ids": False,
    "use_fixed_reset_state_ids": False,
    "ignore_terminations": False,
    "use_rel_reward": False,
    "reward_coef": 1.0,
    "reset_gripper_open": True,
    "num_action_chunks": 1,
    "auto_reset": True,
    "is_eval": False,
    "video_cfg": None,
}
_TEXT_BYTES = 2048


@ENVS.register("libero")
class LiberoEnv(GymnasiumEnv):
    """Hosts a suite of LIBERO, or one task of it: `libero_spatial`, or `libero_spatial/3`.

    Observation: `states` float32 [8] (hand position, its axis-angle, two fingers), with cameras
    `main_images` and `wrist_images`, uint8 [H, W, 3], and `task_descriptions`, the instruction as a
    text. Action: float32 [7] in [-1, 1]: translation, rotation, gripper (-1 opens).

    An episode begins in one of the suite's initial states, numbered task by task; then nothing is
    done for `SETTLE_STEPS`. Each success terminates it with the reward `reward_coef`; without
    `max_episode_steps` nothing else ends it. `init_params` may hold `camera_heights` and
    `camera_widths` (128). Options, in `env_kwargs`:

    - `cameras`, `task_descriptions`: false leaves them out; without cameras nothing is rendered.
    - `specific_reset_id`: the initial state of every episode. `use_ordered_reset_state_ids`: one
      after the other. `use_fixed_reset_state_ids`: a row keeps the first it drew. Else each is
      drawn.
    - `group_size`: so many rows in a row have the same seed, and so the same states.
    - `ignore_terminations`: episodes end by truncation only.
    - `use_rel_reward`: the reward is how much it has grown in the step.
    - `reset_gripper_open`: the gripper opens while objects settle.
    - `is_eval`: an evaluation, in which states come one after the other instead of being drawn.
    - `video_cfg`: films of the main camera, see `VideoOptions`.
    - `auto_reset`: true, as several rows always are reset in the step that ends an episode.

    `info["episode_info"]` adds `success_once`. With rows of different tasks, several rows are best
    `async`: each has a process that makes its next task's env when that changes. For everything
    else see `GymnasiumEnv`.
    """

    option_names: ClassVar[Collection[str] | None] = tuple(_DEFAULTS)

    def _make(self, config: EnvConfig) -> Any:
        load_extra("libero.libero", extra="libero", backend="libero")
        if config.num_envs == 1:
            return make_row(partial(make_task, config), config)
        if config.vectorization_mode == "vector_entry_point":
            raise ConfigError(
                "env.vectorization_mode: libero takes auto, sync, async or independent"
            )
        return vectorise([partial(make_task, config)] * config.num_envs, config)

    def _draw_seeds(self) -> list[int] | None:
        seeds = super()._draw_seeds()
        size = int(adapter_options(self.config, _DEFAULTS)["group_size"])
        if seeds is None or size <= 1:
            return seeds
        return [seeds[row // size * size] for row in range(len(seeds))]

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Executes the actions of a response; see `GymnasiumEnv.step`."""
        env_ret = super().step(policy_resp)
        stats = env_ret.info.get("episode_info")
        if stats is not None:
            ended = env_ret.info.get("final_info", {}) if self._batched else env_ret.info
            if "success_once" in ended:
                stats["success_once"] = ended["success_once"]
        return env_ret


def make_task(config: EnvConfig) -> gym.Env[Any, Any]:
    """Makes one row as an ordinary gymnasium env, as `LiberoEnv` says.

    Raises:
        ConfigError: There is no such suite or task, or an option is wrong.
        EnvError: It could not be made.
    """
    load_extra("libero.libero", extra="libero", backend="libero")
    options = adapter_options(config, _DEFAULTS)
    if options["num_action_chunks"] != 1:
        raise ConfigError("env.env_kwargs.num_action_chunks: expected 1")
    check_auto_reset(config, options)
    video = VideoOptions.of(options["video_cfg"])
    if video.save_video and not options["cameras"]:
        raise ConfigError("env.env_kwargs.video_cfg.save_video: films need cameras: true")
    task = call_maker(config, partial(LiberoTask, config, options), {})
    env = checked(task, config.max_episode_steps)
    if video.save_video:
        env = EpisodeVideo(env, video, config.name, lambda seen: seen["main_images"])
    return env


class LiberoTask(gym.Env[dict[str, Any], Any]):
    """One row of a suite with gymnasium's interface; the simulator is made at the first reset.

    Args:
        config: Its section of the config.
        options: Those of `env_kwargs`.

    Raises:
        ConfigError: There is no such suite, task or initial state.
    """

    def __init__(self, config: EnvConfig, options: dict[str, Any]) -> None:
        suite_name, _, task = config.task.partition("/")
        try:
            self._suite = get_benchmark_overridden(suite_name)
        except KeyError as error:
            raise ConfigError(f"env.task '{config.task}': {error.args[0]}") from None
        tasks = range(self._suite.n_tasks) if not task else [_number(config, task)]
        if tasks[-1] >= self._suite.n_tasks:
            raise ConfigError(
                f"env.task '{config.task}': the suite has tasks 0 to {self._suite.n_tasks - 1}"
            )
        self._states = {index: self._suite.get_task_init_states(index) for index in tasks}
        self._starts = [(index, i) for index in tasks for i in range(len(self._states[index]))]
        chosen = options["specific_reset_id"]
        if chosen is not None and not 0 <= chosen < len(self._starts):
            raise ConfigError(
                f"env.env_kwargs.specific_reset_id: expected 0 to {len(self._starts) - 1}, "
                f"got {chosen}"
            )
        self._options = options
        self._next: int | None = None
        params = {} if config.init_params is None else config.init_params.to_dict()
        self._size = int(params.get("camera_heights", 128)), int(params.get("camera_widths", 128))
        self._env: Any = None
        self._task: int | None = None
        self._reward = 0.0
        self._success = False
        self._description = ""
        self.action_space = gym.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.observation_space = self._space()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begins an episode in the next initial state."""
        super().reset(seed=seed)
        number = self._choose()
        index, state = self._starts[number]
        if index != self._task:
            self._load(index)
        if seed is not None:
            self._env.seed(seed)
        self._env.reset()
        observation = self._env.set_init_state(self._states[index][state])
        nothing = np.zeros(7)
        nothing[-1] = -1.0 if self._options["reset_gripper_open"] else 0.0
        for _ in range(SETTLE_STEPS):
            observation = self._env.step(nothing)[0]
        self._reward, self._success = 0.0, False
        return self._seen(observation), {"reset_id": number, "task": index}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Executes an action."""
        observation, _, success, _ = self._env.step(np.asarray(action, np.float64))
        success = bool(success)
        reward = value = self._options["reward_coef"] * float(success)
        if self._options["use_rel_reward"]:
            reward, self._reward = value - self._reward, value
        self._success |= success
        terminated = success and not self._options["ignore_terminations"]
        info = {"success": success, "success_once": self._success}
        return self._seen(observation), reward, terminated, False, info

    def close(self) -> None:
        """Ends the simulator."""
        if self._env is not None:
            self._env.close()
            self._env = self._task = None

    def _choose(self) -> int:
        options, count = self._options, len(self._starts)
        if options["specific_reset_id"] is not None:
            return int(options["specific_reset_id"])
        if options["use_ordered_reset_state_ids"] or options["is_eval"]:
            self._next = 0 if self._next is None else (self._next + 1) % count
        elif self._next is None or not options["use_fixed_reset_state_ids"]:
            self._next = int(self.np_random.integers(count))
        assert self._next is not None
        return self._next

    def _load(self, index: int) -> None:
        """Makes the simulator of a task in the place of that of another."""
        from libero.libero import get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv

        self.close()
        task = self._suite.get_task(index)
        file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        cameras = bool(self._options["cameras"])
        self._env = ControlEnv(
            bddl_file_name=str(file),
            use_camera_obs=cameras,
            has_offscreen_renderer=cameras,
            has_renderer=False,
            ignore_done=True,  # what ends an episode is decided here
            camera_heights=self._size[0],
            camera_widths=self._size[1],
        )
        self._task = index
        self._description = str(task.language)

    def _space(self) -> gym.spaces.Dict:
        spaces: dict[str, gym.Space[Any]] = {}
        if self._options["cameras"]:
            for name in ("main_images", "wrist_images"):
                spaces[name] = gym.spaces.Box(0, 255, (*self._size, 3), np.uint8)
        spaces["states"] = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
        if self._options["task_descriptions"]:
            text = gym.spaces.Text(_TEXT_BYTES // 4)
            text.max_bytes = _TEXT_BYTES  # type: ignore[attr-defined]
            spaces["task_descriptions"] = text
        return gym.spaces.Dict(spaces)

    def _seen(self, observation: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {"states": get_libero_state(observation)}
        if self._options["cameras"]:
            seen["main_images"] = get_libero_image(observation)
            seen["wrist_images"] = get_libero_wrist_image(observation)
        if self._options["task_descriptions"]:
            seen["task_descriptions"] = self._description
        return seen


def _number(config: EnvConfig, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"env.task '{config.task}': expected a number after the slash")
    return int(text)
