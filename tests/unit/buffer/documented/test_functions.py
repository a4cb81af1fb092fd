"""The rows of the documented functions: preprocess, postprocess, preprocessors, advantages."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer.utils.postprocess import n_step_postprocess_fn
from rlightning.buffer.utils.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    get_preprocessor_cls,
)
from rlightning.buffer.utils.utils import (
    default_compute_gae,
    default_env_ret_preprocess_fn,
    default_gae_no_loop,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.types import EnvRet, PolicyResponse

BOX = gym.spaces.Box(-1, 1, (2, 3), np.float32)


def test_identity_preprocessors() -> None:
    value = object()
    assert default_obs_preprocessor(value) is default_reward_preprocessor(value) is value


def test_an_env_ret_is_written_into_the_dict() -> None:
    env_ret = EnvRet("env", 3, last_reward=2.0, _extra={"mass": 5})
    data = {"kept": 1}
    result = default_env_ret_preprocess_fn(data, env_ret, lambda o: o * 10, lambda r: r * 100)
    assert result is data
    assert (data["kept"], data["observation"], data["last_reward"]) == (1, 30, 200.0)  # type: ignore[comparison-overlap]
    assert data["mass"] == 5
    assert "env_id" not in data
    assert env_ret.observation == 3
    with pytest.raises(TypeError, match="EnvRet"):
        default_env_ret_preprocess_fn({}, {"observation": 1}, lambda o: o, lambda r: r)  # type: ignore[arg-type]


def test_a_response_is_written_into_the_dict() -> None:
    data: dict[str, Any] = {"observation": 1}
    response = PolicyResponse("env", action=2, value=0.5)
    assert default_policy_resp_preprocess_fn(data, response) is data
    assert data == {"observation": 1, "action": 2, "value": 0.5}
    with pytest.raises(TypeError, match="PolicyResponse"):
        default_policy_resp_preprocess_fn({}, {"action": 2})  # type: ignore[arg-type]


def test_the_default_preprocess_function() -> None:
    env_ret, response = EnvRet("env", 1), PolicyResponse("env", action=2)
    with pytest.raises(ValueError, match="At least one of env_ret or policy_resp"):
        default_preprocess_fn({})
    with pytest.raises(ValueError, match="Mismatched env_id"):
        default_preprocess_fn({}, env_ret, PolicyResponse("else", action=2))
    assert list(default_preprocess_fn({}, env_ret, response))[-1] == "action"
    assert default_preprocess_fn({}, None, response) == {"action": 2}
    assert "action" not in default_preprocess_fn({}, env_ret)


def steps(count: int = 4) -> dict[str, Any]:
    return {
        "observation": [np.full(2, t, np.float32) for t in range(count)],
        "last_reward": [float(t) for t in range(count)],
        "last_terminated": [t == count - 1 for t in range(count)],
        "last_truncated": [False] * count,
        "info": [{}] * count,
        "mutual_info": [np.float32(t) for t in range(count)],
        "action": [np.int64(t) for t in range(count)],
    }


def test_the_default_postprocess_function_shifts() -> None:
    columns = default_postprocess_fn(steps())
    assert {len(column) for column in columns.values()} == {3}
    assert columns["observation"][:, 0].tolist() == [0, 1, 2]
    assert columns["next_observation"][:, 0].tolist() == [1, 2, 3]
    assert columns["reward"].tolist() == [1, 2, 3]
    assert columns["terminated"].tolist() == [False, False, True]
    assert columns["action"].tolist() == [0, 1, 2]
    assert "mutual_info" in columns
    assert "info" not in columns


def test_the_default_postprocess_function_stores_a_field_of_the_step_before_twice() -> None:
    episode = {
        **steps(),
        "last_cost": [10, 11, 12, 13],
        "last_action": [5, 6, 7, 8],
        "last_": [0] * 4,
    }
    columns = default_postprocess_fn(episode)
    assert columns["last_cost"].tolist() == [10, 11, 12]
    assert columns["cost"].tolist() == [11, 12, 13]
    assert columns["action"].tolist() == [0, 1, 2]  # the policy's
    assert columns["last_action"].tolist() == [5, 6, 7]
    assert "" not in columns


def test_the_default_postprocess_function_keeps_nesting() -> None:
    episode = steps()
    episode["observation"] = [{"a": np.full(2, t), "b": (t,)} for t in range(4)]
    columns = default_postprocess_fn(episode)
    assert columns["observation"]["a"][:, 0].tolist() == [0, 1, 2]
    assert columns["next_observation"]["b"][0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_steps_ahead(n: int) -> None:
    columns = n_step_postprocess_fn(n, gamma=0.5)(steps(5))
    for t in range(4):
        last = min(t + n, 4)
        reward = sum(0.5**k * (t + 1 + k) for k in range(last - t))
        assert columns["reward"][t] == pytest.approx(reward)
        assert columns["next_observation"][t, 0] == last
        assert columns["terminated"][t] == (last == 4)
        assert columns["discount"][t] == pytest.approx(0.5 ** (last - t))
    with pytest.raises(ValueError, match="n: expected"):
        n_step_postprocess_fn(0)


def advantages(kind: str) -> list[Any]:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(13, 4)) for _ in range(3)] + [rng.random((13, 4)) < 0.2]
    if kind == "tensor":
        return [torch.from_numpy(array) for array in arrays]
    if kind == "float":
        arrays[3] = arrays[3].astype(np.float64)
    return arrays


def reference(rewards: Any, values: Any, next_values: Any, dones: Any) -> Any:
    result, later = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        keep = 1 - dones[t].astype(float)
        delta = rewards[t] + 0.9 * next_values[t] * keep - values[t]
        later = result[t] = delta + 0.9 * 0.8 * keep * later
    return result


@pytest.mark.parametrize("function", [default_compute_gae, default_gae_no_loop])
@pytest.mark.parametrize("kind", ["array", "float", "tensor"])
def test_advantages(function: Any, kind: str) -> None:
    arrays = advantages(kind)
    before = [np.asarray(array).copy() for array in arrays]
    expected = reference(*before)
    result, returns = function(*arrays, 0.9, 0.8, normalize_adv=False)
    np.testing.assert_allclose(np.asarray(result), expected)
    np.testing.assert_allclose(np.asarray(returns), expected + before[1])
    normal, same = function(*arrays, 0.9, 0.8)
    np.testing.assert_allclose(
        np.asarray(normal), (expected - expected.mean()) / (expected.std(ddof=1) + 1e-8)
    )
    np.testing.assert_allclose(np.asarray(same), expected + before[1])
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(np.asarray(array), old)


def test_preprocessors_by_space() -> None:
    assert get_preprocessor_cls(BOX) is BoxFlattenPreprocessor
    assert get_preprocessor_cls(gym.spaces.Discrete(3)) is DiscretePreprocessor
    assert get_preprocessor_cls(gym.spaces.MultiBinary(3)) is NonPreprocessor


def test_a_preprocessor_wants_an_array_a_tensor_or_a_dict() -> None:
    keep = NonPreprocessor(BOX)
    assert keep.shape == (2, 3)
    for value in (np.zeros((2, 3)), {"a": 1}):
        assert keep(value) is value
    with pytest.raises(AssertionError):
        keep([1, 2])


def test_boxes_are_flattened() -> None:
    flat = BoxFlattenPreprocessor(BOX)
    assert flat.shape == (6,)
    assert flat(np.zeros((2, 3))).shape == (6,)
    assert flat.batch_transform(np.zeros((4, 2, 3))).shape == (4, 6)
    assert flat.batch_transform((np.zeros((2, 3)),) * 4).shape == (4, 6)
    with pytest.raises(AssertionError):
        BoxFlattenPreprocessor(gym.spaces.Discrete(2))


def test_discrete_values_become_one_hot() -> None:
    one_hot = DiscretePreprocessor(gym.spaces.Discrete(3))
    assert one_hot.shape == (3,)
    assert one_hot(np.array(1)).tolist() == [0, 1, 0]
    assert one_hot.batch_transform((np.array(0), np.array(2))).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert isinstance(one_hot(torch.tensor(2)), torch.Tensor)
    with pytest.raises(AssertionError):
        DiscretePreprocessor(BOX)


def test_what_an_env_gets_of_a_response() -> None:
    action = object()
    assert default_env_preprocess_fn(PolicyResponse("env", action=action)) is action
