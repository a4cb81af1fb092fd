from __future__ import annotations

import copy
import pickle
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlightning.types import (
    ActionSource,
    EnvRet,
    MultiAgentEnvRet,
    PolicyResponse,
    Processed_EnvRet_fields,
)

DATA = ("observation", "last_reward", "last_terminated", "last_truncated", "info")


def test_defaults_are_those_documented():
    before = time.time_ns()
    env_ret = EnvRet("a", 1)
    assert (env_ret.last_reward, env_ret.last_terminated, env_ret.last_truncated) == (
        0.0,
        False,
        False,
    )
    assert env_ret.info == env_ret._extra == {}
    assert before <= env_ret.ts_env_sent_ns <= time.time_ns()


def test_documented_fields_can_be_given_by_position():
    env_ret = EnvRet("a", 1, 2.0, True, False, {"i": 1}, {"e": 2}, 7)
    assert env_ret.info == {"i": 1}
    assert env_ret._extra == {"e": 2}
    assert env_ret.ts_env_sent_ns == 7


def test_two_returns_share_no_dict():
    assert EnvRet("a", 1).info is not EnvRet("a", 1).info


def test_fields_and_defaults_name_the_data_only():
    assert EnvRet.fields() == DATA
    assert EnvRet.get_defaults() == {
        "last_reward": 0.0,
        "last_terminated": False,
        "last_truncated": False,
    }
    assert MultiAgentEnvRet.fields() == DATA


def test_processed_fields_are_those_documented():
    assert Processed_EnvRet_fields == (
        "next_observation",
        "reward",
        "terminated",
        "truncated",
        "info",
    )


def test_last_info_is_info_and_cannot_be_set():
    env_ret = EnvRet("a", 1, info={"k": 1})
    assert env_ret.last_info is env_ret.info
    with pytest.raises(AttributeError):
        env_ret.last_info = {}


def test_to_dict_holds_the_fields_then_the_extras():
    observation = np.zeros(3)
    result = EnvRet("a", observation, _extra={"goal": 1}, episode_id=np.arange(1)).to_dict()
    assert tuple(result) == (*DATA, "goal")
    assert result["observation"] is observation


def test_to_dict_refuses_an_extra_with_the_name_of_a_field():
    with pytest.raises(KeyError, match="last_reward"):
        EnvRet("a", 1, _extra={"last_reward": 1}).to_dict()


@pytest.mark.parametrize("name", ["env_id", "ts_env_sent_ns"])
def test_to_dict_takes_an_extra_with_the_name_of_metadata(name):
    assert EnvRet("a", 1, _extra={name: 5}).to_dict()[name] == 5


def test_mark_env_sent_stamps_and_returns_itself():
    env_ret = EnvRet("a", 1, ts_env_sent_ns=0)
    before = time.time_ns()
    assert env_ret.mark_env_sent() is env_ret
    assert before <= env_ret.ts_env_sent_ns <= time.time_ns()


def test_latency_is_in_seconds_since_the_stamp():
    env_ret = EnvRet("a", 1, ts_env_sent_ns=1_000_000_000)
    assert env_ret.compute_sent_latency(3_500_000_000) == 2.5
    assert env_ret.compute_sent_latency(0) == 0.0
    assert env_ret.compute_sent_latency() > 0


@pytest.mark.parametrize("stamp", [None, "x", float("inf")])
def test_latency_without_a_valid_stamp_is_zero(stamp):
    assert EnvRet("a", 1, ts_env_sent_ns=stamp).compute_sent_latency(5) == 0.0


def test_latency_until_something_that_is_no_time_is_an_error():
    with pytest.raises(TypeError):
        EnvRet("a", 1).compute_sent_latency("now")


@pytest.mark.parametrize("kind", [EnvRet, MultiAgentEnvRet])
def test_the_corrected_latency_goes_by_the_monotonic_clock_and_stays_in_its_process(kind):
    env_ret = kind("a", np.zeros(1))
    assert (env_ret.corrected_latency(), env_ret.left_ns) == (None, 0)
    before = time.monotonic_ns()
    env_ret.mark_env_sent()
    assert before <= env_ret.left_ns <= time.monotonic_ns()
    env_ret.ts_env_sent_ns = 2**62  # a wall clock that is far ahead
    assert env_ret.corrected_latency(env_ret.left_ns + 10**9) == (1.0, 0.0)
    assert env_ret.cpu().left_ns == env_ret.left_ns
    # What is a moment of this clock is none of another process's, nor part of what it says.
    elsewhere = copy.copy(env_ret)  # made as by pickling
    assert (elsewhere.corrected_latency(), elsewhere.left_ns) == (None, 0)
    assert elsewhere == env_ret
    assert "_left" not in repr(env_ret)
    # Of what came from a server: when that server sent it, as far as its clock is known.
    env_ret.mark_left(lambda: (10**9, 4_000_000))
    assert env_ret.corrected_latency(3 * 10**9) == (2.0, pytest.approx(0.004))
    assert env_ret.left_ns == 0
    assert env_ret.mark_left(lambda: None).corrected_latency() is None


