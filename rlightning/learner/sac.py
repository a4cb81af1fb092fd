"""Soft actor-critic with TorchRL's loss: two critics, and a temperature that finds itself.

One `update` is one gradient step on one batch of replayed transitions (Haarnoja et al.,
arXiv:1812.05905). Actions are scaled to [-1, 1] here, whatever the bounds of the space, so that
critics and entropy do not depend on the units of an actuator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import SACLoss, ValueEstimators

from rlightning.errors import PolicyError
from rlightning.learner.columns import as_observation, replay_batch
from rlightning.learner.random_stream import RandomStream
from rlightning.learner.ranks import ALONE, Ranks
from rlightning.learner.targets import make_target_updater
from rlightning.policy.sac_actor import bounded_box
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.types import EnvMeta
from rlightning.utils.config import LearnerConfig, TrainConfig


@runtime_checkable
class SquashedActorCritics(Protocol):
    """What SAC asks of a policy.

    Attributes:
        actor: Observations [B, ...] to the parameters of a Gaussian over actions.
        critics: Two modules, each of an observation [B, ...] and an action scaled to [-1, 1],
            [B, A], to values [B, 1]; of one architecture.
        env_meta: Spaces of the envs.
    """

    actor: nn.Module
    critics: nn.ModuleList
    env_meta: EnvMeta | None

    def gaussian(self, params: Any) -> tuple[Tensor, Tensor]:
        """Returns means and standard deviations before squashing by tanh, each [B, A]."""
        ...

    def get_trainable_parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns what is published: tensors by module and name."""
        ...


class SAC:
    """Trains a squashed Gaussian actor and two critics on replayed transitions.

    Args:
        policy: Its actor is trained in place, on the device where it is; of the critics the loss
            has its own copies.
        config: Hyperparameters of the algorithm.
        train: Learning rate.
        seed: Seed of the actions that the losses draw.

    Attributes:
        policy: The policy in training.
        priorities: How wrong the values of the last batch's rows were, float64 [B].
        ranks: Learners with which it shares its gradients.

    Raises:
        ConfigError: The actions are not of a Box with finite bounds.
    """

    ranks: Ranks = ALONE

    def __init__(
        self, policy: SquashedActorCritics, config: LearnerConfig, train: TrainConfig, *, seed: int
    ) -> None:
        space = bounded_box(policy.env_meta.action_space if policy.env_meta is not None else None)
        self.policy = policy
        self.priorities: npt.NDArray[np.float64] = np.zeros(0)
        self._config = config
        self._low = space.low.reshape(-1).astype(np.float32)
        self._half_width = (space.high.reshape(-1) - self._low) / np.float32(2)
        target_entropy = config.target_entropy
        self._loss = SACLoss(
            ProbabilisticActor(
                TensorDictModule(
                    _Gaussian(policy), in_keys=["observation"], out_keys=["loc", "scale"]
                ),
                in_keys=["loc", "scale"],
                distribution_class=TanhNormal,
                return_log_prob=False,
            ),
            [
                TensorDictModule(
                    _Critic(critic),
                    in_keys=["observation", "action"],
                    out_keys=["state_action_value"],
                )
                for critic in policy.critics
            ],
            num_qvalue_nets=len(policy.critics),
            loss_function="l2",
            alpha_init=config.alpha_init,
            target_entropy=-math.prod(space.shape) if target_entropy is None else target_entropy,
            delay_qvalue=True,
        )
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=config.gamma)
        self._target = make_target_updater(self._loss, config.tau)
        self._parameters = [p for p in self._loss.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._optimizer = torch.optim.Adam(self._parameters, lr=train.lr, fused=True)
        self._random = RandomStream(seed, self._device)
        self._updates = 0

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Takes one gradient step of actor, critics and temperature.

        Args:
            columns: Columns [B, ...] of sampled transitions; read, not kept.

        Returns:
            Scalars under `losses/`.

        Raises:
            PolicyError: Something is not finite; the weights are finite still.
        """
        action = np.asarray(columns["action"], np.float32)
        action = action.reshape(len(action), -1)
        scaled = ((action - self._low) / self._half_width - 1).astype(np.float32)
        batch = replay_batch(columns, scaled, self._config.gamma, self._device)
        with self._random():
            terms = self._loss(batch)
        loss = terms["loss_actor"] + terms["loss_qvalue"] + terms["loss_alpha"]
        self._optimizer.zero_grad()
        loss.backward()
        self.ranks.average(self._parameters, len(action))
        if not loss.isfinite():
            raise PolicyError("SAC diverged: a loss is not finite; a lower train.lr may help")
        self._optimizer.step()
        self._updates += 1
        if self._updates % self._config.target_interval == 0:
            self._target.step()
        self.priorities = batch["td_error"].flatten().double().cpu().numpy()
        return {
            "losses/actor": float(terms["loss_actor"].detach()),
            "losses/value": float(terms["loss_qvalue"].detach()),
            "losses/alpha": float(terms["alpha"]),
            "losses/entropy": float(terms["entropy"]),
        }

    def explore(self, env_steps: int) -> None:
        """Does nothing: the actor's own spread is the exploration."""

    def weights(self) -> bytes:
        """Returns the policy's published weights as a safetensors file."""
        return dump_weights(policy_weights(self.policy))

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here."""
        return {
            "loss": self._loss.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._random.states,
            "updates": self._updates,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        self._loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self.ranks.rank == 0:  # others draw on from their own
            self._random.states = list(state["random"])
        self._updates = state["updates"]


class _Gaussian(nn.Module):
    """A policy's actor, with what its output means."""

    def __init__(self, policy: SquashedActorCritics) -> None:
        super().__init__()
        self.network = policy.actor
        self._gaussian = policy.gaussian

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        return self._gaussian(self.network(as_observation(observation)))


class _Critic(nn.Module):
    """A critic that takes what a TensorDict holds of an observation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Any, action: Tensor) -> Tensor:
        values: Tensor = self.network(as_observation(observation), action)
        return values
