"""What a training run needs of a cluster, whether its services are processes or objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlightning.env.episodes import EpisodeRecord
from rlightning.types import EnvMeta


@dataclass(frozen=True)
class ClusterState:
    """The services at one moment.

    Attributes:
        env_steps: Env steps taken so far; every row counts.
        episodes: Episodes that ended since the last look.
        policy_version: Version of the weights in use.
        latencies: By stage: {count, mean, p50, p90, p99, max} in seconds.
    """

    env_steps: int
    episodes: Sequence[EpisodeRecord]
    policy_version: int
    latencies: Mapping[str, Mapping[str, float]]


class Backend(Protocol):
    """A cluster in training. All methods block and may be called from any thread."""

    def env_metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows."""
        ...

    def next_batch(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Returns the next rollout's columns [T, N, ...]; None if there was none in time."""
        ...

    def publish(self, version: int, weights: bytes) -> None:
        """Lets the policy act with new weights; returns when it does."""
        ...

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        ...

    def observe(self) -> ClusterState:
        """Returns how the services fare; each episode is reported once."""
        ...

    def check(self) -> None:
        """Raises when a service is gone for good.

        Raises:
            ClusterError: Which one, and how it ended.
        """
        ...