@dataclass(slots=True)
class Slotted(EnvRet):
    extra: int = 3


class SlottedResponse(PolicyResponse):
    __slots__ = ("extra",)


@pytest.mark.parametrize("made_again", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", [Slotted, SlottedResponse])
def test_slots_of_a_subclass_travel_and_the_moment_it_left_does_not(kind, made_again):
    sent = kind("a", observation=1)
    sent.extra = 9
    sent.mark_left((10**9, 0))
    elsewhere = made_again(sent)
    assert (elsewhere.env_id, elsewhere.observation, elsewhere.extra) == ("a", 1, 9)
    assert elsewhere.corrected_latency() is None


@pytest.mark.parametrize("kind", [EnvRet, MultiAgentEnvRet])
def test_hash_is_that_of_the_id(kind):
    assert hash(kind("a", np.zeros(3))) == hash("a")


def test_equality_is_by_value_and_class():
    assert EnvRet("a", 1, ts_env_sent_ns=5) == EnvRet("a", 1, ts_env_sent_ns=5)
    assert EnvRet("a", 1, ts_env_sent_ns=5) != EnvRet("a", 2, ts_env_sent_ns=5)
    assert EnvRet("a", 1, ts_env_sent_ns=5) != MultiAgentEnvRet("a", 1, ts_env_sent_ns=5)


def test_multi_agent_defaults_are_scalars_and_dicts_are_kept():
    assert MultiAgentEnvRet("a", {}).last_reward == 0.0
    assert MultiAgentEnvRet("a", {}, {"x": 1.0}).last_reward == {"x": 1.0}


@pytest.mark.parametrize("kind", [EnvRet, MultiAgentEnvRet])
def test_conversions_make_a_new_return_and_leave_the_old_one(kind):
    env_ret = kind(
        "a",
        {"x": [np.ones(2)]},
        np.ones(2),
        info={"n": np.zeros(1)},
        _extra={"g": (np.zeros(1),)},
        ts_env_sent_ns=5,
        executed_action=np.zeros(2),
        episode_id=np.arange(2),
    )
    moved = env_ret.cpu()
    assert type(moved) is kind
    assert moved.ts_env_sent_ns == 5
    for leaf in (
        moved.observation["x"][0],
        moved.last_reward,
        moved.info["n"],
        moved._extra["g"][0],
        moved.executed_action,
    ):
        assert isinstance(leaf, torch.Tensor)
    assert isinstance(moved.episode_id, np.ndarray)  # numbers of rows are not data
    assert isinstance(env_ret.observation["x"][0], np.ndarray)
    back = moved.numpy()
    assert isinstance(back.observation["x"][0], np.ndarray)
    assert isinstance(moved.observation["x"][0], torch.Tensor)


def test_cuda_means_the_current_device_unless_one_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "rlightning.types.env_rets.to_device", lambda data, device: asked.append(device)
    )
    EnvRet("a", 1).cuda()
    assert set(asked) == {"cuda"}
    asked.clear()
    EnvRet("a", 1).cuda(0)
    assert set(asked) == {0}


def test_row_ids_are_the_rows_if_given():
    env_ret = EnvRet("a", np.zeros((2, 4)), rows=np.array([3, 7], np.int32))
    assert env_ret.row_ids() == (3, 7)


def test_row_ids_count_the_episodes_or_the_leading_dimension():
    assert EnvRet("a", 1.0, episode_id=np.array([9, 9, 9])).row_ids() == (0, 1, 2)
    assert EnvRet("a", {"text": "go", "x": (None, np.zeros((2, 4)))}).row_ids() == (0, 1)


def test_row_ids_of_a_scalar_observation_are_an_error():
    with pytest.raises(ValueError, match="'a': the observation has no leading dimension"):
        EnvRet("a", {"x": np.float32(1)}).row_ids()


def test_copies_are_equal():
    env_ret = EnvRet("a", [1, 2], executed_action=3, action_source=ActionSource.HUMAN)
    assert copy.deepcopy(env_ret) == env_ret


def test_action_sources_have_the_numbers_of_the_wire():
    from rlightning.v1 import env_ret_pb2

    for source in ActionSource:
        assert env_ret_pb2.ActionSource.Value(f"ACTION_SOURCE_{source.name}") == source
    assert len(ActionSource) == len(env_ret_pb2.ActionSource.keys()) - 1
