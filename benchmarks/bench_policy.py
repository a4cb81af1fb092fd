"""The benchmark network as a policy of the real policy server."""

from __future__ import annotations

from typing import Any

from benchmarks.workload import forward, make_network
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, EnvRet, PolicyResponse


class BenchPolicy(BasePolicy):
    """64x64 tanh, arg max."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes the network for CartPole or for images, as the observation space says."""
        shape = env_meta.observation_space.shape if env_meta.observation_space else None
        self.kind = "img" if shape == (84, 84, 4) else "cp"
        self.network = make_network(self.kind)

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Answers with actions only."""
        return PolicyResponse(
            env_ret.env_id, action=forward(self.network, self.kind, env_ret.observation)
        )
