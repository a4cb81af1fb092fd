"""PPO for asynchronous collection: advantages corrected by V-trace, from TorchRL.

Rollouts may be several versions old when they are learned from. PPO's own advantages take their
actions for those of the policy in training; here the ratio of the two policies, cut at
`rho_clip` and `c_clip`, weighs what happened (Espeholt et al., IMPALA, arXiv:1802.01561). The
clipped surrogate of PPO then bounds how far one update goes from the policy that it began with.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from rlightning.errors import PolicyError
from rlightning.learner.ppo import PPO


class VTracePPO(PPO):
    """Trains an actor-critic policy on rollouts of older versions of it; arguments as of `PPO`."""

    def _estimate(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """Returns V-trace advantages and value targets, [T, N].

        Sets `log_prob` to that of the policy as it is before this update, which the surrogate
        compares with from then on.
        """
        flat = rollout.flatten()
        with torch.no_grad():
            distribution = self.policy.distribution(self._each(self.policy.actor, flat))
            log_prob = distribution.log_prob(flat["action"]).view(rollout.shape)
        if not log_prob.isfinite().all():
            raise PolicyError("V-trace cannot learn from this rollout: a log_prob is not finite")
        advantage, target = correct_advantages(
            self._config.gamma,
            self._config.rho_clip,
            self._config.c_clip,
            log_prob=log_prob,
            behaviour_log_prob=rollout["log_prob"],
            value=rollout["value"],
            next_value=rollout["next_value"],
            reward=rollout["reward"],
            terminated=rollout["terminated"],
            stop=rollout["stop"],
            own=rollout["own"],
        )
        rollout["log_prob"] = log_prob
        return advantage, target


def correct_advantages(
    gamma: float,
    rho_clip: float,
    c_clip: float,
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    terminated: Tensor,
    stop: Tensor,
    own: Tensor,
) -> tuple[Tensor, Tensor]:
    """Estimates V-trace advantages; every tensor is [T, N].

    Args:
        gamma: Discount of the return.
        rho_clip: Bound of the ratio that weighs each step.
        c_clip: Bound of the ratio that weighs how far later steps reach back.
        log_prob: Of the actions, under the policy in training.
        behaviour_log_prob: Of the actions, under the policy that chose them.
        value: Value of the observation of each row.
        next_value: Value of what followed it in its own episode.
        reward: Reward of the row's action.
        terminated: The MDP ended here, so nothing follows.
        stop: The next row does not continue this one: terminated, truncated or cut.
        own: The executed action was the policy's; the row before another's action bootstraps.

    Returns:
        Advantages, and the targets v of the values.
    """
    stop = stop.clone()
    stop[:-1] |= ~own[1:]
    advantage, target = vtrace_advantage_estimate(
        gamma,
        log_prob,
        behaviour_log_prob,
        value,
        next_value,
        reward,
        stop,
        terminated,
        rho_thresh=rho_clip,
        c_thresh=c_clip,
    )
    return advantage, target
