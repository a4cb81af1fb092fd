"""The actor loop over fake ports: order, pairs, errors, pause and stop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlightning import actor as actor_module
from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.errors import (
    DeadlineExceededError,
    EnvError,
    InvalidRequestError,
    ObservationError,
    PolicyError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
)
from rlightning.testing import FakeBuffer, FakeEnv, FakePolicy
from rlightning.types import Mode, Purpose


async def run(env=None, policy=None, enough=3, **kwargs):
    control, stats = ActorControl(), ActorStats()
    env, policy, buffer = env or FakeEnv(), policy or FakePolicy(), FakeBuffer(control, enough)
    await asyncio.wait_for(
        run_actor(env, policy, buffer, control=control, stats=stats, **kwargs), timeout=10
    )
    assert control.idle
    assert policy.sent_ns > 0 or not policy.asked
    return env, policy, buffer, stats


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    async def sleep(self, seconds):
        await asyncio.sleep(0)

    monkeypatch.setattr(ActorControl, "sleep", sleep)


async def test_each_observation_is_stored_with_its_own_answer_and_executed_once():
    env, policy, buffer, stats = await run()
    assert buffer.items == [
        (-1.0, -1.0, 0, False),
        (1.0, 1.0, 1, False),
        (2.0, 2.0, 2, False),
        (3.0, None, 3, False),  # the outcome of the last answer, when it stops
    ]
    assert env.executed == [-1.0, 1.0, 2.0]
    assert {ask[1:] for ask in policy.asked} == {(Mode.EXPLORE, Purpose.TRAIN, False)}
    assert (stats.steps, stats.segments, stats.last_error) == (3, 0, "")
    assert {name: h.count for name, h in stats.latency.items()} == dict.fromkeys(
        ("round_trip", "insert", "action_age", "env_step", "step"), 3
    )


async def test_evaluation_never_reaches_the_buffer():
    control = ActorControl()
    env, policy, buffer = FakeEnv(), FakePolicy(), FakeBuffer(control, 1)

    async def step(response, step=env.step):
        if env.steps == 5:
            control.stop()
        return await step(response)

    env.step = step
    await run_actor(env, policy, buffer, mode=Mode.EXPLOIT, purpose=Purpose.EVAL, control=control)
    assert buffer.items == []
    assert {ask[1:3] for ask in policy.asked} == {(Mode.EXPLOIT, Purpose.EVAL)}


async def test_only_wanted_infos_go_on():
    info = {
        "episode_info": {"return": 1.0},
        "wanted": 1,
        "_wanted": True,
        "big": np.zeros(9),
        "final_rows": np.zeros(1, np.int32),
        "final_observation": np.zeros((1, 1)),
        "final_info": {"wanted": 2, "big": 3},
    }
    *_, buffer, _ = await run(FakeEnv(info=info), enough=2, info_keys=("episode_info", "wanted"))
    assert buffer.last.info.keys() == info.keys() - {"big"}
    assert buffer.last.info["final_info"] == {"wanted": 2}
    *_, buffer, _ = await run(FakeEnv(info=info), enough=2, info_keys=())
    assert buffer.last.info.keys() == {"final_rows", "final_observation"}


async def test_an_env_that_fails_is_reset_and_begins_a_segment():
    env, policy, buffer, stats = await run(FakeEnv(fails=[2]), enough=4)
    assert buffer.items[:4] == [
        (-1.0, -1.0, 0, False),
        (1.0, 1.0, 1, False),
        (-2.0, -2.0, 0, True),
        (3.0, 3.0, 3, False),
    ]
    assert [ask[3] for ask in policy.asked] == [False, False, True, False]
    assert env.resets == 2
    assert (stats.env_errors, stats.segments, stats.last_error) == (1, 1, "step 2 failed")


async def test_an_env_that_fails_for_good_is_given_up():
    with pytest.raises(EnvError, match="step 10 failed"):
        await run(FakeEnv(fails=range(1, 99)), enough=99)


async def test_an_observation_outside_its_space_is_no_matter_of_another_reset():
    class Lying(FakeEnv):
        async def step(self, response):
            raise ObservationError("expected float32[3], got float32[4]")

    env = Lying()
    with pytest.raises(ObservationError):
        await run(env)
    assert env.resets == 1


async def test_a_reset_that_fails_is_tried_again():
    env = FakeEnv()
    reset, left = env.reset, [EnvError("stuck")] * 3

    async def flaky():
        if left:
            raise left.pop()
        return await reset()

    env.reset = flaky
    *_, stats = await run(env)
    assert stats.env_errors == 3


async def test_a_lost_state_is_reset_and_begins_a_segment():
    lost = PreconditionError("gone", reason="STATE_LOST")
    _, policy, buffer, stats = await run(policy=FakePolicy([None, lost]))
    assert [(ask[0], ask[3]) for ask in policy.asked[:4]] == [
        (-1.0, False),
        (1.0, False),
        (1.0, True),
        (2.0, False),
    ]
    assert [item[3] for item in buffer.items] == [False, True, False, False]
    assert stats.segments == 1


@pytest.mark.parametrize(
    "error",
    [
        PolicyError("raised"),
        RemoteError("INTERNAL: raised"),
        DeadlineExceededError("slow"),
        ResourceExhaustedError("full", reason="OVERLOADED"),
    ],
)
async def test_an_answer_that_is_an_error_is_asked_for_again(error, caplog):
    _, policy, buffer, stats = await run(policy=FakePolicy([None, error, error]))
    assert [ask[0] for ask in policy.asked] == [-1.0, 1.0, 1.0, 1.0, 2.0]
    assert [item[0] for item in buffer.items] == [-1.0, 1.0, 2.0, 3.0]
    assert (stats.policy_errors, stats.segments, stats.last_error) == (2, 0, str(error))
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "error",
    [
        PreconditionError("another spec"),
        InvalidRequestError("observation: expected"),
        ResourceExhaustedError("too large", reason="MESSAGE_TOO_LARGE"),
    ],
)
async def test_what_cannot_pass_ends_the_actor(error):
    with pytest.raises(type(error)):
        await run(policy=FakePolicy([None, error]))


async def test_a_policy_that_fails_for_good_is_given_up():
    policy = FakePolicy([PolicyError("raised")] * 99)
    with pytest.raises(PolicyError):
        await run(policy=policy)
    assert len(policy.asked) == actor_module.MAX_ATTEMPTS


async def test_an_answer_for_another_env_is_never_executed():
    env = FakeEnv()
    with pytest.raises(PolicyError, match="'e' is for env 'other'"):
        await run(env, FakePolicy(env_id="other"))
    assert env.executed == []


async def test_an_answer_is_executed_in_the_episode_that_asked_and_no_other():
    control = ActorControl()
    env, policy, buffer = FakeEnv(), FakePolicy(), FakeBuffer(control, 4)
    act = policy.act

    async def act_while_a_reset_is_asked_for(env_ret, **kwargs):
        response = await act(env_ret, **kwargs)
        if env.steps == 1 and env.resets == 1:
            control.reset_envs()
        return response

    policy.act = act_while_a_reset_is_asked_for
    await asyncio.wait_for(run_actor(env, policy, buffer, control=control), 30)
    # The answer to 1 is executed before the reset, and nothing of before after it.
    assert env.executed == [-1.0, 1.0, -2.0, 3.0]
    assert [item[::3] for item in buffer.items[:4]] == [
        (-1.0, False),
        (1.0, False),
        (-2.0, True),
        (3.0, False),
    ]


async def test_a_full_buffer_holds_the_env():
    control = ActorControl()
    env, buffer = FakeEnv(), FakeBuffer(control, 3)
    buffer.gate.clear()
    task = asyncio.create_task(run_actor(env, FakePolicy(), buffer, control=control))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(buffer.items), env.steps) == (1, 0)
    buffer.gate.set()
    await asyncio.wait_for(task, 30)


async def test_pause_and_resume():
    control = ActorControl(running=False)
    env, policy, buffer = FakeEnv(), FakePolicy(), FakeBuffer(control, 6)
    task = asyncio.create_task(run_actor(env, policy, buffer, control=control))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (policy.asked, control.idle, control.running) == ([], True, False)
    control.start()
    await until(lambda: len(buffer.items) >= 2)
    control.pause()
    assert await control.wait_idle(10)
    steps, asked = env.steps, len(policy.asked)
    assert steps == asked == len(buffer.items)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (env.steps, len(policy.asked)) == (steps, asked)
    control.start()
    await asyncio.wait_for(task, 30)
    assert [item[0] for item in buffer.items] == [-1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


async def test_a_reset_can_be_asked_for():
    control = ActorControl()
    env, buffer = FakeEnv(), FakeBuffer(control, 99)
    task = asyncio.create_task(run_actor(env, FakePolicy(), buffer, control=control))
    await until(lambda: len(buffer.items) >= 2)
    control.pause()
    await control.wait_idle(10)
    before = len(buffer.items)
    control.reset_envs()
    control.start()
    await until(lambda: len(buffer.items) >= before + 2)
    control.stop()
    await asyncio.wait_for(task, 30)
    assert [item[::3] for item in buffer.items[before : before + 2]] == [
        (-2.0, True),
        (before + 1.0, False),
    ]


async def test_stop_ends_a_paused_actor_and_one_that_waits():
    control = ActorControl(running=False)
    task = asyncio.create_task(run_actor(FakeEnv(), FakePolicy(), None, control=control))
    await asyncio.sleep(0)
    control.stop()
    control.pause()  # comes too late
    await asyncio.wait_for(task, 30)
    assert not control.running

    control = ActorControl()

    async def act(env_ret, **kwargs):
        control.stop()
        raise PolicyError("busy")

    policy = FakePolicy()
    policy.act = act
    await asyncio.wait_for(run_actor(FakeEnv(), policy, None, control=control), 30)


async def test_waiting_for_idle_actors_is_bounded():
    control = ActorControl()
    control.enter()
    assert not await control.wait_idle(0.01)
    control.leave()
    assert await control.wait_idle(0.01)
