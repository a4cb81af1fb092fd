from __future__ import annotations

import numpy as np
import pytest
import torch

from rlightning.errors import CodecError
from rlightning.types import (
    ActionSource,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
)
from rlightning.v1 import buffer_service_pb2, env_ret_pb2, policy_response_pb2
from rlightning.wire import (
    Batch,
    Writer,
    decode_batch,
    decode_env_ret,
    decode_policy_response,
    encode_batch,
    encode_env_ret,
    encode_policy_response,
    encode_value,
    fill_observation,
)


def make_env_ret(**overrides):
    fields = {
        "env_id": "server/client",
        "observation": np.zeros((3, 4), np.float32),
        "last_reward": np.ones(3, np.float32),
        "last_terminated": np.zeros(3, bool),
        "last_truncated": np.array([False, True, False]),
        "ts_env_sent_ns": 5,
    }
    return EnvRet(**{**fields, **overrides})


def round_trip(env_ret):
    return decode_env_ret(encode_env_ret(env_ret))


def value(item):
    from rlightning.v1.tensor_pb2 import Value

    return Value.FromString(encode_value(item))


def test_a_minimal_return_comes_back_with_its_defaults():
    env_ret = EnvRet("a", [1.0, 2.0], ts_env_sent_ns=0)
    assert round_trip(env_ret) == env_ret


def test_all_fields_come_back():
    env_ret = make_env_ret(
        info={"score": np.array([1.0, 0.0, 2.0]), "_score": np.array([True, False, True])},
        _extra={"goal": "left"},
        executed_action=np.array([0, 1, 0]),
        action_source=np.array([1, 2, 5], np.int8),
        answered_seq=8,
        chunk_index=2,
        ts_observed_ns=9,
        episode_id=np.array([7, 8, 9]),
        step=np.array([0, 1, 2]),
        rows=np.array([1, 4, 6], np.int32),
    )
    back = round_trip(env_ret)
    np.testing.assert_equal(vars(back), vars(env_ret))
    for name in ("action_source", "episode_id", "step", "rows"):
        assert getattr(back, name).dtype == getattr(env_ret, name).dtype
    assert back.row_ids() == (1, 4, 6)


def test_a_multi_agent_return_comes_back_as_one():
    env_ret = MultiAgentEnvRet(
        "a", {"x": 1, "y": 2}, {"x": 1.0, "y": 2.0}, {"x": True, "y": False}, {"x": False}
    )
    back = round_trip(env_ret)
    assert type(back) is MultiAgentEnvRet
    assert back == env_ret


def test_one_action_source_stands_for_all_rows():
    back = round_trip(make_env_ret(action_source=ActionSource.HOLD, episode_id=np.arange(3)))
    assert back.action_source.tolist() == [ActionSource.HOLD]


def test_what_ended_travels_in_fields_of_its_own():
    env_ret = make_env_ret(
        info={
            "score": 1,
            "final_rows": np.array([1]),
            "final_observation": np.full((1, 4), 5.0),
            "final_info": {"episode": {"r": np.array([9.0])}},
        }
    )
    message = env_ret_pb2.EnvRet.FromString(encode_env_ret(env_ret))
    assert list(message.final_rows) == [1]
    assert [entry.key for entry in message.info.map_value.entries] == ["score"]
    back = round_trip(env_ret)
    assert list(back.info) == ["score", "final_rows", "final_observation", "final_info"]
    assert back.info["final_rows"].dtype == np.int32
    np.testing.assert_equal(back.info, env_ret.info)
    assert list(env_ret.info)[1] == "final_rows"  # the sender's dict is as it was


