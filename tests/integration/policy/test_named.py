"""Several policies on one server, and who may publish to them."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.errors import (
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from rlightning.policy import PolicyClient, PolicyFleet, WeightPublisher
from rlightning.policy.weight_store import Weights, WeightStore
from rlightning.rpc.metrics import Metrics
from rlightning.testing import FaultProxy
from rlightning.types import EnvRet, Mode
from rlightning.utils.config import RpcConfig
from tests.integration.policy.harness import acting, env_ret, policy_server, spec, weights

AWKWARD = "tests.integration.policy.harness:Awkward"


async def test_each_session_is_answered_by_the_policy_that_it_names(tmp_path: Any) -> None:
    frozen = tmp_path / "opponent.safetensors"
    frozen.write_bytes(weights(seed=9))
    named = {"opponent": {"restore": str(frozen)}, "arm": {"type": AWKWARD}}
    arm = spec(1, gym.spaces.Box(-1, 1, (4, 1), np.float32))
    async with (
        policy_server(named=named, state_dir=str(tmp_path / "state")) as server,
        PolicyClient(server.address) as learner,
        acting(server.address, 4) as current,
        acting(server.address, 4, policy="opponent") as opponent,
        acting(server.address, policy="arm", spec=arm) as other,
    ):
        await learner.publish_weights(7, weights(seed=7))
        asked = env_ret(4)
        answers = await asyncio.gather(
            current.act(asked, mode=Mode.EXPLOIT),
            opponent.act(asked, mode=Mode.EXPLOIT),
            other.act(EnvRet("arm", np.full((1, 4, 1), -0.5, np.float32))),
        )
        assert [answer.policy_version for answer in answers] == [7, 1, 0]
        assert not np.allclose(answers[0].value, answers[1].value)
        description = await learner.describe()
        assert (description.policy_version, description.stats["requests"]) == (7, 1)
        assert description.stats["learner"] == "learner"
        policies = description.stats["policies"]
        assert {name: one["requests"] for name, one in policies.items()} == {
            "opponent": 1,
            "arm": 1,
        }
        assert [description.version_of(name) for name in ("default", "opponent", "arm", "x")] == [
            *(7, 1, 0, 0)
        ]
        async with PolicyClient(server.address, policy="opponent") as copier:
            version, data = await learner.pull_weights()
            await copier.publish_weights(version, data)
            assert await copier.pull_weights(7) == (7, data)
        again = await opponent.act(asked, mode=Mode.EXPLOIT)
        assert again.policy_version == 7
        np.testing.assert_array_equal(again.value, answers[0].value)
        kept = WeightStore(tmp_path / "state" / "opponent").load()
        assert kept is not None
        assert kept.version == 7
        metrics = Metrics()
        server.service.measure(metrics)
        samples = {
            sample.labels["policy"]: sample.value
            for family in metrics.families()
            for sample in family.samples
            if sample.name == "rlightning_requests_total"
        }
        assert samples == {"default": 1, "opponent": 2, "arm": 1}


async def test_a_policy_that_is_not_there_is_named_with_those_that_are() -> None:
    async with policy_server(named={"b": {}}) as server:
        async with PolicyClient(server.address, policy="c") as client:
            for call in (
                client.pull_weights(),
                client.publish_weights(1, weights()),
                client.keep_lease("one"),
            ):
                with pytest.raises(NotFoundError, match="no policy 'c' here, only default, b"):
                    await call
        with pytest.raises(NotFoundError, match="no policy 'c' here, only default, b"):
            async with acting(server.address, policy="c"):
                pass
        async with (
            FaultProxy(server.address) as proxy,
            acting(proxy.address, policy="b", act_timeout_s=20) as client,
        ):
            await client.act(env_ret())
            client._policy = ""  # as no client of ours does
            proxy.cut()
            with pytest.raises(PreconditionError, match="asks another policy"):
                await client.act(env_ret())


async def test_a_second_learner_waits_for_the_lease_of_the_first() -> None:
    rpc = RpcConfig(heartbeat_s=0.2, lease_s=0.8)
    async with policy_server(rpc=rpc, named={"b": {}}) as server:
        one = PolicyFleet([server.address], learner_id="one", watch_s=0.1)
        other = PolicyFleet([server.address], learner_id="other", watch_s=0.1)
        await one.start()
        await other.start()
        await one.publish(1, weights(seed=1))
        with pytest.raises(DeadlineExceededError, match="learner 'one' holds the lease"):
            await other.publish(5, weights(seed=5), timeout_s=1.2)  # which is longer than a lease
        async with PolicyClient(server.address) as client:
            with pytest.raises(AlreadyExistsError, match="'third' may not publish.*retry in 1 s"):
                await client.publish_weights(6, weights(), learner_id="third")
            assert (await client.describe()).policy_version == 1
            with pytest.raises(InvalidRequestError, match="learner_id: expected who publishes"):
                await client.keep_lease("")
        async with PolicyClient(server.address, policy="b") as client:
            await client.publish_weights(1, weights(), learner_id="third")  # has its own lease
        await one.close()  # gives it up
        await other.publish(5, weights(seed=5))
        await other.close()


@pytest.mark.parametrize("learner_id", ["x" * 129, "a\nb", "\x1b[2J"])
async def test_a_learner_has_a_name_that_can_be_shown(learner_id: str) -> None:
    async with policy_server() as server, PolicyClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match="learner_id: expected at most 128 printable"):
            await client.keep_lease(learner_id)
        with pytest.raises(InvalidRequestError, match="learner_id: expected at most 128 printable"):
            await client.publish_weights(1, weights(), learner_id=learner_id)
        await client.publish_weights(1, weights(), learner_id="Zoë at 192.0.2.1:7000")


async def test_the_lease_of_a_learner_that_died_ends() -> None:
    rpc = RpcConfig(heartbeat_s=0.2, lease_s=0.5)
    async with policy_server(rpc=rpc) as server, PolicyClient(server.address) as client:
        await client.publish_weights(1, weights(seed=1), learner_id="dead")
        publisher = WeightPublisher(client, learner_id="next", watch_s=0.1)
        publisher.start()
        await publisher.publish(2, weights(seed=2), timeout_s=20)
        await publisher.close()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "expected weights.safetensors, or weights that a policy server has kept.* whole$"),
        ({"weights.safetensors": b"garbage"}, "not a safetensors file"),
        ({"checkpoints/best/weights.safetensors": b""}, "this run has '.*/checkpoints/best'"),
    ],
)
async def test_weights_to_begin_with_that_are_none(
    tmp_path: Any, made: dict[str, bytes], message: str
) -> None:
    for name, data in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        async with policy_server(restore=str(tmp_path)):
            pass


async def test_weights_to_begin_with_that_do_not_fit_are_told_with_their_place(
    tmp_path: Any,
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(weights(seed=3))
    message = rf"version 1 \(policy.restore '{tmp_path}'\): the weights do not fit the network"
    async with policy_server(restore=str(tmp_path), model_cfg={"hidden": [5]}) as server:
        with pytest.raises(PreconditionError, match=message):
            async with acting(server.address):
                pass


async def test_a_server_begins_with_a_checkpoint_or_with_what_another_one_kept(
    tmp_path: Any,
) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights.safetensors").write_bytes(weights(seed=3))
    WeightStore(tmp_path / "kept").save(Weights.of(12, weights(seed=12)))
    for folder, version in (("checkpoint", 1), ("kept", 12)):
        async with (
            policy_server(restore=str(tmp_path / folder), initial_weights="none") as server,
            acting(server.address) as client,
        ):
            assert (await client.act(env_ret())).policy_version == version
