"""The control loop, by a clock that stands still until the loop waits for it."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.base_env import BaseEnv
from rlightning.env.episodes import EpisodeLog
from rlightning.env.hosting import HostedGroup
from rlightning.env.remote_env import control_loop
from rlightning.env.remote_env.answers import Answer
from rlightning.env.remote_env.control_loop import ControlLoop, Pace
from rlightning.env.remote_env.spool import Spool
from rlightning.env.utils.infos import InfoFilter
from rlightning.errors import DeadlineExceededError
from rlightning.types import ActionSource, EnvRet, PolicyResponse
from tests.unit.env.envs import config

MS = 1_000_000
POLICY, HOLD, ZERO = ActionSource.POLICY, ActionSource.HOLD, ActionSource.ZERO


class Clock:
    """Time goes on only while somebody sleeps."""

    def __init__(self):
        self.ns = 0

    def monotonic_ns(self):
        return self.ns

    def sleep(self, seconds):
        self.ns += round(seconds * 1e9)


class Arm(BaseEnv):
    """Notes when it executes what, in ms; its only episode does not end."""

    def __init__(self, clock, executed):
        super().__init__(config())
        self.clock, self.executed = clock, executed

    def get_observation_space(self):
        return gym.spaces.Box(-1, 1, (1,))

    def get_action_space(self):
        return gym.spaces.Box(-1000, 1000, (1,))

    def reset(self, *args, **kwargs):
        return EnvRet(self.env_id, np.zeros(1, np.float32))

    def step(self, policy_resp):
        self.executed.append((self.clock.ns // MS, float(np.ravel(policy_resp.action)[0])))
        return EnvRet(self.env_id, np.zeros(1, np.float32), 0.0, False, False)


async def run(monkeypatch, answers, until_ms, executed=None, **pace):
    """Lets an arm be stepped at 10 Hz.

    Args:
        answers: By the time in ms, what arrives then: how many steps had been done when what it
            answers was seen, and the actions of its chunk.
        until_ms: How long.
        executed: Takes what is executed, where that is of interest after an error.
        **pace: Of `Pace`.

    Returns:
        What was executed when, what is told of it, and the loop.
    """
    clock = Clock()
    monkeypatch.setattr(control_loop, "time", clock)
    arm, spool = Arm(clock, [] if executed is None else executed), Spool(100, 10**6)
    group = HostedGroup(
        arm.config, "arm", worker_index=0, log=EpisodeLog(1), make=lambda: arm, inline_below_us=0
    )
    await group.start()
    seen = []

    def goes_on():
        """Is asked right after each tick, and at the beginning."""
        if clock.ns // MS in answers:
            asked, actions = answers[clock.ns // MS]
            chunk = np.array(actions, np.float32).reshape(1, -1, 1)
            response = PolicyResponse("arm", action=chunk)
            loop.actions.offer(Answer.of(seen[asked], response, loop.space))
        return clock.ns < until_ms * MS

    loop = ControlLoop(
        group,
        spool,
        Pace(10, **pace),
        notify=lambda: seen.append(spool.newest),
        stopping=lambda: False,
        may_go_on=goes_on,
        on_env_error=lambda error, failures: pytest.fail(str(error)),
        of_interest=InfoFilter(),
    )
    loop.run()
    await group.close()
    told = [
        (ActionSource(int(one.env_ret.action_source[0])), float(one.env_ret.executed_action[0, 0]))
        for one in seen[1:]
    ]
    return SimpleNamespace(executed=arm.executed, told=told, loop=loop)


async def test_an_action_is_not_executed_once_its_observation_is_too_old(monkeypatch):
    answers = {0: (0, [1, 2, 3, 4, 5, 6]), 500: (5, [60, 70])}
    done = await run(monkeypatch, answers, 700, max_action_age_ms=250)
    assert done.executed == [
        (100, 1.0),
        (200, 2.0),
        (300, 2.0),  # 3 answers what was seen 300 ms ago
        (400, 2.0),
        (500, 2.0),
        (600, 60.0),
        (700, 70.0),
    ]
    assert [source for source, _ in done.told] == [POLICY, POLICY, HOLD, HOLD, HOLD, POLICY, POLICY]
    assert [action for _, action in done.told] == [action for _, action in done.executed]
    assert (done.loop.actions.too_old, done.loop.counts.held) == (3, 3)
    assert done.loop.action_age_s(1.0) == 0.2  # of those that were executed


async def test_zeros_take_the_place_of_what_is_too_old_from_the_beginning(monkeypatch):
    answers = {100: (0, [1, 2, 3])}
    done = await run(monkeypatch, answers, 300, max_action_age_ms=150, on_late="zero")
    # Nothing has come by 100 ms, and the answer to what was seen at 0 ms is for 200 ms too old.
    assert done.executed == [(100, 0.0), (200, 0.0), (300, 0.0)]
    assert {source for source, _ in done.told} == {ZERO}
    assert (done.loop.actions.too_old, done.loop.counts.zeroed) == (2, 3)


async def test_what_is_too_old_may_end_the_run(monkeypatch):
    answers, executed = {0: (0, [1, 2, 3])}, []
    with pytest.raises(DeadlineExceededError):
        await run(monkeypatch, answers, 900, executed, max_action_age_ms=250, on_late="stop")
    assert executed == [(100, 1.0), (200, 2.0)]


async def test_an_episode_begins_with_its_first_answer_however_old(monkeypatch):
    answers = {500: (0, [1, 2, 3])}
    done = await run(monkeypatch, answers, 800, max_action_age_ms=250)
    # What it answers is what is seen still, as nothing was executed.
    assert done.executed == [(600, 1.0), (700, 1.0), (800, 1.0)]
    assert [source for source, _ in done.told] == [POLICY, HOLD, HOLD]
    counts = done.loop.counts
    assert (done.loop.actions.too_old, counts.held, counts.waited) == (2, 2, 5)


async def test_without_a_limit_a_chunk_is_executed_to_its_end(monkeypatch):
    done = await run(monkeypatch, {0: (0, [1, 2, 3, 4])}, 500)
    assert [action for _, action in done.executed] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert (done.loop.actions.too_old, done.loop.counts.held) == (0, 1)
