"""Rounds of envs that always begin from the same state: what `train.lockstep` collects in."""

from __future__ import annotations

import numpy as np

from rlightning.env.hosting import HostedGroup
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

# A round has fewer episodes, so that no two rounds share an id.
_EPISODES = 2**20


class Round:
    """A group that begins a round of lockstep with its first reset; an `EnvPort` for one round.

    Seeds and episode ids of the round follow from its arguments, whatever the group did before.

    Args:
        group: The group.
        index: Its number among the groups of the run.
        begin: Env steps of the run before this round.
        seed: Of the run.
    """

    def __init__(self, group: HostedGroup, index: int, begin: int, seed: int) -> None:
        self.meta: EnvMeta = group.meta
        self._group = group
        self._begin = begin
        drawn = np.random.SeedSequence([seed, 2, begin, index]).generate_state(1)[0]
        self._seed: int | None = int(drawn) >> 1  # simulators take 31 bits

    async def reset(self) -> EnvRet:
        """Begins the round; begins new episodes if an env failed in the middle of it."""
        seed, self._seed = self._seed, None
        if seed is not None:
            self._group.count_episodes_from(self._begin * _EPISODES)
        return await self._group.reset(seed=seed)

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Executes an answer."""
        return await self._group.step(response)
