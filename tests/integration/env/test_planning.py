"""Action chunks and recurrent state, from the envs through all servers into rollouts."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer.remote_buffer import SampleClient
from rlightning.testing import assert_eventually
from tests.integration.env.attaching import CART, attached, cluster, stepped
from tests.integration.env.planning import H
from tests.integration.env.test_env_server import env_server

POLICY = {
    "type": "tests.integration.env.planning:Planning",
    "device": "cpu",
    "initial_weights": "random",
    "store_state": True,
}


@pytest.mark.parametrize(("ahead", "state"), [(0, "kept"), (2, "carried")])
async def test_plans_are_executed_and_stored_with_what_was_remembered(ahead, state):
    config = {
        "policy_config": {**POLICY, "state": state},
        "buffer_config": {"type": "RolloutBuffer", "rollout_length": 24},
        "services": {"env": {"chunk_ahead": ahead}},
    }
    async with env_server(**config) as (client, service):
        async with SampleClient(service._config.services.buffer.dial_address) as samples:
            columns = (await samples.next_batch(60)).columns
        stats = (await client.describe()).stats
    steps, rows = columns["action"].shape
    assert columns["policy_action"].shape == (steps, rows, H)
    answered = columns["policy_version"] >= 0
    # What an answered step remembers is how often its episode was asked about before.
    assert (columns["state"][0][answered] == columns["asked"][answered] - 1).all()
    assert columns["state"][1]["last"].shape == (steps, rows, 4)
    plans = 0
    for row in range(rows):
        fresh, plan, begun = True, None, 0
        for t in range(steps):
            if answered[t, row]:
                assert not fresh or columns["asked"][t, row] == 1
                if fresh or ahead == 0:
                    plan, begun = columns["policy_action"][t, row], t
                fresh = False
                plans += 1
            if ahead == 0:
                assert columns["action"][t, row] == plan[t - begun]
            if columns["terminated"][t, row] or columns["truncated"][t, row]:
                fresh = True
    assert columns["action_source"].tolist() == np.ones((steps, rows)).tolist()
    assert ahead or plans < steps * rows
    assert ahead or not stats["actions_skipped"]


async def test_the_plan_of_an_attached_env_is_executed_by_the_actor():
    async with cluster(CART, POLICY) as running:
        async with attached(running.env_address, gym.make("CartPole-v1")) as client:
            await stepped(client, 60)
        await assert_eventually(lambda: not running.service._actors._detaching, 40)
        columns = await running.buffer.get()
    assert client.outcome == [None]
    step, answered = columns["step"], columns["policy_version"] >= 0
    # Each group has one row, so its plans are as long as they can be.
    assert (columns["action"] == (step // H + 1 + step % H) % 2).all()
    assert (answered == (step % H == 0)).all()
    assert (columns["asked"][answered] == step[answered] // H + 1).all()
