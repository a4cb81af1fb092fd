"""What a client that attaches may not do: it is told what is wrong, and nothing else is disturbed."""

from __future__ import annotations

import asyncio

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.env.remote_client import EnvClient
from rlightning.errors import (
    AlreadyExistsError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
)
from rlightning.policy import BasePolicy
from rlightning.testing import assert_eventually
from rlightning.types import EnvRet, PolicyResponse
from tests.integration.env.attaching import FAST, PATIENCE_S, attached, cluster, raw_client, stepped
from tests.integration.pairing.env import Counting

pytestmark = pytest.mark.timeout(120)


async def test_an_id_that_is_taken_and_a_server_that_is_full():
    rpc = FAST.model_copy(update={"max_sessions": 1})
    async with cluster(rpc=FAST) as running:
        running.service._clients._max_sessions = rpc.max_sessions
        async with attached(running.env_address, Counting()) as client:
            await stepped(client, 10)
            for name, kind in (("robot", AlreadyExistsError), ("other", ResourceExhaustedError)):
                async with attached(
                    running.env_address, Counting(), name, connect_timeout_s=0.5
                ) as refused:
                    await assert_eventually(lambda refused=refused: refused.outcome, PATIENCE_S)
                    assert isinstance(refused.outcome[0], kind)
            await stepped(client, 10)


class OtherActions(Counting):
    """Sees what others see, and acts otherwise."""

    action_space = gym.spaces.Box(0, 2**40, (2,), np.int64)


class OtherViews(Counting):
    """Acts as others do, and sees something else."""

    observation_space = gym.spaces.Box(0, 2**40, (4,), np.float32)


@pytest.mark.parametrize(
    ("env", "differs", "same"),
    [
        (OtherActions, "action_space", "observation_space"),
        (OtherViews, "observation_space", "action_space"),
    ],
)
async def test_another_space_is_refused_with_what_differs(env, differs, same):
    async with cluster() as running:
        async with attached(running.env_address, env()) as client:
            await assert_eventually(lambda: client.outcome, PATIENCE_S)
            assert isinstance(client.outcome[0], PreconditionError)
            assert differs in str(client.outcome[0])
            assert same not in str(client.outcome[0])
            assert client.status.steps == 0
        assert not running.service.failure.done()


@pytest.mark.parametrize("what", ["gap", "shape", "epoch", "nan", "inf", "text", "ragged"])
async def test_bad_steps_end_the_session_and_nothing_else(what):
    async with cluster() as running, raw_client(running) as client:
        await client.send((1, True))
        await client.answer()
        if what == "shape":
            client.env_ret = EnvRet("raw", np.zeros((1, 3), np.int64))
        rewards = {"inf": np.full(1, 1e308), "text": "1.0", "ragged": [1.0, [2.0, 3.0]]}
        client.env_ret.last_reward = rewards.get(what, 0.0)
        if what == "nan":
            client.env_ret.observation = client.env_ret.observation * np.float32("nan")
        client.epoch += what == "epoch"
        await client.send((5 if what == "gap" else 2, True))
        codes = {"epoch": "FAILED_PRECONDITION"}
        code = await asyncio.wait_for(client.call.code(), 20)
        assert code.name == codes.get(what, "INVALID_ARGUMENT")

        async def gone():
            return await running.env_ids() == ["count-0-0"]

        await assert_eventually(gone, PATIENCE_S)
        assert not running.service.failure.done()


async def test_nonsense_about_dropped_steps_does_not_spoil_the_stats_of_all():
    async with cluster() as running, raw_client(running) as client:
        for seq in range(1, 4):
            await client.send((seq, True), dropped=2**63 - 1)
            await client.answer()
        async with EnvClient(running.env_address, rpc=FAST) as asking:
            assert (await asking.describe()).stats["steps_dropped"] >= 2**40
        await client.send((4, True), dropped=-1)
        code = await asyncio.wait_for(client.call.code(), 20)
        assert code.name == "INVALID_ARGUMENT"


async def test_rows_that_a_group_does_not_have_are_refused():
    async with cluster() as running, raw_client(running) as client:
        client.env_ret.rows = np.array([1], np.int32)
        await client.send((1, True))
        assert (await client.call.code()).name == "INVALID_ARGUMENT"
        assert "rows: expected some of 1, got 1" in await client.call.details()


class Signed(gym.Env):
    """Shows the same number all the time."""

    observation_space = action_space = gym.spaces.Box(-10, 10, (1,), np.float32)

    def __init__(self, number=1.0):
        self.number = np.full(1, number, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.number, {}

    def step(self, action):
        assert np.isfinite(action).all()
        return self.number, 1.0, False, False, {}


class Logarithm(BasePolicy):
    """Has no number to act with where it sees one below 0."""

    def construct_network(self, env_meta, **kwargs):
        self.net = torch.nn.Linear(1, 1)

    def rollout_step(self, env_ret):
        return PolicyResponse(env_ret.env_id, action=torch.log(env_ret.observation))


async def test_a_nan_action_is_told_to_its_client_and_disturbs_nobody_else():
    async with cluster([], {"type": f"{__name__}:Logarithm"}, min_clients=1) as running:
        async with attached(running.env_address, Signed(), "other", control_hz=20) as other:
            await stepped(other, 5)
            for options in ({}, {"control_hz": 50}):
                async with attached(running.env_address, Signed(-1.0), **options) as client:
                    await assert_eventually(lambda client=client: client.outcome, PATIENCE_S)
                    [error] = client.outcome
                    assert isinstance(error, RemoteError)
                    told = "failed for env 'attached/robot': 'action' is NaN, in row 0"
                    assert told in str(error)
                    assert (client.status.steps, client.status.state) == (0, "ended")
            await stepped(other, 5)
            assert other.status.reconnects == 0
        assert not running.service.failure.done()
