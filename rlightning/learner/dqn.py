"""Deep Q-learning, with TorchRL's loss: double, prioritised and n-step where asked for.

One `update` is one gradient step on one batch of replayed transitions (Mnih et al., Nature 518;
double: arXiv:1509.06461; prioritised: arXiv:1511.05952).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, ValueEstimators

from rlightning.errors import ConfigError, PolicyError
from rlightning.learner.columns import as_observation, replay_batch
from rlightning.learner.ranks import ALONE, Ranks
from rlightning.learner.targets import make_target_updater
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.types import EnvMeta
from rlightning.utils.config import LearnerConfig, TrainConfig

# So that no transition is never drawn again.
_LEAST_PRIORITY = 1e-6


@runtime_checkable
class QNetwork(Protocol):
    """What DQN asks of a policy.

    Attributes:
        q_network: Observations [B, ...] to the values of the actions, [B, n].
        epsilon: Probability of a random action, a tensor []; published with the weights.
        env_meta: Spaces of the envs.
    """

    q_network: nn.Module
    epsilon: Tensor
    env_meta: EnvMeta | None

    def get_trainable_parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns what is published: tensors by module and name."""
        ...


class DQN:
    """Trains a Q-network on replayed transitions.

    Args:
        policy: Its network is trained in place, on the device where it is.
        config: Hyperparameters of the algorithm.
        train: Learning rate.
        seed: Nothing here is drawn; which rows are replayed, the buffer decides.

    Attributes:
        policy: The policy in training.
        priorities: How wrong the values of the last batch's rows were, float64 [B]: the absolute
            difference between value and target.
        ranks: Learners with which it shares its gradients.

    Raises:
        ConfigError: The actions are not discrete.
    """

    ranks: Ranks = ALONE

    def __init__(
        self, policy: QNetwork, config: LearnerConfig, train: TrainConfig, *, seed: int
    ) -> None:
        space = policy.env_meta.action_space if policy.env_meta is not None else None
        if not isinstance(space, gym.spaces.Discrete):
            raise ConfigError(f"learner.algorithm 'dqn' needs a Discrete action space, got {space}")
        self.policy = policy
        self.priorities: npt.NDArray[np.float64] = np.zeros(0)
        self._config = config
        self._first_action = int(space.start)
        network = TensorDictModule(
            _Values(policy.q_network), in_keys=["observation"], out_keys=["action_value"]
        )
        self._loss = DQNLoss(
            QValueActor(network, in_keys=["observation"], action_space="categorical"),
            action_space="categorical",
            loss_function="smooth_l1",
            delay_value=True,
            double_dqn=config.double,
        )
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=config.gamma)
        self._target = make_target_updater(self._loss, config.tau)
        self._parameters = list(policy.q_network.parameters())
        self._device = self._parameters[0].device
        self._optimizer = torch.optim.Adam(self._parameters, lr=train.lr, fused=True)
        self._updates = 0

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Takes one gradient step.

        Args:
            columns: Columns [B, ...] of sampled transitions; read, not kept.

        Returns:
            Scalars under `losses/`.

        Raises:
            PolicyError: Something is not finite; the weights are finite still.
        """
        action = np.asarray(columns["action"], np.int64) - self._first_action
        batch = replay_batch(columns, action, self._config.gamma, self._device)
        loss = self._loss(batch)["loss"]
        self._optimizer.zero_grad()
        loss.backward()
        self.ranks.average(self._parameters, len(action))
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        if not grad_norm.isfinite():
            raise PolicyError("DQN diverged: a gradient is not finite; a lower train.lr may help")
        self._optimizer.step()
        self._updates += 1
        if self._updates % self._config.target_interval == 0:
            self._target.step()
        errors = batch["td_error"].sqrt().flatten()  # TorchRL squares them
        self.priorities = errors.double().cpu().numpy() + _LEAST_PRIORITY
        return {
            "losses/value": float(loss.detach()),
            "losses/td_error": float(errors.mean()),
            "losses/grad_norm": float(grad_norm),
            "losses/epsilon": float(self.policy.epsilon),
        }

    def explore(self, env_steps: int) -> None:
        """Lets epsilon fall with the env steps that were executed."""
        config = self._config
        part = min(1.0, env_steps / config.epsilon_steps)
        start, end = config.epsilon_start, config.epsilon_end
        self.policy.epsilon.fill_(start + part * (end - start))

    def weights(self) -> bytes:
        """Returns the policy's weights, epsilon among them, as a safetensors file."""
        return dump_weights(policy_weights(self.policy))

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here."""
        return {
            "loss": self._loss.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "epsilon": self.policy.epsilon.clone(),
            "updates": self._updates,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of another network.
        """
        self._loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy.epsilon.copy_(state["epsilon"])
        self._updates = state["updates"]


class _Values(nn.Module):
    """A Q-network that takes what a TensorDict holds of an observation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Any) -> Tensor:
        values: Tensor = self.network(as_observation(observation))
        return values
