"""Checks every transition that a learner got, alone and against all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.integration.pairing.env import (
    EPISODE,
    INSTANCE,
    STEP,
    WRONG,
    is_truncated,
    length_of,
    reward_of,
)


class Ledger:
    """What came so far.

    Attributes:
        repeated: Transitions that came twice.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._versions: dict[tuple[int, int, int], int] = {}

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that answered."""
        return max(self._versions.values(), default=0)

    @property
    def instances(self) -> set[int]:
        """Envs that were seen."""
        return {instance for instance, _, _ in self._versions}

    def add(self, columns: Mapping[str, Any]) -> None:
        """Checks a rollout [T, N] and takes note of it."""
        observation, following = columns["observation"], columns["next_observation"]
        episode, step = observation[..., EPISODE], observation[..., STEP]
        ended = columns["terminated"] | columns["truncated"]
        # What was answered is what was seen, what was executed is what was answered.
        np.testing.assert_array_equal(columns["echo"], observation)
        np.testing.assert_array_equal(columns["action"], observation[..., :WRONG])
        assert (observation[..., WRONG] == 0).all(), "an answer was applied to another observation"
        # The outcome is that of this step and no other.
        np.testing.assert_array_equal(
            following - observation, np.broadcast_to([0, 0, 1, 0], following.shape)
        )
        np.testing.assert_array_equal(columns["reward"], reward_of(episode, step))
        np.testing.assert_array_equal(ended, step + 1 == length_of(episode))
        np.testing.assert_array_equal(columns["truncated"], ended & is_truncated(episode))
        np.testing.assert_array_equal(columns["step"], step)
        np.testing.assert_array_equal(columns["policy_version"], columns["weight"])
        # Rows that follow each other in time and were not cut belong together.
        joined = ~(columns["cut"] | ended)[:-1]
        np.testing.assert_array_equal(observation[1:][joined], following[:-1][joined])
        self._take_note(observation.reshape(-1, 4), columns["policy_version"].reshape(-1))

    def _take_note(self, observations: Any, versions: Any) -> None:
        for seen, version in zip(observations.tolist(), versions.tolist(), strict=True):
            key = (seen[INSTANCE], seen[EPISODE], seen[STEP])
            self.repeated += key in self._versions
            assert self._versions.setdefault(key, version) == version

    def check_versions(self) -> None:
        """Asserts that no env was answered by older weights than before."""
        newest: dict[int, int] = {}
        for key in sorted(self._versions):
            version = self._versions[key]
            assert version >= newest.get(key[INSTANCE], 0), key
            newest[key[INSTANCE]] = version

    def missing(self) -> int:
        """Returns how many steps between the first and the last of each env never came."""
        gaps = 0
        for instance in self.instances:
            keys = sorted(key for key in self._versions if key[INSTANCE] == instance)
            first, last = keys[0], keys[-1]
            lengths = sum(int(length_of(e)) for e in range(first[EPISODE], last[EPISODE]))
            gaps += lengths - first[STEP] + last[STEP] + 1 - len(keys)
        return gaps
