"""What every policy offers, and the contract of `rollout_step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError, InvalidRequestError, PolicyError
from rlightning.policy import (
    ActorCriticPolicy,
    BasePolicy,
    PolicyRole,
    build_policy,
    policy_weights,
)
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.weights import load_weights, parse_weights
from rlightning.types import EnvMeta, EnvRet, Mode, MultiAgentPolicyResponse, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig, TrainConfig
from tests.unit.policy.policies import VECTOR, Echo, env_ret, meta


def make(**config: Any) -> Echo:
    policy = Echo(PolicyConfig(**config), "eval")
    policy.init_eval(env_meta=meta())
    return policy


def run(policy: BasePolicy, *rets: EnvRet, mode: Mode = Mode.EXPLORE) -> list[PolicyResponse]:
    layout = InputLayout(VECTOR)
    parts = [Part(ret.env_id, *layout.flatten(ret)) for ret in rets]
    return Inference(policy, layout).run(parts, mode)


def test_a_role_is_train_or_eval() -> None:
    assert Echo(PolicyConfig(), PolicyRole.TRAIN).role is PolicyRole.TRAIN
    assert Echo(PolicyConfig(), "eval").role is PolicyRole.EVAL
    with pytest.raises(ValueError, match="both"):
        Echo(PolicyConfig(), "both")


def test_the_device_comes_from_the_config() -> None:
    assert make(device="cpu").device.type == "cpu"
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert make().device.type == expected
    with pytest.raises(ConfigError, match="not a torch device: 'gpu'"):
        make(device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'cuda:0', but torch finds no CUDA"):
        make(device="cuda:0")


def test_init_makes_the_network_and_its_optimizer() -> None:
    policy = Echo(PolicyConfig(optim_cfg=Config(betas=[0.9, 0.95])), "train")
    assert not policy.is_initialized
    with pytest.raises(PolicyError, match="env_meta"):
        policy.init_train(TrainConfig())
    given: list[Config] = []
    policy.setup_optimizer = given.append  # type: ignore[method-assign]
    policy.init_train(TrainConfig(lr=0.5), meta())
    assert policy.is_initialized
    assert policy.net.training
    assert given[0].to_dict() == {"lr": 0.5, "betas": [0.9, 0.95]}
    policy.init_eval(Config(depth=3), meta())
    assert policy.made_with == {"depth": 3}
    assert not policy.net.training


def test_what_a_policy_does_not_do_says_so() -> None:
    policy = make()
    with pytest.raises(NotImplementedError, match="Echo does not train itself"):
        policy.train()
    with pytest.raises(NotImplementedError, match="Echo does not train itself"):
        policy.update_dataset([])
    response = PolicyResponse("a", action=1)
    assert policy.postprocess(None, response) is response


def test_weights_have_flat_names_and_a_fingerprint(tmp_path: Path) -> None:
    policy, other = make(), make()
    weights = policy_weights(policy)
    assert list(weights) == ["net.weight", "net.bias"]
    policy.save_checkpoint(tmp_path / "deep" / "weights.safetensors")
    load_weights(other, parse_weights((tmp_path / "deep" / "weights.safetensors").read_bytes()))
    fingerprint = other.get_param_fingerprint()
    assert fingerprint == policy.get_param_fingerprint()
    assert fingerprint["net.bias"] == pytest.approx(float(policy.net.bias.detach().norm()))


def test_weights_that_were_received_are_used_when_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained, acting = make(), make()
    trained.net.bias.data.fill_(7.0)
    acting.receive_weights(policy_weights(trained), 3)
    trained.net.bias.data.fill_(8.0)
    assert acting.wait_for_weight_update_done()
    assert acting.get_param_fingerprint()["net.bias"] != pytest.approx(7 * 2**0.5)
    assert acting.weights_version == 0
    acting.notify_update_weights()
    assert acting.wait_for_weight_update_done(timeout=0)
    assert acting.get_param_fingerprint()["net.bias"] == pytest.approx(7 * 2**0.5)
    assert acting.weights_version == 3
    with pytest.raises(InvalidRequestError, match="net.bias: missing"):
        acting.receive_weights({"net.weight": trained.net.weight}, 4)
    assert (acting.get_num_requests(), acting.check_idle()) == (0, True)
    acting.latency.record("rollout_step", 0.5)
    with caplog.at_level("DEBUG"):
        acting.print_timing_summary(reset=True)
    assert "policy rollout_step: {'count': 1" in caplog.text
    assert not acting.latency


def test_rollout_step_gets_rows_of_all_groups_and_the_mode() -> None:
    policy = make()
    one, two = env_ret(1, env_id="a"), env_ret(3, env_id="b", seed=1)
    two.last_reward = np.array([1, 2, 3.0])
    first, second = run(policy, one, two, mode=Mode.EXPLOIT)
    assert policy.seen.mode is Mode.EXPLOIT
    assert policy.seen.env_ids == ["a", "b", "b", "b"]
    assert policy.seen.last_terminated.dtype is torch.bool
    assert policy.seen.fields() == EnvRet.fields()
    assert (first.env_id, second.env_id) == ("a", "b")
    np.testing.assert_array_equal(first.action, one.observation)
    np.testing.assert_array_equal(second.action, two.observation)
    assert second.reward_seen.tolist() == [1, 2, 3]


def test_one_row_without_a_leading_dimension_is_answered_without_one() -> None:
    row = EnvRet("a", np.arange(4, dtype=np.float32))
    first, second = run(make(), row, env_ret(2, env_id="b"))
    assert first.action.tolist() == [0, 1, 2, 3]
    assert first.reward_seen.shape == ()
    assert second.action.shape == (2, 4)
    (alone,) = run(make(), row)
    assert alone.action.shape == (4,)


def test_answers_share_no_memory_with_the_next_batch() -> None:
    policy = make()
    inference = Inference(policy, InputLayout(VECTOR))
    layout = InputLayout(VECTOR)
    a, b = env_ret(2, seed=1), env_ret(2, seed=2)
    (kept,) = inference.run([Part("a", *layout.flatten(a))], Mode.EXPLORE)
    inference.run([Part("b", *layout.flatten(b))], Mode.EXPLORE)
    np.testing.assert_array_equal(kept.action, a.observation)
    assert kept.action.flags.writeable


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"action": 1}, "expected a PolicyResponse, got dict"),
        (PolicyResponse("a", action=torch.zeros(3)), r"'action' came as float32\[3\].*the 2 rows"),
        (PolicyResponse("a", action=torch.tensor(1)), r"'action' came as int64\[\]"),
        (
            PolicyResponse("a", action={"arm": np.zeros((1, 2))}),
            r"'action.arm' came as float64\[1, 2\]",
        ),
        (PolicyResponse("a", action=(torch.zeros(2), 1.5)), r"'action\[1\]' came as float"),
        (PolicyResponse("a", action=[1, 2, 3]), "'action' came as list"),
    ],
)
def test_an_answer_without_the_rows_of_the_batch_is_an_error(answer: Any, message: str) -> None:
    policy = make()
    policy.answer = answer
    with pytest.raises(PolicyError, match=message) as caught:
        run(policy, env_ret(2, env_id="robot-7"))
    assert "Echo.rollout_step failed for env 'robot-7'" in str(caught.value)


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (torch.tensor([[0.0], [torch.nan]]), "action"),
        (torch.tensor([[0.0], [torch.nan]], dtype=torch.bfloat16), "action"),
        ({"arm": (torch.zeros(2), np.array([0.0, np.nan]))}, r"action.arm\[1\]"),
    ],
)
def test_an_action_that_is_no_number_is_an_error(action: Any, name: str) -> None:
    policy = Echo(PolicyConfig(device="cpu"), "eval")
    policy.init_eval(env_meta=meta(2))
    policy.answer = PolicyResponse("x", action=action, value=torch.tensor([torch.nan, 0.0]))
    with pytest.raises(PolicyError, match=f"env 'arm-1': '{name}' is NaN, in row 1"):
        run(policy, env_ret(2, env_id="arm-1"))


def test_a_coroutine_is_told_to_be_a_function() -> None:
    class Waiting(Echo):
        async def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:  # type: ignore[override]
            return PolicyResponse("a")

    policy = Waiting(PolicyConfig(), "eval")
    policy.init_eval(env_meta=meta())
    with pytest.raises(PolicyError, match="rollout_step is a coroutine; write it as a function"):
        run(policy, env_ret())


def test_nested_answers_and_lists_are_split_by_rows() -> None:
    policy = make()
    action = {"arm": torch.arange(6).reshape(3, 2), "words": ["a", "b", "c"]}
    policy.answer = MultiAgentPolicyResponse(
        "x", action=action, pair=(np.arange(3), torch.ones(3).bfloat16())
    )
    first, second = run(policy, env_ret(1, env_id="a"), env_ret(2, env_id="b"))
    assert isinstance(first, MultiAgentPolicyResponse)
    assert second.action["arm"].tolist() == [[2, 3], [4, 5]]
    assert second.action["words"] == ["b", "c"]
    assert second.pair[0].tolist() == [1, 2]
    assert second.pair[1].dtype == np.uint16


def test_what_the_policy_raises_names_it_and_the_envs() -> None:
    policy = make()
    policy.fails = ValueError("no hands")
    with pytest.raises(
        PolicyError, match="Echo.rollout_step failed for env 'a', 'b': ValueError: no hands"
    ):
        run(policy, env_ret(env_id="a"), env_ret(env_id="b"))


def test_policies_are_found_by_name_or_module() -> None:
    assert type(build_policy(PolicyConfig(), "eval")) is ActorCriticPolicy
    named = PolicyConfig(type="tests.unit.policy.policies:Echo")
    assert type(build_policy(named, "eval")) is Echo
    for name, message in [
        ("actor_critc", "did you mean actor_critic"),
        ("no_such_module:Policy", "cannot be loaded: ModuleNotFoundError"),
        ("tests.unit.policy.policies:Nothing", "cannot be loaded: AttributeError"),
        ("tests.unit.policy.policies:meta", "no subclass of BasePolicy"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build_policy(PolicyConfig(type=name), "eval")


def test_the_network_of_an_env_without_spaces_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="declares no observation space"):
        ActorCriticPolicy(PolicyConfig(), "eval").init_eval(
            env_meta=EnvMeta("a", gym.spaces.Discrete(2))
        )
