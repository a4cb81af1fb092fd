"""Columns of a batch as tensors, and observations as networks take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlightning.errors import PolicyError


def tensors(value: Any, device: torch.device) -> Any:
    """Copies arrays to a device; the views a batch holds are read-only and may be unaligned."""
    if isinstance(value, (tuple, list)):  # which a TensorDict does not hold
        value = {f"[{i}]": part for i, part in enumerate(value)}
    if isinstance(value, Mapping):
        return {key: tensors(leaf, device) for key, leaf in value.items()}
    return torch.tensor(value, device=device)


def observation_of(rows: TensorDictBase, key: str = "observation") -> Any:
    """Returns observations as the networks take them: tensors [B, ...], nested like the space."""
    return as_observation(rows.get(key))


def as_observation(value: Any) -> Any:
    """Returns an observation in the structure of the space, as `tensors` was given it."""
    return _nested(value.to_dict()) if isinstance(value, TensorDictBase) else value


def _nested(value: Any) -> Any:
    """Returns a tuple for what `tensors` made of one."""
    if not isinstance(value, Mapping):
        return value
    parts = {name: _nested(part) for name, part in value.items()}
    is_tuple = bool(parts) and all(name == f"[{i}]" for i, name in enumerate(parts))
    return tuple(parts.values()) if is_tuple else parts


def replay_batch(
    columns: Mapping[str, Any], action: Any, gamma: float, device: torch.device
) -> TensorDict:
    """Returns sampled transitions as TorchRL's losses for replay take them, batch size [B].

    Args:
        columns: Columns [B, ...] of a batch. With `discount`, as `n_step_postprocess_fn` makes it,
            rewards and next observations look several steps ahead; with `sample_weight`, the loss
            of each row is weighted.
        action: The executed actions as the loss takes them, [B] or [B, A].
        gamma: Discount of one step.
        device: Where the tensors shall be.

    Raises:
        PolicyError: A reward is not finite.
    """
    reward = np.asarray(columns["reward"], np.float32)
    if reward.ndim != 1:
        raise PolicyError(
            f"expected single transitions, with rewards [B], got {list(reward.shape)}; this "
            "algorithm needs buffer.type ReplayBuffer, and a sampler of transitions"
        )
    if not np.isfinite(reward).all():
        raise PolicyError("a sampled reward is not finite")
    terminated = np.asarray(columns["terminated"], bool)
    done = terminated | columns["truncated"] | columns["cut"]
    batch: dict[str, Any] = {
        "observation": tensors(columns["observation"], device),
        "action": torch.as_tensor(action, device=device),
        "next": {
            "observation": tensors(columns["next_observation"], device),
            "reward": torch.tensor(reward, device=device)[:, None],
            "terminated": torch.tensor(terminated, device=device)[:, None],
            "done": torch.tensor(done, device=device)[:, None],
        },
    }
    if "sample_weight" in columns:
        batch["priority_weight"] = torch.tensor(columns["sample_weight"], device=device)
    if "discount" in columns and 0.0 < gamma < 1.0:
        steps = np.rint(np.log(columns["discount"]) / math.log(gamma)).astype(np.float32)
        batch["steps_to_next_obs"] = torch.tensor(steps, device=device)[:, None]
    return TensorDict(batch, batch_size=reward.shape, device=device)
