"""Branches of an actor control."""

from __future__ import annotations

from rlightning.env.control import ActorControl


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
