"""Proximal policy optimisation, with losses and advantages from TorchRL.

One `update` is the whole algorithm: values, advantages, then some epochs of minibatches over one
rollout. Shapes read [T, N, ...]: T steps of N sub-envs, as the buffer cut them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules.value_norm import RunningValueNorm
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from rlightning.errors import PolicyError
from rlightning.learner.columns import observation_of, tensors
from rlightning.learner.ranks import ALONE, Ranks
from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.weights import dump_weights, policy_weights
from rlightning.types import ActionSource, EnvMeta
from rlightning.utils.config import LearnerConfig, TrainConfig

# Of rollouts of pictures, to be looked at without gradients.
_ROWS_AT_ONCE = 1024

LEARNED = ("observation", "action", "log_prob", "advantage", "value_target")


@runtime_checkable
class ActorCritic(Protocol):
    """What PPO asks of a policy: two networks, and what the actor's output means.

    Attributes:
        actor: Observations [B, ...] to the parameters of a distribution over actions.
        critic: Observations [B, ...] to state values [B, 1], normalised as `PPO` says.
        env_meta: Spaces of the envs.

    A policy whose networks have a part in common has it as a module `features`: observations
    [B, ...] to what `actor` and `critic` then get instead.
    """

    actor: nn.Module
    critic: nn.Module
    env_meta: EnvMeta | None

    def distribution(self, params: Any) -> Distribution:
        """Returns the distribution over actions, batch shape [B], that `params` describe.

        Actions of a Discrete space are counted from 0 there.
        """
        ...

    def get_trainable_parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns what is published: tensors by module and name."""
        ...


