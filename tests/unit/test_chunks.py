"""Answers that carry several actions: which is executed when, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.chunks import ChunkedActions
from rlightning.errors import EnvError, PolicyError
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose

SPACE = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
H = 4


class Rows:
    """Two rows that count their steps; row 1 ends its episodes after so many; an `EnvPort`."""

    def __init__(self, length: int = 99, fails: int = 0) -> None:
        self.meta = EnvMeta("e", SPACE, SPACE, 2)
        self.executed: list[Any] = []
        self._length, self._fails = length, fails
        self._step = np.zeros(2, np.int64)
        self._episode = np.array([0, 1])

    async def reset(self) -> EnvRet:
        self._step = np.zeros(2, np.int64)
        self._episode = self._episode + 2
        return self._ret(np.zeros(2, bool))

    async def step(self, response: PolicyResponse) -> EnvRet:
        await asyncio.sleep(0)
        if len(self.executed) + 1 == self._fails:
            self._fails = 0
            raise EnvError("the arm fell off")
        assert response.action.shape == (2, 1)
        self.executed.append(response.action[:, 0].tolist())
        self._step = self._step + 1
        ended = np.array([False, self._step[1] == self._length])
        self._step[ended] = 0
        self._episode = self._episode + 2 * ended
        return self._ret(ended)

    def _ret(self, ended: Any) -> EnvRet:
        observation = np.float32(10 * self._episode + self._step)[:, None]
        ret = EnvRet("e", observation, np.zeros(2), ended, np.zeros(2, bool))
        ret.episode_id, ret.step = self._episode.copy(), self._step.copy()
        return ret


class Planner:
    """Answers with what each row will observe in the next H steps; a `PolicyPort`."""

    def __init__(self, *, waits: Callable[[int], Any] | None = None, single: bool = False) -> None:
        self.asked: list[Any] = []
        self.resets: list[bool] = []
        self.fails = 0
        self._waits, self._single = waits, single

    async def act(
        self, env_ret: EnvRet, *, mode: Mode, purpose: Purpose, reset_state: bool = False
    ) -> PolicyResponse:
        number = len(self.asked) + 1
        self.asked.append(env_ret.observation[:, 0].tolist())
        self.resets.append(reset_state)
        if self._waits is not None:
            await self._waits(number)
        if number == self.fails:
            raise PolicyError("no plan")
        action = env_ret.observation[:, None] + np.arange(H, dtype=np.float32)[:, None]
        if self._single:
            action = action[:, 0]
        return PolicyResponse("e", action=action, plan=np.full(2, number), seq=number)


class Kept:
    """Keeps what it gets and stops the actor when it has enough; a `BufferPort`."""

    def __init__(self, control: ActorControl, enough: int) -> None:
        self.items: list[tuple[EnvRet, PolicyResponse | None, bool]] = []
        self._control, self._enough = control, enough

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        self.items.append((env_ret, response, new_segment))
        if len(self.items) == self._enough:
            self._control.stop()

    def check(self, env: Rows) -> None:
        """Checks that what is stored as executed is what was executed, in order."""
        executed = [
            ret.executed_action[:, 0].tolist()
            for ret, _, new_segment in self.items
            if ret.executed_action is not None and not new_segment
        ]
        assert executed == env.executed[: len(executed)]
        assert len(executed) >= len(self.items) - 2

    @property
    def plans(self) -> list[int | None]:
        return [None if r is None else int(r.plan[0]) for _, r, _ in self.items]


async def run(
    env: Rows, policy: Planner, enough: int, *, ahead: int = 0
) -> tuple[Kept, ChunkedActions, ActorStats]:
    control, stats = ActorControl(), ActorStats()
    buffer = Kept(control, enough)
    chunks = ChunkedActions(policy, buffer, SPACE, ahead=ahead)
    await asyncio.wait_for(run_actor(env, chunks, chunks, control=control, stats=stats), timeout=30)
    await chunks.finish()
    return buffer, chunks, stats


async def test_a_chunk_is_executed_step_by_step_and_asked_for_again_when_it_is_over() -> None:
    env, policy = Rows(), Planner()
    buffer, chunks, _ = await run(env, policy, 9)
    assert policy.asked == [[20, 30], [24, 34], [28, 38]]
    assert env.executed == [[20.0 + t, 30.0 + t] for t in range(9)]
    buffer.check(env)
    assert buffer.plans == [1, 0, 0, 0, 2, 0, 0, 0, 3, None]
    assert [ret.chunk_index for ret, *_ in buffer.items] == [0, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [ret.answered_seq for ret, *_ in buffer.items] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert buffer.items[0][1].action.shape == (2, H, 1)  # type: ignore[union-attr]
    assert not hasattr(buffer.items[1][1], "policy_version")
    assert chunks.skipped == 0


async def test_no_action_outlives_the_episode_of_any_row() -> None:
    env, policy = Rows(length=6), Planner()
    buffer, *_ = await run(env, policy, 14)
    # Each action is what the row observes when it is executed: none is of an episode before.
    observed = [ret.observation[:, 0].tolist() for ret, *_ in buffer.items]
    assert env.executed == observed[: len(env.executed)]
    assert policy.asked[:4] == [[20, 30], [24, 34], [26, 50], [30, 54]]
    buffer.check(env)


async def test_an_env_that_fails_is_asked_about_anew() -> None:
    env, policy = Rows(fails=3), Planner()
    buffer, _, stats = await run(env, policy, 6)
    assert policy.asked[:2] == [[20, 30], [40, 50]]
    assert policy.resets[:2] == [False, True]
    assert stats.segments == 1
    failed = [new_segment for *_, new_segment in buffer.items].index(True)
    assert buffer.items[failed][0].executed_action is None
    assert env.executed == [[20, 30], [21, 31], [40, 50], [41, 51], [42, 52]]


async def test_what_is_asked_ahead_replaces_by_executed_step() -> None:
    let_go = asyncio.Event()

    async def waits(number: int) -> None:
        if number == 2:
            await let_go.wait()

    env, policy = Rows(), Planner(waits=waits)
    running = asyncio.ensure_future(run(env, policy, 12, ahead=3))
    while len(env.executed) < 4:
        await asyncio.sleep(0)
    # Asked after one step; the env went on to the end of its chunk, and waits.
    assert policy.asked == [[20, 30], [21, 31]]
    assert len(env.executed) == 4
    let_go.set()
    buffer, chunks, _ = await running
    assert env.executed[:6] == [[20.0 + t, 30.0 + t] for t in range(6)]
    assert chunks.skipped >= 3
    buffer.check(env)
    assert buffer.plans[:4] == [1, 2, 0, 0]
    assert [ret.observation[0, 0] for ret, *_ in buffer.items[:5]] == [20, 21, 22, 23, 24]
    assert buffer.items[5][0].answered_seq == 2
    assert buffer.items[5][0].chunk_index == 3


async def test_an_answer_asked_for_ahead_that_fails_is_asked_for_again_when_it_is_needed() -> None:
    env, policy = Rows(), Planner()
    policy.fails = 2
    buffer, _, stats = await run(env, policy, 8, ahead=1)
    assert policy.asked[:3] == [[20, 30], [23, 33], [24, 34]]
    assert stats.policy_errors == 0
    assert buffer.plans[:5] == [1, 0, 0, 0, 3]
    buffer.check(env)


async def test_what_was_asked_for_ahead_in_an_episode_that_is_over_is_not_used() -> None:
    env, policy = Rows(length=4), Planner()
    buffer, chunks, _ = await run(env, policy, 10, ahead=1)
    observed = [ret.observation[:, 0].tolist() for ret, *_ in buffer.items]
    assert env.executed == observed[: len(env.executed)]
    assert chunks.skipped == 0


async def test_a_stop_does_not_wait_for_what_was_asked_ahead() -> None:
    async def waits(number: int) -> None:
        if number == 2:
            await asyncio.sleep(1000)

    control = ActorControl()
    env, policy, buffer = Rows(), Planner(waits=waits), Kept(control, 99)
    chunks = ChunkedActions(policy, buffer, SPACE, ahead=3)
    running = asyncio.ensure_future(run_actor(env, chunks, chunks, control=control))
    while len(policy.asked) < 2:
        await asyncio.sleep(0)
    control.stop()
    await asyncio.wait_for(running, 30)
    await chunks.finish()
    assert len(buffer.items) == len(env.executed) + 1
    assert buffer.plans[:2] == [1, 0]
    buffer.check(env)


async def test_an_answer_with_one_action_goes_through_as_it_is() -> None:
    env, policy = Rows(), Planner(single=True)
    buffer, *_ = await run(env, policy, 4)
    assert len(policy.asked) == len(env.executed) == 4
    assert all(ret.executed_action is None for ret, *_ in buffer.items)
    assert buffer.plans == [1, 2, 3, 4, None]
