"""Gymnasium's MuJoCo envs; needs the extra `mujoco`."""

from __future__ import annotations

from typing import Any

from rlightning.env.gymnasium_env import GymnasiumEnv
from rlightning.env.utils.extras import load_extra
from rlightning.utils.config import EnvConfig
from rlightning.utils.registry import ENVS

REGISTERED_ENV = ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5")
"""Ids that are known to work; others of gymnasium's MuJoCo envs do as well."""


@ENVS.register("mujoco")
class MujocoEnv(GymnasiumEnv):
    """Hosts a MuJoCo env of gymnasium: `config.task` is its id, `env_kwargs` its arguments.

    Observations are float64, as MuJoCo gives them. Pictures (`render_mode: rgb_array`) need the
    environment variable MUJOCO_GL, such as `egl`, where there is no display. For everything else
    see `GymnasiumEnv`.
    """

    def _make(self, config: EnvConfig) -> Any:
        load_extra("mujoco", extra="mujoco", backend="mujoco")
        return super()._make(config)
