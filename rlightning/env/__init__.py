"""Envs: the base class, groups of them, and the adapters behind `env.backend`."""

from __future__ import annotations

# Imported for their entries in ENVS.
import rlightning.env.env_server as _env_server  # noqa: F401
import rlightning.env.gymnasium_env as _gymnasium_env  # noqa: F401
from rlightning.env.base_env import BaseEnv
from rlightning.env.env_group import EnvGroup, build_env_group
from rlightning.types import EnvMeta

__all__ = ["BaseEnv", "EnvGroup", "EnvMeta", "build_env_group"]
