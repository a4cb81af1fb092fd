"""What is done with data on its way into the buffer, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlightning.buffer.utils.layout import Array, as_array
from rlightning.types import EnvRet, PolicyResponse, Processed_EnvRet_fields
from rlightning.utils.conversions import map_leaves

_SHIFTED = {
    "last_reward": "reward",
    "last_terminated": "terminated",
    "last_truncated": "truncated",
}
# Of the EnvRet itself, what is not stored with a transition.
_NOT_STORED = frozenset({"info", "last_info"})
_FIELD_NAMES: dict[type[EnvRet], tuple[str, ...]] = {}


def default_obs_preprocessor(observation: Any) -> Any:
    """Returns the observation as it is."""
    return observation


def default_reward_preprocessor(reward: Any) -> Any:
    """Returns the reward as it is."""
    return reward


def default_env_ret_preprocess_fn(
    data: dict[str, Any],
    env_ret: EnvRet,
    obs_preprocessor: Callable[[Any], Any],
    reward_preprocessor: Callable[[Any], Any],
) -> dict[str, Any]:
    """Writes the fields of an EnvRet into `data`, observation and reward preprocessed; returns it.

    Raises:
        TypeError: `env_ret` is no EnvRet.
    """
    if not isinstance(env_ret, EnvRet):
        raise TypeError(f"expected an EnvRet, got {type(env_ret).__name__}")
    if env_ret._extra:
        data.update(env_ret.to_dict())
    else:
        fields = env_ret.__dict__
        data.update({name: fields[name] for name in _field_names(type(env_ret))})
    data["observation"] = obs_preprocessor(env_ret.observation)
    data["last_reward"] = reward_preprocessor(env_ret.last_reward)
    return data


def _field_names(kind: type[EnvRet]) -> tuple[str, ...]:
    # `EnvRet.fields` looks through the dataclass anew at every call, and this runs for every row.
    names = _FIELD_NAMES.get(kind)
    if names is None:
        names = _FIELD_NAMES[kind] = kind.fields()
    return names


def default_policy_resp_preprocess_fn(
    data: dict[str, Any], policy_resp: PolicyResponse
) -> dict[str, Any]:
    """Writes the outputs of a policy into `data`; returns it.

    Raises:
        TypeError: `policy_resp` is no PolicyResponse.
    """
    if not isinstance(policy_resp, PolicyResponse):
        raise TypeError(f"expected a PolicyResponse, got {type(policy_resp).__name__}")
    data.update(policy_resp.to_dict())
    return data


def default_preprocess_fn(
    data: dict[str, Any],
    env_ret: EnvRet | None = None,
    policy_resp: PolicyResponse | None = None,
    obs_preprocessor: Callable[[Any], Any] = default_obs_preprocessor,
    reward_preprocessor: Callable[[Any], Any] = default_reward_preprocessor,
    env_ret_preprocess_fn: Callable[..., dict[str, Any]] = default_env_ret_preprocess_fn,
    policy_resp_preprocess_fn: Callable[..., dict[str, Any]] = default_policy_resp_preprocess_fn,
) -> dict[str, Any]:
    """Writes an EnvRet, the answer to it, or both into `data`; returns it.

    Raises:
        ValueError: Neither is given, or they are of different envs.
        TypeError: One is of another type.
    """
    if env_ret is None and policy_resp is None:
        raise ValueError("At least one of env_ret or policy_resp must be given")
    if env_ret is not None and policy_resp is not None and env_ret.env_id != policy_resp.env_id:
        raise ValueError(
            f"Mismatched env_id: {env_ret.env_id!r} of env_ret, {policy_resp.env_id!r} of "
            "policy_resp"
        )
    if env_ret is not None:
        data = env_ret_preprocess_fn(data, env_ret, obs_preprocessor, reward_preprocessor)
    if policy_resp is not None:
        data = policy_resp_preprocess_fn(data, policy_resp)
    return data


def default_postprocess_fn(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Makes transitions of the steps of one finished episode.

    Step t holds observation t, the answer to it, and the reward and flags of the step before. Its
    reward and flags therefore belong to transition t-1, and its observation is that one's
    `next_observation`; the answer to the last observation is dropped. `info` is not stored.

    Args:
        episode: T values by name, as a list or an array: `observation`, `last_reward`,
            `last_terminated`, `last_truncated`, and any others, which belong to the observation.
            One of these called `last_X` tells of the step before, too: it is stored twice, as it
            is and as `X` of that step, unless there is another `X`.

    Returns:
        Columns of T-1 transitions; rewards are float32.
    """
    columns: dict[str, Any] = {}
    for name, values in episode.items():
        if name in _NOT_STORED:
            continue
        if name == "observation":
            columns[name] = stack(values[:-1], name)
            columns[Processed_EnvRet_fields[0]] = stack(values[1:], name)
        elif name in _SHIFTED:
            convert = _to_float if name == "last_reward" else _to_bool
            columns[_SHIFTED[name]] = map_leaves(convert, stack(values[1:], name))
        else:
            columns[name] = stack(values[:-1], name)
            outcome = outcome_of(name, {*episode, *Processed_EnvRet_fields})
            if outcome is not None:
                columns[outcome] = stack(values[1:], name)
    return columns


