"""PPO for policies with a memory: the same losses, over sequences instead of single rows.

A minibatch is the whole rollout of some sub-envs. The memory runs over it anew for each gradient
step, from the state that was stored with its first row, and from the stored state again where an
episode begins, so that gradients reach back to there and no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from rlightning.errors import PolicyError
from rlightning.learner.columns import observation_of, tensors
from rlightning.learner.ppo import LEARNED, PPO, ActorCritic


@runtime_checkable
class RecurrentActorCritic(ActorCritic, Protocol):
    """What PPO asks of a policy that remembers, beside what it asks of any.

    Attributes:
        memory: Called as `memory(observation, state, begins)` with leaves [T, N, ...], state
            [T, N, H] and bool [T, N]: where a row begins, with the state that is given there.
            Returns what is remembered after each step, [T, N, H]: it is the next step's state, and
            what `actor` and `critic` get in place of observations.
    """

    memory: nn.Module


class RecurrentPPO(PPO):
    """Trains a policy with a memory; arguments as of `PPO`. Rollouts have a column `state`."""

    policy: RecurrentActorCritic

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs to go on from here."""
        return {**super().state(), "memory": self.policy.memory.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
            RuntimeError: It is of other networks.
        """
        super().restore(state)
        self.policy.memory.load_state_dict(state["memory"])

    def _trained(self) -> list[nn.Module]:
        return [self._loss, self.policy.memory]

    def _read(self, columns: Mapping[str, Any]) -> TensorDict:
        if "state" not in columns:
            raise PolicyError("PPO needs a column 'state' to train a policy that remembers")
        rollout = super()._read(columns)
        rollout["state"] = tensors(columns["state"], self._device)
        begins = torch.ones_like(rollout["stop"])
        begins[1:] = rollout["stop"][:-1]
        rollout["begins"] = begins
        return rollout

    def _evaluate(self, rollout: TensorDict) -> None:
        with torch.no_grad():
            remembered = self._remember(rollout)
            # What follows the last row of an episode, or of the rollout, is seen once from there.
            after = self.policy.memory(
                observation_of(rollout.view(1, -1), "next_observation"),
                remembered.reshape(1, -1, remembered.shape[-1]),
                torch.ones(1, rollout.numel(), dtype=torch.bool, device=self._device),
            )
            for name, features in (("value", remembered), ("next_value", after)):
                value = self._value_norm.denormalize(self.policy.critic(features.flatten(0, 1)))
                rollout[name] = value.view(rollout.shape)

    def _rows(self, rollout: TensorDict) -> TensorDictBase:
        """Returns the sequences of all sub-envs, [N, T]."""
        sequences: TensorDictBase = rollout.select(*LEARNED, "state", "begins", "own")
        return sequences.transpose(0, 1).contiguous()

    def _parts(self, rows: TensorDictBase) -> int:
        return min(super()._parts(rows), max(1, int(self.ranks.least(len(rows)))))

    def _step(self, minibatch: TensorDictBase) -> dict[str, Tensor]:
        if not len(minibatch):
            return super()._step(minibatch)
        sequences = minibatch.transpose(0, 1)
        rows: TensorDictBase = sequences.exclude("observation", "state", "begins").flatten()
        rows["observation"] = self._remember(sequences).flatten(0, 1)
        return super()._step(rows[rows["own"]])

    def _remember(self, sequences: TensorDictBase) -> Tensor:
        remembered: Tensor = self.policy.memory(
            observation_of(sequences), sequences["state"], sequences["begins"]
        )
        return remembered
