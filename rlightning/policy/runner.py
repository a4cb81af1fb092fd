"""A policy in use: its forward passes, the version of its weights, its warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from rlightning.errors import PolicyError
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.pending import Answer
from rlightning.policy.state import GroupState, StateLayout, StateUse
from rlightning.policy.weights import load_weights
from rlightning.types import Mode

_LOG = logging.getLogger(__name__)

WARM_UP_ID = "warm-up"
"""Env id of the rows of zeros that go before all others."""

# The first inferences pay for caches and threads that later ones find ready.
_WARM_UP_BATCHES = 3


class PolicyRunner:
    """Answers batches of one spec; a `Runner` of a `Batcher`.

    Made and used on the inference thread, `gather` apart.

    Args:
        policy: Its network exists.
        layout: The arrays that it gets.

    Attributes:
        layout: As given.
        states: The policy's state; None if it keeps none.
    """

    def __init__(self, policy: BasePolicy, layout: InputLayout) -> None:
        self.layout = layout
        self.states = StateLayout.of(policy)
        self._policy = policy
        self._inference = Inference(policy, layout, self.states)

    @property
    def sizes(self) -> list[int]:
        """The rows that a batch can have, if they are few."""
        return self._inference.sizes

    def gather(self, parts: Sequence[Part], mode: Mode) -> Callable[[], list[Answer]]:
        """Puts the rows of a batch together; returns what answers them. See `Inference.gather`."""
        return self._inference.gather(parts, mode)

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Takes weights over, by flat name, between two batches."""
        load_weights(self._policy, weights)
        self._policy.weights_version = version
        if self.states is not None:
            self.states.refresh()

    def warm_up(self, rows: int) -> None:
        """Runs some batches of zeros; logs one that fails, as zeros may be no observation."""
        values = self.layout.zeros(rows)
        try:
            for _ in range(_WARM_UP_BATCHES):
                part = Part(WARM_UP_ID, values, rows)
                if self.states is not None:
                    part.state = StateUse(GroupState(rows), np.arange(rows), None, fresh=True)
                self._inference.run([part], Mode.EXPLORE)
        except PolicyError as error:
            _LOG.warning("warming up with zeros failed: %s", error)