def test_a_policy_gets_observation_reward_and_flags_alone():
    info = {"score": 1, "final_rows": np.array([1]), "final_observation": np.zeros((1, 4))}
    full = make_env_ret(info=info, episode_id=[7, 8, 9], step=[1, 2, 3], answered_seq=4)
    for episodes, expected in ((False, None), (True, [7, 8, 9])):
        message, writer = env_ret_pb2.EnvRet(), Writer()
        fill_observation(message, full, writer, episodes=episodes)
        got = decode_env_ret(writer.finish(message))
        assert (got.env_id, got.info, got.step, got.answered_seq) == (full.env_id, {}, None, 0)
        assert got.ts_env_sent_ns == full.ts_env_sent_ns
        for name in ("observation", "last_reward", "last_terminated", "last_truncated"):
            np.testing.assert_equal(getattr(got, name), getattr(full, name))
        assert got.episode_id is None if expected is None else got.episode_id.tolist() == expected


def test_nothing_ended_means_no_keys():
    info = {"final_rows": np.array([], np.int32), "final_observation": np.zeros((0, 4)), "a": 1}
    assert round_trip(make_env_ret(info=info)).info == {"a": 1}


def test_an_info_without_final_rows_is_an_info_like_any_other():
    assert round_trip(make_env_ret(info={"final_info": 3})).info == {"final_info": 3}


def test_numbers_per_row_may_be_given_as_plain_python():
    back = round_trip(make_env_ret(episode_id=[1, 2, 3], step=(0, 0, 1)))
    assert back.episode_id.tolist() == [1, 2, 3]
    assert back.step.tolist() == [0, 0, 1]
    assert round_trip(make_env_ret(episode_id=4)).episode_id.tolist() == [4]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"env_id": 5}, "env_id"),
        ({"env_id": b"a"}, "env_id"),
        ({"env_id": "\ud800"}, "env_id"),
        ({"observation": {"camera": [object()]}}, "observation.camera[0]"),
        ({"last_reward": object()}, "last_reward"),
        ({"last_terminated": object()}, "last_terminated"),
        ({"last_truncated": object()}, "last_truncated"),
        ({"info": {"x": object()}}, "info.x"),
        ({"info": [1]}, "info"),
        ({"_extra": {"x": object()}}, "extra.x"),
        ({"_extra": 5}, "extra"),
        ({"executed_action": object()}, "executed_action"),
        ({"ts_env_sent_ns": 2**63}, "ts_env_sent_ns"),
        ({"ts_env_sent_ns": "now"}, "ts_env_sent_ns"),
        ({"answered_seq": 1.5}, "answered_seq"),
        ({"chunk_index": 2**31}, "chunk_index"),
        ({"episode_id": np.zeros(3)}, "episode_id"),
        ({"episode_id": np.zeros((3, 1), int)}, "episode_id"),
        ({"episode_id": np.array([2**63], np.uint64)}, "episode_id"),
        ({"rows": np.array([2**31])}, "rows"),
        ({"info": {"final_rows": [0.5]}}, "final_rows"),
        (
            {"info": {"final_rows": [0], "final_observation": [object()]}},
            "final_observation[0]",
        ),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(overrides, path):
    with pytest.raises(CodecError) as caught:
        encode_env_ret(make_env_ret(**overrides))
    assert caught.value.path == path


OBSERVATION = value(1)


@pytest.mark.parametrize(
    ("fields", "path", "error"),
    [
        ({}, "observation", "no value"),
        ({"observation": {}}, "observation", "no value"),
        ({"last_reward": {}}, "last_reward", "no value"),
        ({"info": value(3)}, "info", "expected a map, got a int"),
        ({"extra": value([3])}, "extra", "expected a map, got a list"),
        ({"rows": [1, 1]}, "rows", "ascending"),
        ({"rows": [-1]}, "rows", "ascending"),
        ({"action_source": [0]}, "action_source", "unknown source"),
        ({"action_source": [9]}, "action_source", "unknown source"),
        ({"episode_id": [1, 2], "step": [1]}, "", "numbers of rows differ"),
        ({"rows": [0, 1], "action_source": [1, 1, 1]}, "", "numbers of rows differ"),
        ({"final_rows": [1, 0]}, "final_rows", "ascending"),
        ({"final_rows": [2], "episode_id": [5, 6]}, "final_rows", "row 2 of 2"),
        ({"final_observation": value(1)}, "final_rows", "no row ended"),
        ({"final_rows": [0], "info": value({"final_info": 1})}, "info", "fields of the message"),
        ({"final_rows": [0], "final_info": {}}, "final_info", "no value"),
    ],
)
def test_returns_that_make_no_sense_are_refused(fields, path, error):
    if path != "observation":
        fields = {"observation": OBSERVATION, **fields}
    with pytest.raises(CodecError, match=error) as caught:
        decode_env_ret(env_ret_pb2.EnvRet(**fields).SerializeToString())
    assert caught.value.path == path


