"""A policy that brings its own loss: the learner feeds it, and publishes what it has learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlightning.policy import BasePolicy
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.utils.config import LearnerConfig, TrainConfig


class OwnLoss:
    """Calls the policy's `update_dataset` and `train`: `learner.algorithm: policy`.

    Args:
        policy: Made its optimizers in `setup_optimizer`.
        config: Not used.
        train: Not used.
        seed: Not used; the policy has `policy.seed`.

    Attributes:
        policy: The policy in training.
    """

    priorities = None

    def __init__(
        self, policy: BasePolicy, config: LearnerConfig, train: TrainConfig, *, seed: int
    ) -> None:
        self.policy = policy

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Gives the policy a batch and lets it learn.

        Args:
            columns: Columns by name: [T, N, ...] of a rollout, [B, ...] of replayed transitions;
                read-only arrays, valid during the call.

        Returns:
            What `train` returned; names without a "/" are put under `losses/`.
        """
        self.policy.update_dataset(columns)
        figures = self.policy.train() or {}
        return {
            name if "/" in name else f"losses/{name}": float(value)
            for name, value in figures.items()
        }

    def explore(self, env_steps: int) -> None:
        """Does nothing: exploring is the policy's own affair."""

    def weights(self) -> bytes:
        """Returns the policy's weights as a safetensors file."""
        return dump_weights(policy_weights(self.policy))

    def state(self) -> dict[str, Any]:
        """Returns the state dicts of the policy's modules and optimizers, by attribute."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        parts = self._parts()
        if parts.keys() != state.keys():
            raise RuntimeError(f"expected the parts {sorted(parts)}, got {sorted(state)}")
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {
            name: value
            for name, value in vars(self.policy).items()
            if isinstance(value, (nn.Module, torch.optim.Optimizer))
        }
