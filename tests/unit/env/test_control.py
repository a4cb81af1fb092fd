"""Branches of an actor control, and quorums."""

from __future__ import annotations

import asyncio

import pytest

from rlightning.env.control import ActorControl, Quorum
from rlightning.errors import DeadlineExceededError


async def test_a_branch_follows_and_may_stop_alone():
    control = ActorControl()
    first, second = control.branch(), control.branch()
    control.pause()
    assert not first.running
    assert not control.branch().running
    control.start()
    assert first.running
    first.stop()
    assert control.running
    assert second.running
    second.enter()
    assert control.idle  # who waits for the actors of this one does not wait for those of branches
    control.reset_envs()
    assert second.resets == 0
    control.stop()
    assert second.stopping
    assert control.branch().stopping


async def test_a_quorum_is_reached_once_and_for_all():
    quorum = Quorum(2, 0.05, "some.key")
    quorum.count(1)
    with pytest.raises(DeadlineExceededError, match=r"1 of 2 clients .* 0.05 s \(some.key\)"):
        await quorum.wait()
    quorum.count(2)
    quorum.count(0)
    assert quorum.reached
    await quorum.wait()
    await Quorum(0, 0.0, "some.key").wait()


async def test_who_is_paused_anew_before_it_comes_round_goes_on_waiting():
    control = ActorControl(running=False)
    control.enter()
    going = asyncio.create_task(control.go_on())
    await asyncio.sleep(0)
    control.start()
    control.pause()
    assert control.idle
    for _ in range(3):
        await asyncio.sleep(0)
    assert control.idle
    assert not going.done()
    control.start()
    assert await going
    assert not control.idle


async def test_who_is_cancelled_in_a_pause_leaves_once():
    control = ActorControl(running=False)
    control.enter()
    going = asyncio.create_task(control.go_on())
    await asyncio.sleep(0)
    going.cancel()
    await asyncio.wait({going})
    control.leave()
    assert control.idle
