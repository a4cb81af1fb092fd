"""Typed configuration: the sections of a config file, and how files become one."""

from rlightning.utils.config.base import Config
from rlightning.utils.config.buffer import (
    BufferConfig,
    DurabilityConfig,
    FunctionsConfig,
    NodeConfig,
    RateLimiterConfig,
    SamplerConfig,
    StorageConfig,
    TableConfig,
)
from rlightning.utils.config.cluster import ClusterConfig, PlacementConfig
from rlightning.utils.config.config import MainConfig
from rlightning.utils.config.diff import diff_configs
from rlightning.utils.config.effect import keys_without_effect
from rlightning.utils.config.env import EnvConfig
from rlightning.utils.config.learner import ALGORITHMS, LearnerConfig, TrainConfig
from rlightning.utils.config.load import load_config
from rlightning.utils.config.log import LogConfig
from rlightning.utils.config.policy import (
    DEFAULT_POLICY,
    PolicyConfig,
    WeightBufferConfig,
    check_policy_name,
)
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, RpcConfig, TlsConfig
from rlightning.utils.config.services import (
    EnvServiceConfig,
    PolicyServiceConfig,
    ReplicatedServiceConfig,
    ServiceConfig,
    ServicesConfig,
)
from rlightning.utils.config.strict import strict_schema

__all__ = [
    "ALGORITHMS",
    "DEFAULT_POLICY",
    "BufferConfig",
    "ClientAuthConfig",
    "ClusterConfig",
    "Config",
    "DurabilityConfig",
    "EnvConfig",
    "EnvServiceConfig",
    "FunctionsConfig",
    "LearnerConfig",
    "ListenConfig",
    "LogConfig",
    "MainConfig",
    "NodeConfig",
    "PlacementConfig",
    "PolicyConfig",
    "PolicyServiceConfig",
    "RateLimiterConfig",
    "ReplicatedServiceConfig",
    "RpcConfig",
    "SamplerConfig",
    "ServiceConfig",
    "ServicesConfig",
    "StorageConfig",
    "TableConfig",
    "TlsConfig",
    "TrainConfig",
    "WeightBufferConfig",
    "check_policy_name",
    "diff_configs",
    "keys_without_effect",
    "load_config",
    "strict_schema",
]
