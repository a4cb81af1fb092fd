"""A policy in this process: specs, versions, swaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import (
    InvalidRequestError,
    NotFoundError,
    PolicyError,
    PreconditionError,
    UnavailableError,
)
from rlightning.policy import LocalPolicy, PolicyHost, build_policy, policy_weights
from rlightning.policy.weight_store import Weights, WeightStore
from rlightning.policy.weights import dump_weights
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import PolicyConfig
from tests.unit.policy.policies import VECTOR, Echo, env_ret, meta

FRESH = {"device": "cpu", "seed": 1, "initial_weights": "random"}


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[PolicyHost]:
    host = PolicyHost(PolicyConfig(**{**FRESH, **config}))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def fresh(version: int, *, seed: int = 0, **config: Any) -> Weights:
    policy = build_policy(PolicyConfig(device="cpu", seed=seed, **config), "train")
    policy.init_train(env_meta=meta())
    return Weights.of(version, dump_weights(policy_weights(policy)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_on_cuda_is_a_batch_put_together_beside_another_one(device: str) -> None:
    assert not PolicyHost(PolicyConfig(device=device)).batcher._gathers_ahead


async def test_it_is_warmed_up_with_few_rows_where_they_are_large() -> None:
    space = gym.spaces.Box(0, 255, (1000, 1000), np.uint8)
    with patch("rlightning.policy.host.PolicyRunner.warm_up") as warm_up:
        async with running(model_cfg={"hidden": [1]}) as host:
            await host.open_group(EnvMeta("a", gym.spaces.Discrete(2), space, 2**20))
    warm_up.assert_called_once_with(16)


async def test_who_opens_first_waits_for_what_the_first_inferences_cost_and_no_request_does() -> (
    None
):
    class Cold(Echo):
        def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
            super().construct_network(env_meta, **kwargs)
            self.sizes: list[int] = []

        def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
            self.sizes.append(len(env_ret.observation))
            return super().rollout_step(env_ret)

    with patch("rlightning.policy.host.build_policy", Cold):
        async with running() as host:
            await host.open_group(meta(6))
            sizes = host._policy.sizes  # type: ignore[attr-defined]
            assert sizes == [6] * 3
            await host.open_group(meta(2))
            await host.enqueue(env_ret(6), Mode.EXPLORE).wait()
            assert sizes == [6] * 4


async def test_requests_of_zeros_go_the_way_of_real_ones_and_count_nowhere() -> None:
    async with running(type="tests.unit.policy.policies:Echo") as host:
        seen: list[EnvRet] = []

        async def rehearse(zeros: EnvRet) -> None:
            seen.append(zeros)
            await host.enqueue(zeros, Mode.EXPLORE).wait()
            host._policy.fails = ValueError("no zeros")  # type: ignore[attr-defined]
            await host.enqueue(zeros, Mode.EXPLORE).wait()

        await host.open_group(meta(3), rehearse=rehearse)
        host._policy.fails = None  # type: ignore[attr-defined]
        await host.open_group(meta(2), rehearse=rehearse)
        (zeros,) = seen  # of the first group
        np.testing.assert_array_equal(zeros.observation, np.zeros((3, 4), np.float32))
        assert host.describe()["latency"]["inference"]["count"] == 0
        await host.enqueue(env_ret(3), Mode.EXPLORE).wait()
        stats = host.batcher.stats
        assert (stats.requests, stats.rows, stats.errors) == (1, 3, 0)


async def test_a_local_policy_answers_with_versions() -> None:
    async with running() as host:
        policy = LocalPolicy(host, meta(8))
        await policy.start()
        response = await policy.act(env_ret(8))
        assert response.action.shape == (8,)
        assert (response.policy_version, response.seq) == (0, 1)
        assert response.ts_policy_sent_ns > 0
        await host.publish(fresh(4))
        response = await policy.act(env_ret(8), mode=Mode.EXPLOIT)
        assert (response.policy_version, response.seq, host.version) == (4, 2, 4)
        await policy.close()


@pytest.mark.parametrize("rows", [2, 7, 64])
async def test_rows_are_answered_the_same_whatever_shares_the_batch(rows: int) -> None:
    async with running() as host:
        await host.open_group(meta(rows))
        whole = env_ret(rows)
        together, _ = await host.enqueue(whole, Mode.EXPLOIT).wait()
        for i in range(rows):
            one = EnvRet("one", whole.observation[i : i + 1])
            alone, _ = await host.enqueue(one, Mode.EXPLOIT).wait()
            assert alone.action[0] == together.action[i]
            np.testing.assert_allclose(alone.log_prob[0], together.log_prob[i], atol=1e-5)
            np.testing.assert_allclose(alone.value[0], together.value[i], atol=1e-5)


async def test_other_spaces_are_refused_with_what_differs() -> None:
    async with running() as host:
        await host.open_group(meta(8))
        await host.open_group(meta(2))  # the rows of a group are its own affair
        other = meta(8, observation=gym.spaces.Box(-1, 1, (5,), np.float32))
        with pytest.raises(
            PreconditionError, match=r"observation_space.shape: expected \(4,\), got \(5,\)"
        ):
            await host.open_group(other)
    async with running() as host:
        with pytest.raises(PreconditionError, match="no observation space"):
            await host.open_group(EnvMeta("a"))


async def test_an_observation_outside_the_spec_is_refused_and_the_next_is_answered() -> None:
    async with running() as host:
        with pytest.raises(PolicyError, match="no group is open"):
            host.enqueue(env_ret(), Mode.EXPLORE)
        await host.open_group(meta())
        with pytest.raises(InvalidRequestError, match="observation: expected float32"):
            host.enqueue(EnvRet("a", np.zeros((1, 5), np.float32)), Mode.EXPLORE)
        await host.enqueue(env_ret(), Mode.EXPLORE).wait()


async def test_weights_published_before_the_network_are_used_from_the_first_answer() -> None:
    async with running() as host:
        with pytest.raises(NotFoundError, match="no weights were published"):
            _ = host.weights
        weights = fresh(3)
        await host.publish(weights)
        assert (host.version, host.weights) == (3, weights)
        await host.open_group(meta())
        response, _ = await host.enqueue(env_ret(), Mode.EXPLOIT).wait()
        assert response.policy_version == 3


async def test_weights_that_do_not_fit_the_network_are_refused_with_what_differs() -> None:
    wrong = fresh(2, model_cfg={"hidden": [32], "activation": "tanh"})
    async with running() as host:
        await host.open_group(meta())
        await host.publish(fresh(1))
        before = host._policy.get_param_fingerprint()
        with pytest.raises(
            InvalidRequestError,
            match=r"actor.1.weight: expected float32\[64, 4\], got float32\[32, 4\]",
        ):
            await host.publish(wrong)
        with pytest.raises(InvalidRequestError, match="not a safetensors file"):
            await host.publish(Weights.of(2, b"garbage"))
        response, _ = await host.enqueue(env_ret(), Mode.EXPLORE).wait()
        assert response.policy_version == host.version == 1
        assert host._policy.get_param_fingerprint() == before
    async with running() as host:
        await host.publish(wrong)
        with pytest.raises(PreconditionError, match=r"version 2: .*actor.1.weight"):
            await host.open_group(meta())
        await host.publish(fresh(3))
        await host.open_group(meta())


async def test_versions_only_grow() -> None:
    async with running() as host:
        await host.open_group(meta())
        five = fresh(5)
        await host.publish(five)
        await host.publish(five)  # again: accepted
        for weights in (fresh(5, seed=7), fresh(4)):
            with pytest.raises(PreconditionError, match="version 5 is in use, version"):
                await host.publish(weights)
        with pytest.raises(InvalidRequestError, match="count from 1"):
            await host.publish(fresh(0))


async def test_a_group_waits_for_the_version_it_needs() -> None:
    async with running() as host:
        with pytest.raises(
            UnavailableError, match="version 2 of the weights was asked for, 0 is in use"
        ):
            await host.open_group(meta(), min_version=2, timeout_s=0.01)
        waiting = asyncio.ensure_future(host.open_group(meta(), min_version=2, timeout_s=10))
        await asyncio.sleep(0)
        await host.publish(fresh(1))
        assert not waiting.done()
        await host.publish(fresh(2))
        await waiting


async def test_without_initial_weights_nobody_acts_before_the_first_publish() -> None:
    async with running(initial_weights="none") as host:
        ready = asyncio.ensure_future(host.ready())
        with pytest.raises(UnavailableError, match="version 1 of the weights was asked for"):
            await host.open_group(meta(), timeout_s=0.01)
        assert not ready.done()
        await host.publish(fresh(1))
        await ready
        await host.open_group(meta())


async def test_published_weights_outlive_the_process(tmp_path: Path) -> None:
    async with running(state_dir=str(tmp_path)) as host:
        await host.publish(fresh(6))
        expected = host.weights
    async with running(state_dir=str(tmp_path), initial_weights="none") as host:
        await host.ready()
        assert host.weights == expected
        await host.open_group(meta())
        response, _ = await host.enqueue(env_ret(), Mode.EXPLORE).wait()
        assert response.policy_version == 6


async def test_weights_are_kept_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: WeightStore, weights: Weights) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WeightStore, "save", full)
    async with running(state_dir=str(tmp_path)) as host:
        await host.open_group(meta())
        with pytest.raises(PolicyError, match=r"policy.state_dir: No space left"):
            await host.publish(fresh(1))
        response, _ = await host.enqueue(env_ret(), Mode.EXPLORE).wait()
        assert response.policy_version == host.version == 0


async def test_a_publisher_that_goes_away_leaves_no_half_swap() -> None:
    async with running() as host:
        await host.open_group(meta())
        publishing = asyncio.ensure_future(host.publish(fresh(1)))
        await asyncio.sleep(0)
        publishing.cancel()
        await host.wait_for_version(1, 10)
        response, _ = await host.enqueue(env_ret(), Mode.EXPLORE).wait()
        assert response.policy_version == 1


async def test_no_answer_mixes_two_versions() -> None:
    kind = "tests.unit.policy.policies:Versioned"
    async with running(type=kind) as host:
        space = gym.spaces.Box(-1, 1, (1,), np.float32)
        await host.open_group(meta(observation=space))
        names = list(policy_weights(host._policy))

        async def publish() -> None:
            for version in range(1, 40):
                tensors = {
                    name: torch.full_like(t, float(version))
                    for name, t in policy_weights(host._policy).items()
                }
                await host.publish(Weights.of(version, dump_weights(tensors)))

        publishing = asyncio.ensure_future(publish())
        last = 0
        ret = EnvRet("a", np.zeros((1, 1), np.float32))
        while not publishing.done():
            response, _ = await host.enqueue(ret, Mode.EXPLORE).wait()
            if response.policy_version:
                assert response.action[0] == response.other[0] == response.policy_version
            assert response.policy_version >= last
            last = response.policy_version
            await asyncio.sleep(0)
        await publishing
        assert len(names) == 4


async def test_a_policy_that_fails_on_zeros_still_opens(caplog: pytest.LogCaptureFixture) -> None:
    async with running(type="tests.unit.policy.policies:Echo") as host:
        host._policy.fails = ValueError("division by zero")  # type: ignore[attr-defined]
        await host.open_group(meta())
        assert "warming up with zeros failed" in caplog.text
        host._policy.fails = None  # type: ignore[attr-defined]
        await host.enqueue(env_ret(), Mode.EXPLORE).wait()


async def test_a_network_that_cannot_be_made_is_told_to_who_opens() -> None:
    async with running(type="tests.unit.policy.policies:Echo") as host:
        with patch.object(Echo, "construct_network", side_effect=RuntimeError("no camera")):
            with pytest.raises(PolicyError, match="Echo.init_eval failed: RuntimeError: no camera"):
                await host.open_group(meta())
        await host.open_group(meta())
        await host.enqueue(env_ret(), Mode.EXPLORE).wait()


async def test_spaces_without_a_shape_need_no_warm_up() -> None:
    words = gym.spaces.Dict({"vector": VECTOR, "say": gym.spaces.Text(9)})
    async with running(type="tests.unit.policy.policies:Echo") as host:
        await host.open_group(meta(observation=words))
        observation = {"vector": np.zeros((2, 4), np.float32), "say": ("left", "right")}
        response, _ = await host.enqueue(EnvRet("a", observation), Mode.EXPLORE).wait()
        assert response.action["say"] == ["left", "right"]
