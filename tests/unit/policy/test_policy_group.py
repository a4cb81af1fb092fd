"""Policies in this process, driven by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlightning.errors import InvalidRequestError, PolicyError
from rlightning.policy import BasePolicy, PolicyGroup, policy_weights
from rlightning.policy.routing import LeastLoaded, Sticky
from rlightning.policy.weights import parse_weights
from rlightning.types import BatchedData, EnvRet, Mode, PolicyResponse
from rlightning.utils.builders import build_policy_group
from rlightning.utils.config import ClusterConfig, PolicyConfig, TrainConfig
from tests.unit.policy.policies import Echo, Remembering, env_ret, meta


def make(**workers: int) -> PolicyGroup:
    group = build_policy_group("actor_critic", PolicyConfig(device="cpu"), ClusterConfig(**workers))
    group.init(TrainConfig(), meta())
    return group


@pytest.mark.parametrize("eval_workers", [1, 2, 5])
def test_answers_come_in_order_under_the_ids_that_asked(eval_workers: int) -> None:
    group = make(eval_worker_num=eval_workers)
    rets = [env_ret(n, env_id=f"env-{n}", seed=n) for n in (1, 3, 2)]
    rets.append(EnvRet("single", np.ones(4, np.float32)))
    answers = group.rollout_batch(BatchedData([r.env_id for r in rets], rets), mode=Mode.EXPLOIT)
    assert answers.ids() == ("env-1", "env-3", "env-2", "single")
    assert [r.env_id for r in answers.values()] == list(answers.ids())
    assert [np.shape(r.action) for r in answers.values()] == [(1,), (3,), (2,), ()]
    again = group.rollout_batch(BatchedData(["env-3"], [rets[1]]), mode=Mode.EXPLOIT)
    np.testing.assert_allclose(again["env-3"].value, answers["env-3"].value, atol=1e-5)


def test_acting_policies_have_the_weights_of_the_trained_one(tmp_path: Path) -> None:
    group = make(eval_worker_num=2)
    assert group.verify_eval_weight_consistency()
    group._train_list[0].critic[-1].bias.data.fill_(2.0)  # type: ignore[attr-defined]
    assert not group.verify_eval_weight_consistency()
    group.sync_weights()
    assert group.verify_eval_weight_consistency()
    rets = BatchedData(["env"], [env_ret()])
    assert group.rollout_batch(rets)["env"].policy_version == 2
    group._train_list[0].critic[-1].bias.data.fill_(3.0)  # type: ignore[attr-defined]
    group.send_weights()
    group._train_list[0].critic[-1].bias.data.fill_(2.0)  # type: ignore[attr-defined]
    assert group.verify_eval_weight_consistency()
    group.notify_update_weights()
    assert group.wait_for_eval_weight_update()
    assert not group.verify_eval_weight_consistency()
    assert group.rollout_batch(rets)["env"].policy_version == 3
    group.save_checkpoint(tmp_path / "weights.safetensors")
    saved = parse_weights((tmp_path / "weights.safetensors").read_bytes())
    assert saved["critic.5.bias"].tolist() == [2.0]


def test_training_goes_to_each_policy() -> None:
    class Trainee(Echo):
        def update_dataset(self, data: Any) -> None:
            self.data = data

        def train(self) -> dict[str, float]:
            return {"loss": float(self.data)}

    trainees: list[BasePolicy] = [Trainee(PolicyConfig(), "train") for _ in range(2)]
    group = PolicyGroup(trainees, [], PolicyConfig())
    group.init_train(env_meta=meta())
    group.update_dataset([1, 2])
    assert group.train() == {"loss": 1.0}
    with pytest.raises(ValueError, match="zip"):
        group.update_dataset([1])


def test_postprocess_gets_pairs_or_halves() -> None:
    class Doubler(Echo):
        def postprocess(self, env_ret: Any = None, policy_resp: Any = None) -> Any:
            return (env_ret and env_ret.env_id, policy_resp)

    group = PolicyGroup([], [Doubler(PolicyConfig(), "eval")], PolicyConfig())
    rets = BatchedData(["a"], [env_ret(env_id="a")])
    assert group.postprocess(rets)["a"] == ("a", None)  # type: ignore[index]
    assert group.postprocess(rets, BatchedData(["a"], ["r"]))["a"] == ("a", "r")  # type: ignore[index]
    assert group.postprocess(None, BatchedData(["a"], ["r"]))["a"] == (None, "r")  # type: ignore[index]
    assert group.postprocess() is None


def test_what_is_missing_is_said() -> None:
    group = build_policy_group("actor_critic", PolicyConfig())
    with pytest.raises(PolicyError, match="needs init_eval"):
        group.rollout_batch(BatchedData([], []))
    with pytest.raises(PolicyError, match="env_meta"):
        group.init_eval()
    group.shutdown()
    with pytest.raises(PolicyError, match="no policy of role 'train'"):
        group.sync_weights()
    with pytest.raises(InvalidRequestError, match="observation"):
        make().rollout_batch(BatchedData(["a"], [EnvRet("a", np.zeros(3))]))


def remembering(count: int, **config: Any) -> tuple[PolicyGroup, list[Remembering]]:
    chosen = PolicyConfig(device="cpu", **config)
    policies = [Remembering(chosen, "eval") for _ in range(count)]
    group = PolicyGroup([], policies, chosen)
    group.init_eval(env_meta=meta())
    return group, policies


def test_each_env_keeps_its_state_whichever_others_ask_with_it() -> None:
    group, _ = remembering(2)
    ones = {name: EnvRet(name, np.ones((2, 4), np.float32)) for name in "abc"}

    def totals(names: str, **options: Any) -> list[list[float]]:
        asked = BatchedData(list(names), [ones[name] for name in names])
        return [r.total.tolist() for r in group.rollout_batch(asked, **options).values()]

    assert totals("abc") == [[1, 1]] * 3
    assert totals("b") == [[2, 2]]
    assert totals("cab") == [[2, 2], [2, 2], [3, 3]]
    assert totals("cab", reset_state=True) == [[1, 1]] * 3
    with pytest.raises(PolicyError, match="env 'a' asks twice in one batch"):
        totals("aa")
    group.init_eval(env_meta=meta())
    assert totals("abc") == [[1, 1]] * 3


def test_async_policies_answer_on_threads_and_swap_weights_between_batches() -> None:
    class Blocked(Echo):
        def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
            began.set()
            assert let_go.wait(20)
            return super().rollout_step(env_ret)

    began, let_go = threading.Event(), threading.Event()
    config = PolicyConfig(device="cpu", rollout_mode="async")
    acting = [Blocked(config, "eval"), Echo(config, "eval")]
    group = PolicyGroup([Echo(config, "train")], acting, config)
    group.init(env_meta=meta())
    assert group.check_idle()
    first = group.rollout_batch(BatchedData(["a"], [env_ret(env_id="a")]))
    assert first.is_future
    assert began.wait(20)
    assert group.get_num_requests() == [1, 0]
    assert (acting[0].get_num_requests(), acting[0].check_idle()) == (1, False)
    # The other one has less to do.
    second = group.rollout_batch(BatchedData(["b"], [env_ret(env_id="b")]))
    assert second["b"].result(20).env_id == "b"
    group._train_list[0].net.bias.data.fill_(7.0)  # type: ignore[attr-defined]
    group.sync_weights()
    assert not group.wait_for_eval_weight_update(timeout=0.01)
    assert not acting[0].wait_for_weight_update_done(timeout=0.01)
    assert not first["a"].done()
    let_go.set()
    assert first["a"].result(20).policy_version == 1
    assert group.wait_for_eval_weight_update()
    assert group.verify_eval_weight_consistency()
    assert group.check_idle()
    acting[1].fails = ValueError("no hands")
    refused = group.rollout_batch(BatchedData(["a", "b"], [env_ret(env_id=n) for n in "ab"]))
    assert refused["a"].result(20).policy_version == 2
    with pytest.raises(PolicyError, match="no hands"):
        refused["b"].result(20)
    assert group.check_idle()
    group.shutdown()


def test_routers_balance_or_stay() -> None:
    least, sticky = LeastLoaded(), Sticky()
    assert [least.choose("a", loads) for loads in ([0, 0], [1, 0], [2, 3])] == [0, 1, 0]
    assert [sticky.choose(name, [9, 0]) for name in "abcabc"] == [0, 1, 0, 0, 1, 0]
    config = PolicyConfig(device="cpu", router_type="node_affinity")
    acting = [Echo(config, "eval") for _ in range(2)]
    group = PolicyGroup([], acting, config)
    group.init_eval(env_meta=meta())
    for names in ("ab", "b", "ba"):
        group.rollout_batch(BatchedData(list(names), [env_ret(env_id=n) for n in names]))
    assert (acting[0].seen.env_ids, acting[1].seen.env_ids) == (["a"], ["b"])


def test_weights_are_set_aside_offloaded_and_read_back(tmp_path: Path) -> None:
    group = make()
    trained = group._train_list[0]
    before = trained.get_param_fingerprint()
    group.save_checkpoint(tmp_path / "weights.safetensors")
    group.push("train")
    for tensor in policy_weights(trained).values():
        tensor.data.fill_(1.0)
    group.pop("train")
    assert trained.get_param_fingerprint() == before
    with pytest.raises(PolicyError, match="pop of role 'train' without a push"):
        group.pop("train")
    for tensor in policy_weights(trained).values():
        tensor.data.fill_(1.0)
    group.load_checkpoint(tmp_path / "weights.safetensors")
    assert trained.get_param_fingerprint() == before
    (tmp_path / "weights.safetensors").write_bytes(b"garbage")
    with pytest.raises(InvalidRequestError, match="not a safetensors file"):
        group.load_checkpoint(tmp_path / "weights.safetensors")
    rets = BatchedData(["env"], [env_ret()])
    group.offload("train")
    group.rollout_batch(rets)
    group.offload()
    with pytest.raises(PolicyError, match="offloaded: call reload first"):
        group.rollout_batch(rets)
    group.reload()
    group.rollout_batch(rets)


def test_training_begins_anew_with_a_seed(caplog: pytest.LogCaptureFixture) -> None:
    group = make()
    group.reset_training_state(TrainConfig(), seed=5)
    first = group._train_list[0].get_param_fingerprint()
    group.reset_training_state(TrainConfig(), seed=6)
    assert group._train_list[0].get_param_fingerprint() != first
    group.reset_training_state(TrainConfig(), seed=5)
    assert group._train_list[0].get_param_fingerprint() == first
    with caplog.at_level("DEBUG"):
        group.print_timing_summary(reset=True)
    assert "policy group send_weights: {'count': 1" in caplog.text
    assert not group.latency


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_was_offloaded_comes_back_with_its_optimizer() -> None:
    policy = Echo(PolicyConfig(device="cuda"), "train")
    policy.init_train(env_meta=meta())
    optimizer = policy.optimizer = torch.optim.Adam(policy.net.parameters())  # type: ignore[attr-defined]

    def learn() -> None:
        policy.net(torch.ones(1, 4, device="cuda")).sum().backward()
        optimizer.step()

    learn()
    state = optimizer.state[policy.net.weight]
    on_device = {name: tensor.device.type for name, tensor in state.items()}
    policy.offload()
    assert {tensor.device.type for tensor in (*state.values(), policy.net.weight)} == {"cpu"}
    policy.reload()
    assert {name: tensor.device.type for name, tensor in state.items()} == on_device
    learn()
