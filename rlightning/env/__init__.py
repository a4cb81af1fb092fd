"""Envs: the base class, groups of them, and the adapters behind `env.backend`."""

# ruff: noqa: F401 - adapters are imported for their entries in ENVS; what they host is not yet

from __future__ import annotations

import rlightning.env.ale_env as _ale_env
import rlightning.env.env_server as _env_server
import rlightning.env.envpool_env as _envpool_env
import rlightning.env.gymnasium_env as _gymnasium_env
import rlightning.env.isaac_env as _isaac_env
import rlightning.env.isaac_marl_env as _isaac_marl_env
import rlightning.env.libero_env as _libero_env
import rlightning.env.maniskill_env as _maniskill_env
import rlightning.env.mujoco_env as _mujoco_env
import rlightning.env.pettingzoo_env as _pettingzoo_env
import rlightning.env.piper_env as _piper_env
from rlightning.env.base_env import BaseEnv
from rlightning.env.env_group import EnvGroup, build_env_group
from rlightning.types import EnvMeta

__all__ = ["BaseEnv", "EnvGroup", "EnvMeta", "build_env_group"]
