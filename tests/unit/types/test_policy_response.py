from __future__ import annotations

import copy
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.types import MultiAgentPolicyResponse, PolicyResponse


def test_keywords_become_attributes():
    response = PolicyResponse("a", action=1, value=2.0)
    assert (response.env_id, response.action, response.value) == ("a", 1, 2.0)
    response.later = 3
    assert response.to_dict() == {"action": 1, "value": 2.0, "later": 3}


def test_to_dict_is_in_the_order_of_setting_and_without_metadata():
    response = PolicyResponse("a", value=1, action=2).mark_policy_sent()
    response.policy_version = 4
    response.seq = 9
    assert list(response.to_dict()) == ["value", "action"]


def test_fields_are_a_set_of_names_in_order():
    response = PolicyResponse("a", value=1, action=2)
    assert response._fields == {"action", "value"}
    assert list(response._fields) == ["value", "action"]


def test_an_env_stamp_counts_as_data():
    assert "ts_env_sent_ns" in PolicyResponse("a", ts_env_sent_ns=1)._fields


def test_equality_is_by_attributes_and_there_is_no_hash():
    assert PolicyResponse("a", action=1) == PolicyResponse("a", action=1)
    assert PolicyResponse("a", action=1) != PolicyResponse("b", action=1)
    with pytest.raises(TypeError):
        hash(PolicyResponse("a"))


def test_there_is_no_stamp_before_it_is_marked_sent():
    response = PolicyResponse("a")
    assert not hasattr(response, "ts_policy_sent_ns")
    before = time.time_ns()
    assert response.mark_policy_sent() is response
    assert before <= response.ts_policy_sent_ns <= time.time_ns()


def test_latency_is_since_the_env_stamp_else_since_the_policy_stamp():
    response = PolicyResponse("a")
    assert response.compute_sent_latency(10**9) == 0.0
    response.ts_policy_sent_ns = 10**9
    assert response.compute_sent_latency(3 * 10**9) == 2.0
    response.ts_env_sent_ns = 2 * 10**9
    assert response.compute_sent_latency(3 * 10**9) == 1.0
    assert response.compute_sent_latency(0) == 0.0


def test_the_corrected_latency_goes_by_monotonic_clocks_and_says_how_far_it_may_be_off():
    response = PolicyResponse("a", action=1)
    assert response.corrected_latency() is None
    response.ts_policy_sent_ns = 2**62  # a wall clock that is far ahead
    response.mark_left((10**9, 4_000_000))
    assert response.corrected_latency(3 * 10**9) == (2.0, pytest.approx(0.004))
    assert response.copy().corrected_latency(0) == (0.0, pytest.approx(0.004))
    assert response.to_dict() == {"action": 1}
    # What is a moment of this clock is none of another process's.
    assert copy.copy(response).corrected_latency() is None
    # It is none of its values either, and may be asked for when it is needed.
    assert response == copy.copy(response)
    assert "_left" not in repr(response)
    assert response.mark_left(lambda: (10**9, 0)).corrected_latency(2 * 10**9) == (1.0, 0.0)
    assert response.mark_left(lambda: None).corrected_latency() is None
    taken_s, within_s = response.mark_policy_sent().corrected_latency()
    assert (0 <= taken_s < 60, within_s) == (True, 0.0)


@pytest.mark.parametrize(
    "space",
    [gym.spaces.Discrete(3), gym.spaces.Box(0, 1, (2,)), gym.spaces.Dict(a=gym.spaces.Discrete(2))],
)
def test_an_example_acts_within_its_space(space):
    response = PolicyResponse.make_example(space, "a", value=1)
    assert space.contains(response.action)
    assert (response.env_id, response.value) == ("a", 1)
    with pytest.raises(TypeError):
        PolicyResponse.make_example(space, action=1)


@pytest.mark.parametrize("kind", [dict, gym.spaces.Dict])
def test_a_multi_agent_example_acts_for_each_agent(kind):
    spaces = {"x": gym.spaces.Discrete(3), "y": gym.spaces.Box(0, 1, (2,))}
    response = MultiAgentPolicyResponse.make_example(kind(spaces), "a", value=1)
    assert type(response) is MultiAgentPolicyResponse
    assert response.action.keys() == spaces.keys()
    assert all(spaces[agent].contains(action) for agent, action in response.action.items())


def test_conversions_change_the_response_in_place():
    response = PolicyResponse("a", action={"x": np.ones(2)}, value=1.0)
    response.policy_version = 3
    assert response.cpu() is response
    assert isinstance(response.action["x"], torch.Tensor)
    assert response.numpy() is response
    assert isinstance(response.action["x"], np.ndarray)
    assert (response.env_id, response.value, response.policy_version) == ("a", 1.0, 3)


def test_cuda_means_the_current_device_unless_one_is_named(monkeypatch):
    asked = []

    def to_device(data, device):
        asked.append(device)
        return data

    monkeypatch.setattr("rlightning.types.policy_response.to_device", to_device)
    PolicyResponse("a", action=1).cuda().cuda("cuda:1")
    assert asked == ["cuda", "cuda:1"]


def test_a_copy_is_converted_without_the_original():
    response = MultiAgentPolicyResponse("a", action=np.ones(2))
    other = response.copy().cpu()
    assert type(other) is MultiAgentPolicyResponse
    assert isinstance(other.action, torch.Tensor)
    assert isinstance(response.action, np.ndarray)


@pytest.mark.parametrize("kind", [PolicyResponse, MultiAgentPolicyResponse])
def test_deep_copies_are_equal_and_of_the_same_class(kind):
    response = kind("a", action=[1])
    other = copy.deepcopy(response)
    assert type(other) is kind
    assert other == response
    assert other.action is not response.action
