"""What a training run needs of a cluster, whether its services are processes or objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlightning.env.episodes import EpisodeRecord
from rlightning.latency.trace import StepTrace
from rlightning.learner.replay_loop import ReplaySource
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig


@dataclass(frozen=True)
class ClusterState:
    """The services at one moment.

    Attributes:
        env_steps: Env steps taken so far; every row counts.
        episodes: Episodes that ended since the last look.
        policy_version: Version of the weights in use.
        latencies: By stage: {count, mean, p50, p90, p99, max} in seconds.
        traces: Traces of single steps since the last look.
    """

    env_steps: int
    episodes: Sequence[EpisodeRecord]
    policy_version: int
    latencies: Mapping[str, Mapping[str, float]]
    traces: Sequence[StepTrace] = ()


class Backend(ReplaySource, Protocol):
    """A cluster in training: what a learner needs, and what people want to see.

    All methods block and may be called from any thread. `check` raises a `ClusterError` when a
    service is gone for good.
    """

    @property
    def config(self) -> MainConfig:
        """The effective config: services that the run has started have the addresses they bound."""
        ...

    def env_metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows."""
        ...

    def checkpoint_buffer(self, keep: Sequence[str]) -> str | None:
        """Lets the buffer write a checkpoint and returns its name; None if it writes none.

        Args:
            keep: Names of earlier ones that manifests still have: the buffer keeps them, and the
                new one, until the next call.
        """
        ...

    def observe(self) -> ClusterState:
        """Returns how the services fare; each episode is reported once."""
        ...


def batch_size(config: MainConfig) -> int | None:
    """Returns how many transitions to ask a buffer for; None for whole rollouts."""
    return None if config.sampled.type == "RolloutBuffer" else config.train.batch_size
