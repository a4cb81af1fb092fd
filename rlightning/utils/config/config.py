"""A whole config file, of its sections under their documented names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.errors import ConfigError
from rlightning.utils.config.base import Config
from rlightning.utils.config.buffer import BufferConfig
from rlightning.utils.config.cluster import ClusterConfig
from rlightning.utils.config.env import EnvConfig
from rlightning.utils.config.learner import LearnerConfig, TrainConfig
from rlightning.utils.config.log import LogConfig
from rlightning.utils.config.policy import PolicyConfig
from rlightning.utils.config.services import ServicesConfig

# The documented path of the sections.
__all__ = [
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "EnvConfig",
    "LearnerConfig",
    "LogConfig",
    "MainConfig",
    "PolicyConfig",
    "ServicesConfig",
    "TrainConfig",
]


class MainConfig(Config):
    """A whole config file.

    Attributes:
        engine: Documented; this library's actor loop and learner run side by side.
        env: The envs; one mapping stands for a list of one.
        buffer: Default: a RolloutBuffer.
        policy: The policy and its server.
        train: How long and towards what to train.
        learner: The algorithm.
        log: What is written where.
        services: Addresses, listeners and limits.
        cluster: Documented; Ray clusters.
        debug: Documented; `--debug` decides here.
        verbose: Documented; `--quiet` decides here.
    """

    engine: Literal["asyncrl", "async_rsl", "rsl", "syncrl", "eval"] = "asyncrl"
    env: list[EnvConfig] = Field(default_factory=list)
    buffer: BufferConfig = Field(
        default_factory=lambda: BufferConfig(type="RolloutBuffer", capacity=1_000_000)
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    debug: bool = True
    verbose: bool = True

    @field_validator("env", mode="before")
    @classmethod
    def listify_env(cls, env: Any) -> Any:
        """Makes one env a list of one."""
        return [env] if isinstance(env, (Mapping, EnvConfig)) else env

    @field_validator("buffer", mode="before")
    @classmethod
    def fill_buffer(cls, buffer: Any) -> Any:
        """Lets a file name only what differs from the default buffer."""
        if isinstance(buffer, Mapping):
            return {"type": "RolloutBuffer", "capacity": 1_000_000, **buffer}
        return buffer

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        """Refuses one address for several buffer servers."""
        if self.buffer.storage.type == "sharded" and self.services.buffer.address is not None:
            raise ValueError(
                "services.buffer.address names one server; those of sharded storage are in "
                "buffer.storage.addresses"
            )
        return self

    @property
    def sampled(self) -> BufferConfig:
        """The section of the table that the learner samples."""
        return self.buffer.tables.get(self.learner.table, self.buffer)

    @property
    def buffer_addresses(self) -> list[str]:
        """Where the buffer servers are dialled: one, or one for each shard.

        Raises:
            ConfigError: No port is named, or no server of sharded storage.
        """
        if self.buffer.storage.type == "sharded" and not self.buffer.storage.addresses:
            raise ConfigError("no buffer server to dial: buffer.storage.addresses is empty")
        return self.buffer.storage.addresses or [self.services.buffer.dial_address]
