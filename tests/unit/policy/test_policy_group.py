"""Policies in this process, driven by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlightning.errors import InvalidRequestError, PolicyError
from rlightning.policy import BasePolicy, PolicyGroup
from rlightning.policy.weights import parse_weights
from rlightning.types import BatchedData, EnvRet, Mode
from rlightning.utils.builders import build_policy_group
from rlightning.utils.config import ClusterConfig, PolicyConfig, TrainConfig
from tests.unit.policy.policies import Echo, env_ret, meta


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