def test_a_torch_return_comes_back_as_arrays():
    back = round_trip(make_env_ret().cpu())
    assert isinstance(back.observation, np.ndarray)
    assert isinstance(back.cpu().observation, torch.Tensor)


# PolicyResponse.


def test_a_response_comes_back_with_its_outputs_in_order():
    response = PolicyResponse("a", value=np.zeros(3), action={"x": np.arange(3)})
    back = decode_policy_response(encode_policy_response(response))
    assert list(back.to_dict()) == ["value", "action"]
    np.testing.assert_equal(vars(back), vars(response))
    assert not hasattr(back, "policy_version")
    assert not hasattr(back, "ts_policy_sent_ns")


@pytest.mark.parametrize("version", [0, 7])
def test_version_and_stamp_of_a_response_come_back(version):
    response = MultiAgentPolicyResponse("a", action={"x": 1}).mark_policy_sent()
    response.policy_version = version
    response.seq = 9  # travels beside the message
    back = decode_policy_response(encode_policy_response(response))
    assert type(back) is MultiAgentPolicyResponse
    assert back.policy_version == version
    assert back.ts_policy_sent_ns == response.ts_policy_sent_ns
    assert not hasattr(back, "seq")


@pytest.mark.parametrize(
    ("response", "path"),
    [
        (PolicyResponse(None), "env_id"),
        (PolicyResponse("a", action=object()), "data.action"),
        (PolicyResponse("a", numpy=1), "data"),
        (PolicyResponse("a", policy_version=2**63), "policy_version"),
        (PolicyResponse("a", ts_policy_sent_ns="now"), "ts_policy_sent_ns"),
    ],
)
def test_responses_that_cannot_be_sent_are_refused(response, path):
    with pytest.raises(CodecError) as caught:
        encode_policy_response(response)
    assert caught.value.path == path


@pytest.mark.parametrize("name", ["env_id", "to_dict", "cpu", "__class__", "seq", "policy_version"])
def test_an_output_cannot_replace_what_a_response_is(name):
    message = policy_response_pb2.PolicyResponse(env_id="a", data=value({name: 1}))
    with pytest.raises(CodecError, match=f"may be called .*{name}"):
        decode_policy_response(message.SerializeToString())


def test_a_response_without_outputs_is_refused():
    message = policy_response_pb2.PolicyResponse(env_id="a")
    with pytest.raises(CodecError, match="^data: no value"):
        decode_policy_response(message.SerializeToString())


# Batch.


def test_a_batch_comes_back():
    batch = Batch(3, {"observation": {"x": np.zeros((2, 5))}, "text": ["a"]}, {"env_ids": ["e"]})
    back = decode_batch(encode_batch(batch))
    assert type(back) is Batch
    np.testing.assert_equal(back._asdict(), batch._asdict())


def test_a_batch_needs_columns_but_no_metadata():
    with pytest.raises(CodecError, match="^columns: no value"):
        decode_batch(buffer_service_pb2.Batch(batch_id=1).SerializeToString())
    message = buffer_service_pb2.Batch(columns=value({}))
    assert decode_batch(message.SerializeToString()) == Batch(0, {}, {})


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (Batch("x", {}, {}), "batch_id"),
        (Batch(1, {"a": object()}, {}), "columns.a"),
        (Batch(1, {}, {"a": [object()]}), "metadata.a[0]"),
    ],
)
def test_batches_that_cannot_be_sent_are_refused(batch, path):
    with pytest.raises(CodecError) as caught:
        encode_batch(batch)
    assert caught.value.path == path
