"""A `PolicyGroup` whose acting policies are behind policy servers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlightning.errors import PolicyError, UnavailableError
from rlightning.policy import PolicyGroup, build_policy
from rlightning.types import BatchedData, EnvRet, Mode
from rlightning.utils.config import PolicyConfig, TrainConfig
from tests.integration.policy.harness import FRESH, env_ret, policy_server, spec


async def test_a_group_trains_here_and_acts_at_policy_servers() -> None:
    async with policy_server() as one, policy_server(seed=2) as two:
        await asyncio.to_thread(_train_and_act, one.address, two.address)
        assert (one.stats.requests, two.stats.requests) == (4, 2)


def _train_and_act(*addresses: str) -> None:
    config = PolicyConfig(**FRESH)
    trained = build_policy(config, "train")
    group = PolicyGroup([trained], addresses, config)
    with pytest.raises(PolicyError, match="needs init_eval"):
        group.rollout_batch(BatchedData([], []))
    group.init(TrainConfig(), spec())
    assert group.wait_for_eval_weight_update()
    assert group.verify_eval_weight_consistency()
    rets = [env_ret(n, env_id=f"env-{n}", seed=n) for n in (1, 3)]
    rets.append(EnvRet("single", np.ones(4, np.float32)))
    asked = BatchedData([ret.env_id for ret in rets], rets)
    answers = group.rollout_batch(asked, mode=Mode.EXPLOIT)
    assert answers.ids() == ("env-1", "env-3", "single")
    assert [np.shape(r.action) for r in answers.values()] == [(1,), (3,), ()]
    trained.critic[-1].bias.data.fill_(9.0)  # type: ignore[attr-defined]
    assert not group.verify_eval_weight_consistency()
    group.sync_weights()
    assert group.wait_for_eval_weight_update()
    again = group.rollout_batch(asked, mode=Mode.EXPLOIT)
    for before, after in zip(answers.values(), again.values(), strict=True):
        np.testing.assert_allclose(after.value, before.value + 9, atol=1e-4)
        assert after.policy_version == before.policy_version + 1
    assert group.check_idle()
    with pytest.raises(PolicyError, match="env 'env-1' asks twice"):
        group.rollout_batch(BatchedData(["x", "y"], [rets[0], rets[0]]))
    group.shutdown()


def test_a_server_that_is_not_there_is_told_at_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlightning.policy.members.FIND_TIMEOUT_S", 0.3)
    group = PolicyGroup([], ["127.0.0.1:1"], PolicyConfig(**FRESH))
    with pytest.raises(UnavailableError, match="127.0.0.1:1"):
        group.init_eval(env_meta=spec())
    group.shutdown()