def outcome_of(name: str, taken: Collection[str]) -> str | None:
    """Returns the name X that a field `last_X` has with the step that it tells of.

    Args:
        name: Name of the field.
        taken: What X must not be, since it is something else.

    Returns:
        None for a field that belongs to its own step alone.
    """
    outcome = name.removeprefix("last_")
    return outcome if outcome not in {name, "", *taken} else None


def default_compute_gae(
    rewards: Any,
    values: Any,
    next_values: Any,
    dones: Any,
    gamma: float,
    lam: float,
    normalize_adv: bool = True,
) -> tuple[Any, Any]:
    """Returns generalised advantage estimates and returns (Schulman et al., arXiv:1506.02438).

    Args:
        rewards: Array or tensor [T, ...], as the others; axis 0 is time.
        values: Values of the observations.
        next_values: Values of the next observations; used where an episode does not end.
        dones: Where it does, bool or float; cut estimates there. For a truncation, add
            `gamma * next_value` to its reward.
        gamma: Discount.
        lam: Decay of the estimates.
        normalize_adv: Subtract the mean of the advantages, and divide by their standard deviation.

    Returns:
        Advantages, and returns: advantages, before they are normalised, plus values. Arrays or
        tensors as `rewards`.
    """
    goes_on = 1.0 - _like(dones, rewards)
    delta = rewards + gamma * next_values * goes_on - values
    advantages = delta + 0.0  # another object of the same kind, written to below
    for t in range(len(delta) - 2, -1, -1):
        advantages[t] += gamma * lam * goes_on[t] * advantages[t + 1]
    return _finished(advantages, values, normalize_adv)


def default_gae_no_loop(
    rewards: Any,
    values: Any,
    next_values: Any,
    dones: Any,
    gamma: float,
    lam: float,
    normalize_adv: bool = True,
) -> tuple[Any, Any]:
    """Returns what `default_compute_gae` does in log2 T steps over all of [T, ...].

    Each pass joins the sums of twice as many steps.
    """
    goes_on = 1.0 - _like(dones, rewards)
    advantages = rewards + gamma * next_values * goes_on - values
    decay = gamma * lam * goes_on
    span = 1
    while span < len(advantages):
        head = advantages[:-span] + decay[:-span] * advantages[span:]
        joined = decay[:-span] * decay[span:]
        advantages[:-span], decay[:-span] = head, joined
        span *= 2
    return _finished(advantages, values, normalize_adv)


def _like(dones: Any, rewards: Any) -> Any:
    if isinstance(dones, np.ndarray):
        return dones.astype(rewards.dtype)
    return dones.to(rewards.dtype)


def _finished(advantages: Any, values: Any, normalize: bool) -> tuple[Any, Any]:
    returns = advantages + values
    if normalize:
        options = {"ddof": 1} if isinstance(advantages, np.ndarray) else {}  # torch's default
        advantages = (advantages - advantages.mean()) / (advantages.std(**options) + 1e-8)
    return advantages, returns


def _to_float(array: Array) -> Array:
    return array.astype(np.float32)


def _to_bool(array: Array) -> Array:
    return array.astype(np.bool_)


def stack(values: Any, name: str) -> Any:
    """Stacks nested values of one structure along a new first axis; an array is stacked already."""
    if isinstance(values, np.ndarray):
        return values
    first = values[0] if values else ()
    if isinstance(first, Mapping):
        return {key: stack([value[key] for value in values], f"{name}.{key}") for key in first}
    if isinstance(first, (tuple, list)) and values:
        return tuple(
            stack([value[i] for value in values], f"{name}[{i}]") for i in range(len(first))
        )
    return np.stack([as_array(value, name) for value in values]) if values else np.empty((0,))
