"""Steps about which nobody was asked become transitions, in replay buffers and in rollouts."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer.local_buffer import LocalBuffer
from rlightning.services.env_server.unasked import UnaskedSteps
from rlightning.types import ActionSource, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig

SPACE = gym.spaces.Box(-100, 100, (1,), np.float32)
META = EnvMeta("e", SPACE, SPACE, 1)
POLICY, HOLD = ActionSource.POLICY, ActionSource.HOLD


def step(number, source=None, action=None):
    """The return of step `number`; with a source, it says what was executed before."""
    return EnvRet(
        "e",
        np.full((1, 1), number, np.float32),
        np.full(1, number, np.float32),
        np.zeros(1, bool),
        np.zeros(1, bool),
        executed_action=None if action is None else np.full((1, 1), action, np.float32),
        action_source=None if source is None else np.array([source], np.int8),
        episode_id=np.zeros(1, np.int64),
        step=np.full(1, number, np.int64),
    )


def answer(action, version=7):
    log_prob = np.full(1, -0.5, np.float32)
    action = np.full((1, 1), action, np.float32)
    return PolicyResponse("e", action=action, log_prob=log_prob, policy_version=version)


async def stored(kind, feed):
    buffer = LocalBuffer(BufferConfig(type=kind, capacity=100, rollout_length=5))
    steps = UnaskedSteps(buffer.writer(META))
    await feed(steps)
    await steps.finish()
    if kind == "RolloutBuffer":
        columns = (await buffer.next_batch(5)).columns
    else:
        buffer.table.buffer.truncate_group("e")
        columns = buffer.table.buffer.get_all()
    return {name: np.asarray(column).reshape(-1) for name, column in columns.items()}


@pytest.mark.parametrize("kind", ["ReplayBuffer", "RolloutBuffer"])
@pytest.mark.parametrize("early", [False, True])
async def test_what_was_executed_is_stored(kind, early):
    async def feed(steps):
        if not early:  # the answer comes before the steps that have none
            await steps.insert(step(0), answer(10))
        else:
            await steps.store(step(0))
        await steps.store(step(1, HOLD if early else POLICY, 10))
        await steps.store(step(2, HOLD, 11))
        await steps.store(step(3, HOLD, 12))
        await steps.insert(step(4, HOLD, 13), answer(14))
        await steps.store(step(5, POLICY, 14))

    columns = await stored(kind, feed)
    np.testing.assert_array_equal(columns["observation"], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(columns["next_observation"], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(columns["reward"], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(columns["action"], [10, 11, 12, 13, 14])
    first = HOLD if early else POLICY
    np.testing.assert_array_equal(columns["action_source"], [first, HOLD, HOLD, HOLD, POLICY])
    none = -1 if early else 7
    np.testing.assert_array_equal(columns["policy_version"], [none, -1, -1, -1, 7])
    np.testing.assert_array_equal(columns["log_prob"][1:], [0, 0, 0, -0.5])


async def test_a_step_whose_action_nobody_names_is_joined_to_nothing():
    async def feed(steps):
        await steps.insert(step(0), answer(10))
        await steps.store(step(1))
        await steps.insert(step(2), answer(12))
        await steps.store(step(3))

    columns = await stored("ReplayBuffer", feed)
    np.testing.assert_array_equal(columns["observation"], [0, 2])
    np.testing.assert_array_equal(columns["cut"], [True, True])


async def test_the_answer_of_another_server_is_stored():
    async def feed(steps):
        await steps.store(step(0), answer(10, version=3))
        await steps.store(step(1, POLICY, 10))
        await steps.insert(step(2, HOLD, 10), answer(12))
        await steps.store(step(3, POLICY, 12))

    columns = await stored("ReplayBuffer", feed)
    np.testing.assert_array_equal(columns["action"], [10, 10, 12])
    np.testing.assert_array_equal(columns["policy_version"], [3, -1, 7])
    np.testing.assert_array_equal(columns["log_prob"], [-0.5, 0, -0.5])