class PPO:
    """Trains an actor-critic policy on one rollout after the other.

    The critic learns returns less the mean and by the standard deviation of all returns seen so
    far, whatever their scale. (Asked for returns of 100 as they are, the tanh units of a small
    network saturate, and it answers a constant: CartPole then takes twice the steps, some seeds
    never solve it.)

    Args:
        policy: Its networks are trained in place, on the device where they are.
        config: Hyperparameters of the algorithm.
        train: Learning rate, minibatch size, and the number of rows over which the rate may fall.
        seed: Seed of the order in which rows are visited.

    Attributes:
        policy: The policy in training.
        rows: Rows learned from so far, by all ranks.
        ranks: Learners with which it shares gradients and the scale of advantages and returns.
    """

    ranks: Ranks = ALONE

    def __init__(
        self, policy: ActorCritic, config: LearnerConfig, train: TrainConfig, *, seed: int
    ) -> None:
        self.policy = policy
        self.rows = 0
        self._features: nn.Module | None = getattr(policy, "features", None)
        self._config = config
        self._train = train
        self._loss = ClipPPOLoss(
            _Actor(policy),
            _Critic(policy),
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            # Swapping parameters in and out of the networks costs more than a small forward pass.
            functional=False,
            # Computed once for the rollout instead: of one minibatch it is noise.
            log_explained_variance=False,
        )
        self._loss.set_keys(sample_log_prob="log_prob", value="value")
        modules = nn.ModuleList(self._trained())
        self._parameters = [p for p in modules.parameters() if p.requires_grad]
        self._scaled = [
            module
            for module in modules.modules()
            if isinstance(module, ObservationEncoder) and module.norm is not None
        ]
        self._device = self._parameters[0].device
        self._value_norm = RunningValueNorm(device=self._device)
        self._optimizer = torch.optim.Adam(self._parameters, lr=train.lr, eps=1e-5, fused=True)
        self._generator = torch.Generator().manual_seed(seed)
        space = policy.env_meta.action_space if policy.env_meta is not None else None
        self._first_action = int(space.start) if isinstance(space, gym.spaces.Discrete) else 0

    def update(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Learns from one rollout.

        Rows whose executed action was not the policy's own are left out of the loss, and no
        advantage reaches back over them. One that was clipped is the policy's own, as it was before
        that: the limits belong to the env.

        Args:
            columns: Columns [T, N, ...] of a rollout batch; read, not kept.

        Returns:
            Scalars under `losses/`: means over the minibatches, and values of the whole rollout.

        Raises:
            PolicyError: The policy does not return what PPO needs, or something is not finite; the
                weights are finite still.
        """
        rollout = self._read(columns)
        self.rows += rollout.numel() * self.ranks.world_size
        rows, explained_variance = self._prepare(rollout)
        metrics = {
            "losses/learning_rate": self._anneal(),
            "losses/explained_variance": explained_variance,
            "losses/masked_rows": float((~rollout["own"]).sum()),
        }
        if self.ranks.total(len(rows)):
            metrics |= self._descend(rows)
        # After the update: these are the scales that the policy acted with, as far as it can be.
        self._learn_scales(rollout)
        return metrics

    def weights(self) -> bytes:
        """Returns the policy's weights as a safetensors file."""
        return dump_weights(policy_weights(self.policy))

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here."""
        return {
            "loss": self._loss.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "value_norm": self._value_norm.state_dict(),
            "generator": self._generator.get_state(),
            "rows": self.rows,
            **({} if self._features is None else {"features": self._features.state_dict()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        self._loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._value_norm.load_state_dict(state["value_norm"])
        self._generator.set_state(state["generator"])
        self.rows = state["rows"]
        if self._features is not None:
            self._features.load_state_dict(state["features"])

    def _read(self, columns: Mapping[str, Any]) -> TensorDict:
        """Copies the columns that PPO needs into tensors [T, N, ...] on the policy's device."""
        if "log_prob" not in columns:
            raise PolicyError(
                "PPO needs a column 'log_prob', which the policy's rollout_step returns; "
                f"got {', '.join(columns)}"
            )
        names = ("observation", "next_observation", "log_prob", "reward", "terminated")
        source = {name: columns[name] for name in names}
        source["action"], source["own"] = _own_actions(columns)
        if self._first_action:
            source["action"] = source["action"] - self._first_action
        source["stop"] = columns["terminated"] | columns["truncated"] | columns["cut"]
        if "policy_version" in columns:
            # Later actions of a chunk are the policy's, too, but have no answer of their own.
            source["own"] = source["own"] & (columns["policy_version"] >= 0)
        return TensorDict(
            {name: tensors(value, self._device) for name, value in source.items()},
            batch_size=columns["reward"].shape,
        )

    def _prepare(self, rollout: TensorDict) -> tuple[TensorDictBase, float]:
        """Returns the rows to learn from, [B], with advantages, and the explained variance."""
        self._evaluate(rollout)
        value, own = rollout["value"], rollout["own"]
        advantage, target = self._estimate(rollout)
        if self.ranks.total(int(own.sum())) < 2:  # no deviation to divide by
            return rollout.flatten()[:0], math.nan
        if not advantage[own].isfinite().all():
            raise PolicyError(
                "PPO cannot learn from this rollout: an observation, a reward or a value "
                "of the critic is not finite"
            )
        self._value_norm.update(self.ranks.concatenate(target[own][:, None]))
        spread, mean = torch.std_mean(self.ranks.concatenate(advantage[own][:, None]))
        rollout["value_target"] = self._value_norm.normalize(target[..., None])
        rollout["advantage"] = ((advantage - mean) / (spread + 1e-8))[..., None]
        if int(own.sum()) < 2:  # the others have some
            return self._rows(rollout), math.nan
        unexplained, variance = float((target - value)[own].var()), float(target[own].var())
        return self._rows(rollout), 1.0 - unexplained / variance if variance > 0.0 else math.nan

    def _trained(self) -> list[nn.Module]:
        """Returns the modules that are trained."""
        return [self._loss] if self._features is None else [self._loss, self._features]

    def _evaluate(self, rollout: TensorDict) -> None:
        """Sets `value` and `next_value`, [T, N], in the scale of the rewards."""
        flat = rollout.flatten()
        rollout["value"] = self._values(flat, "observation").view(rollout.shape)
        rollout["next_value"] = self._values(flat, "next_observation").view(rollout.shape)

    def _rows(self, rollout: TensorDict) -> TensorDictBase:
        """Returns the policy's own rows, [B]."""
        rows: TensorDictBase = rollout.flatten().select(*LEARNED)
        own = rollout["own"]
        return rows if own.all() else rows[own.flatten()]

    def _estimate(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """Returns advantages and value targets, [T, N]."""
        return estimate_advantages(
            self._config.gamma,
            self._config.gae_lambda,
            value=rollout["value"],
            next_value=rollout["next_value"],
            reward=rollout["reward"],
            terminated=rollout["terminated"],
            stop=rollout["stop"],
            own=rollout["own"],
        )

    def _values(self, rows: TensorDictBase, key: str) -> Tensor:
        """Returns the critic's values [B, 1] in the scale of the rewards."""
        with torch.no_grad():
            value: Tensor = self._each(self.policy.critic, rows, key)
            denormalised: Tensor = self._value_norm.denormalize(value)
        return denormalised

    def _each(self, head: nn.Module, rows: TensorDictBase, key: str = "observation") -> Tensor:
        """Returns what a head makes of the observations of many rows, [B, ...]."""
        if self._features is None:
            output: Tensor = head(observation_of(rows, key))
            return output
        # In parts, since what convolutions make of a whole rollout may not fit into memory.
        parts = rows.select(key).split(_ROWS_AT_ONCE)
        return torch.cat([head(self._features(observation_of(part, key))) for part in parts])

    def _learn_scales(self, rollout: TensorDict) -> None:
        """Lets the policy's scales of observations follow what was seen."""
        for encoder in self._scaled:
            assert encoder.norm is not None
            seen = encoder.flatten(observation_of(rollout.flatten()))
            encoder.norm.update(self.ranks.concatenate(seen))

    def _descend(self, rows: TensorDictBase) -> dict[str, float]:
        """Takes the gradient steps of one update and returns the means of what they report."""
        parts = self._parts(rows)
        sums: dict[str, Tensor] = {}
        for _ in range(self._config.epochs):
            order = torch.randperm(len(rows), generator=self._generator)
            for part in order.to(self._device).tensor_split(parts):
                for name, value in self._step(rows[part]).items():
                    sums[name] = sums[name] + value if name in sums else value
        steps = parts * self._config.epochs
        return {f"losses/{name}": float(total) / steps for name, total in sums.items()}

    def _parts(self, rows: TensorDictBase) -> int:
        """Returns into how many minibatches the rows go, as many on every rank."""
        # Equal parts: a small remainder would take a whole step on few rows.
        share = self.ranks.total(rows.numel()) / self.ranks.world_size
        return max(1, round(share / self._train.batch_size))

    def _step(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        """Takes one gradient step; without rows here, by the gradients of other ranks."""
        self._optimizer.zero_grad()
        if len(minibatch):
            if self._features is not None:
                features = self._features(observation_of(minibatch))
                minibatch = minibatch.exclude("observation").set("observation", features)
            terms = self._loss(minibatch)
            loss = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
            loss.backward()
        self.ranks.average(self._parameters, len(minibatch))
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        if not grad_norm.isfinite():
            raise PolicyError("PPO diverged: a gradient is not finite; a lower train.lr may help")
        self._optimizer.step()
        if not len(minibatch):
            return {}
        return {
            "policy": terms["loss_objective"].detach(),
            "value": terms["loss_critic"].detach(),
            "entropy": terms["entropy"],
            "approx_kl": terms["kl_approx"],
            "clip_fraction": terms["clip_fraction"],
            "grad_norm": grad_norm,
        }

    def _anneal(self) -> float:
        """Sets the learning rate of this update and returns it."""
        rate = self._train.lr
        if self._config.anneal_lr:
            rate *= max(0.0, 1.0 - self.rows / self._train.max_env_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate


def _own_actions(columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the actions [T, N, ...] to learn from, and whether the policy chose them, [T, N]."""
    action, source = columns["action"], columns["action_source"]
    own = source == ActionSource.POLICY
    chosen = columns.get("policy_action")
    # A chunk is no action: those of its later steps have no log_prob of their own.
    if chosen is not None and chosen.shape == action.shape:
        clipped = source == ActionSource.CLIPPED
        where = clipped.reshape(*clipped.shape, *(1,) * (action.ndim - clipped.ndim))
        action, own = np.where(where, chosen, action), own | clipped
    return action, own


def estimate_advantages(
    gamma: float,
    gae_lambda: float,
    *,
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    stop: Tensor,
    own: Tensor,
) -> tuple[Tensor, Tensor]:
    """Estimates generalised advantages; every tensor is [T, N].

    Args:
        gamma: Discount of the return.
        gae_lambda: Mixing of n-step advantages.
        value: Value of the observation of each row.
        next_value: Value of what followed it in its own episode: for a row that ended one, of the
            final observation.
        reward: Reward of the row's action.
        terminated: The MDP ended here, so nothing follows; a row that only stops bootstraps.
        stop: The next row does not continue this one: terminated, truncated or cut.
        own: The executed action was the policy's. The row before another's action bootstraps,
            since what happened then says nothing about the policy.

    Returns:
        Advantages and value targets.
    """
    stop = stop.clone()
    stop[:-1] |= ~own[1:]
    advantage, value_target = generalized_advantage_estimate(
        gamma, gae_lambda, value, next_value, reward, stop, terminated
    )
    return advantage, value_target


class _Actor(nn.Module):
    """A policy's actor as TorchRL's loss wants it."""

    in_keys = ("observation",)

    def __init__(self, policy: ActorCritic) -> None:
        super().__init__()
        self.network = policy.actor
        self._distribution = policy.distribution

    def get_dist(self, rows: TensorDictBase) -> Distribution:
        return self._distribution(self.network(observation_of(rows)))


class _Critic(nn.Module):
    """A policy's critic as TorchRL's loss wants it."""

    in_keys = ("observation",)

    def __init__(self, policy: ActorCritic) -> None:
        super().__init__()
        self.network = policy.critic

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        return rows.set("value", self.network(observation_of(rows)))
