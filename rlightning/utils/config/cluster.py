"""Section `cluster` of documented files, which load here, and of which little has an effect."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlightning.utils.config.base import Config


class PlacementConfig(Config):
    """Where components run; read so that documented files load."""

    mode: Literal["auto", "manual"] = "auto"
    strategy: Literal["default", "disaggregate", "colocate"] = "default"
    env_strategy: Literal["default", "device-colocate"] = "default"


class ClusterConfig(Config):
    """Workers and placement of a Ray cluster; read so that documented files load."""

    ray_address: str | None = None
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    train_worker_num: int = 1
    eval_worker_num: int = 1
    train_each_gpu_num: float = 1.0
    eval_each_gpu_num: float = 1.0
    buffer_worker_num: int | Literal["auto"] = 1
    remote_train: bool = True
    remote_eval: bool = True
    remote_storage: bool = True
    remote_env: bool = True
    is_colocated: bool = False
    enable_offload: bool = False
    rollout_env_interaction: bool = False
    resource_pool: Config = Field(default_factory=Config)
