"""A policy that brings its own loss: the learner feeds it, and publishes what it has learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlightning.learner.random_stream import RandomStream
from rlightning.learner.ranks import ALONE, Ranks
from rlightning.policy import BasePolicy
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.utils.config import LearnerConfig, TrainConfig


class OwnLoss:
    """Calls the policy's `update_dataset` and `train`: `learner.algorithm: policy`.

    Args:
        policy: Made its optimizers in `setup_optimizer`.
        config: Not used.
        train: Not used.
        seed: Seed of what `train` draws from torch's global generator.

    Attributes:
        policy: The policy in training.
        ranks: Learners with which it shares its gradients, whenever an optimizer takes a step; the
            policy has clipped them before.
    """

    priorities = None
    ranks: Ranks = ALONE

    def __init__(
        self, policy: BasePolicy, config: LearnerConfig, train: TrainConfig, *, seed: int
    ) -> None:
        self.policy = policy
        self._random = RandomStream(seed, policy.device)
        self._rows = 0
        for part in self._parts().values():
            if isinstance(part, torch.optim.Optimizer):
                part.register_step_pre_hook(self._average)

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Gives the policy a batch and lets it learn.

        Args:
            columns: Columns by name: [T, N, ...] of a rollout, [B, ...] of replayed transitions;
                read-only arrays, valid during the call.

        Returns:
            What `train` returned; names without a "/" are put under `losses/`.
        """
        self._rows = len(columns["reward"])
        self.policy.update_dataset(columns)
        with self._random():
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
        """Returns the states of the policy's modules, optimizers and torch generators by attribute.

        With them goes where the random numbers of `train` stand.
        """
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        drawn = {name: generator.get_state() for name, generator in self._generators().items()}
        return {"parts": parts, "generators": drawn, "random": self._random.states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        parts, generators = self._parts(), self._generators()
        for mine, kept in ((parts, state["parts"]), (generators, state["generators"])):
            if mine.keys() != kept.keys():
                raise RuntimeError(f"expected the parts {sorted(mine)}, got {sorted(kept)}")
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        for name, generator in generators.items():
            generator.set_state(state["generators"][name])
        if self.ranks.rank == 0:  # others draw on from their own
            self._random.states = list(state["random"])

    def _average(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        groups = optimizer.param_groups
        self.ranks.average([one for group in groups for one in group["params"]], self._rows)

    def _parts(self) -> dict[str, nn.Module | torch.optim.Optimizer]:
        return {
            name: value
            for name, value in vars(self.policy).items()
            if isinstance(value, (nn.Module, torch.optim.Optimizer))
        }

    def _generators(self) -> dict[str, torch.Generator]:
        values = vars(self.policy).items()
        return {name: value for name, value in values if isinstance(value, torch.Generator)}
