from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer import BufferConfig, RolloutBuffer
from rlightning.buffer.pipeline import Item
from rlightning.buffer.rollouts import Rollout
from rlightning.errors import InvalidRowError, ReplayError
from rlightning.types import EnvMeta, MultiAgentEnvRet, PolicyResponse
from tests.unit.buffer.scripted import ScriptedEnv, answer, check_order, check_transitions


def rollouts(*envs: ScriptedEnv, length: int = 4, most: int = 2) -> RolloutBuffer:
    buffer = RolloutBuffer(
        BufferConfig(type="RolloutBuffer", capacity=1, rollout_length=length, max_rollouts=most)
    )
    buffer.init()
    for env in envs:
        buffer.open_group(env.meta)
    return buffer


class Actor:
    """Inserts into a buffer as long as it has room."""

    def __init__(self, buffer: RolloutBuffer, env: ScriptedEnv) -> None:
        self.buffer, self.env = buffer, env
        self.next = env.reset()

    def act(self, steps: int) -> int:
        for done in range(steps):
            prepared = self.buffer.prepare(self.env.env_id, [Item(self.next, answer(self.next))])
            if not self.buffer.has_room(prepared):
                return done
            self.buffer.commit(prepared)
            self.next = self.env.step()
        return steps


def take(buffer: RolloutBuffer) -> Rollout:
    rollout = buffer.rollouts.take()
    assert rollout is not None
    return rollout


def check(rollout: Rollout, length: int, rows: int) -> dict[str, Any]:
    columns = rollout.columns()
    assert check_transitions(columns) == length * rows
    check_order(columns)
    assert columns["reward"].shape == (length, rows)
    return columns


def test_groups_are_joined_row_by_row() -> None:
    envs = ScriptedEnv(2, env_id="a"), ScriptedEnv(3, env_id="b")
    buffer = rollouts(*envs)
    actors = [Actor(buffer, env) for env in envs]
    actors[0].act(6)
    assert buffer.rollouts.take() is None
    actors[1].act(5)
    rollout = take(buffer)
    columns = check(rollout, 4, 5)
    assert (rollout.env_ids, rollout.rows, rollout.transitions) == (["a", "b"], [2, 3], 20)
    np.testing.assert_array_equal(columns["observation"][0, :, 0], [0, 1, 0, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        columns["reward"][0] = 1


def test_nothing_is_taken_beyond_what_may_be_kept() -> None:
    env = ScriptedEnv(2, lambda row, episode: (3 + row, True))
    buffer = rollouts(env)
    actor = Actor(buffer, env)
    assert actor.act(100) == 9  # 8 transitions and the observation after them
    assert (buffer.rollouts.ready, buffer.rollouts.held, buffer.size()) == (2, 2, 16)
    first = take(buffer)
    before = {name: column.copy() for name, column in first.columns().items()}
    assert actor.act(100) == 0
    buffer.rollouts.release(first)
    assert actor.act(100) == 4
    second = take(buffer)
    check(second, 4, 2)
    assert before["step"].shape == (4, 2)
    assert buffer.rollouts.held == 2


def test_rollouts_follow_each_other_without_a_gap() -> None:
    env = ScriptedEnv(2)
    buffer = rollouts(env, length=3, most=1)
    actor = Actor(buffer, env)
    steps = []
    for _ in range(10):
        actor.act(100)
        rollout = take(buffer)
        steps += check(rollout, 3, 2)["step"][:, 0].tolist()
        buffer.rollouts.release(rollout)
    assert steps == list(range(30))


def test_a_rollout_given_back_is_the_next_one_again() -> None:
    env = ScriptedEnv(2)
    buffer = rollouts(env, most=3)
    Actor(buffer, env).act(100)
    taken = [take(buffer), take(buffer)]
    for rollout in reversed(taken):
        buffer.rollouts.give_back(rollout)
    assert [take(buffer).index for _ in range(3)] == [0, 1, 2]


def test_room_is_made_in_order_whoever_is_done_first() -> None:
    env = ScriptedEnv(1)
    buffer = rollouts(env)
    actor = Actor(buffer, env)
    actor.act(100)
    first, second = take(buffer), take(buffer)
    buffer.rollouts.release(second)
    assert actor.act(100) == 0
    kept = check(first, 4, 1)
    buffer.rollouts.release(first)
    assert actor.act(100) == 8
    assert kept["step"].shape == (4, 1)


def test_an_env_that_comes_later_is_waited_for_from_the_next_rollout_on() -> None:
    early, late = ScriptedEnv(1, env_id="early"), ScriptedEnv(1, env_id="late")
    buffer = rollouts(early)
    first = Actor(buffer, early)
    first.act(7)
    buffer.open_group(late.meta)
    assert take(buffer).env_ids == ["early"]
    first.act(100)
    assert buffer.rollouts.ready == 0
    Actor(buffer, late).act(5)
    assert check(take(buffer), 4, 2)["step"][0].tolist() == [4, 0]


def test_an_env_that_leaves_is_not_waited_for() -> None:
    stays, leaves = ScriptedEnv(1, env_id="stays"), ScriptedEnv(1, env_id="leaves")
    buffer = rollouts(stays, leaves)
    Actor(buffer, stays).act(100)
    Actor(buffer, leaves).act(3)
    assert buffer.rollouts.ready == 0
    buffer.close_group("leaves")
    assert [take(buffer).env_ids for _ in range(2)] == [["stays"], ["stays"]]
    assert buffer.counters.discarded == 2
    buffer.close_group("leaves")


def test_a_reopened_env_keeps_its_rows_and_begins_a_segment() -> None:
    env = ScriptedEnv(1)
    buffer = rollouts(env)
    actor = Actor(buffer, env)
    actor.act(3)
    buffer.open_group(env.meta)
    actor.act(3)
    columns = check(take(buffer), 4, 1)
    assert columns["step"][:, 0].tolist() == [0, 1, 3, 4]
    assert columns["cut"][:, 0].tolist() == [False, True, False, False]
    assert buffer.counters.lost == 1


def test_an_env_with_other_rows_replaces_the_one_before() -> None:
    buffer = rollouts(ScriptedEnv(1))
    Actor(buffer, ScriptedEnv(1)).act(3)
    env = ScriptedEnv(2)
    buffer.open_group(env.meta)
    Actor(buffer, env).act(5)
    check(take(buffer), 4, 2)
    assert buffer.counters.discarded == 2


def test_rows_that_run_ahead_of_a_stuck_one_lose_what_goes_beyond() -> None:
    """Waiting would not help: no rollout can be released before the stuck row has come on."""
    from tests.unit.buffer.test_assembly import subset

    env = ScriptedEnv(2)
    buffer = rollouts(env, length=2, most=2)
    env_ret = env.reset()
    for step in range(12):
        part = subset(env_ret, [0]) if step else env_ret
        prepared = buffer.prepare("env", [Item(part, answer(part))])
        assert buffer.has_room(prepared)
        buffer.commit(prepared)
        env_ret = env.step()
    assert buffer.counters.completed == 5  # the last of them where a message would end
    assert buffer.counters.lost == 6


def test_envs_that_do_not_fit_together_are_refused() -> None:
    one, other = ScriptedEnv(1, env_id="one"), ScriptedEnv(1, env_id="other")
    buffer = rollouts(one, other)
    Actor(buffer, one).act(2)
    env_ret = other.reset()
    response = answer(env_ret)
    response.extra = np.zeros(1)
    with pytest.raises(InvalidRowError, match="extra not expected; env 'one' shares"):
        buffer.prepare("other", [Item(env_ret, response)])
    buffer.prepare("other", [Item(env_ret, answer(env_ret))])


def test_policy_actions_of_groups_that_never_executed_others() -> None:
    envs = ScriptedEnv(1, env_id="a"), ScriptedEnv(1, env_id="b")
    buffer = rollouts(*envs, length=2)
    Actor(buffer, envs[0]).act(3)
    env = envs[1]
    env_ret = env.reset()
    for _ in range(3):
        buffer.commit(buffer.prepare("b", [Item(env_ret, answer(env_ret))]))
        env_ret = env.step()
        env_ret.executed_action = np.array([7])
    columns = check(take(buffer), 2, 2)
    assert columns["action"][:, 1].tolist() == [7, 7]
    np.testing.assert_array_equal(columns["action"][:, 0], columns["policy_action"][:, 0])


def test_clear_drops_what_nobody_took_and_keeps_what_is_pending() -> None:
    env = ScriptedEnv(2)
    buffer = rollouts(env, most=3)
    actor = Actor(buffer, env)
    actor.act(11)
    taken = take(buffer)
    buffer.clear()
    assert buffer.size() == 8
    check(taken, 4, 2)
    buffer.rollouts.release(taken)
    assert buffer.size() == 0
    actor.act(4)
    assert check(take(buffer), 4, 2)["step"][:, 0].tolist() == [10, 11, 12, 13]


def test_get_reads_rollouts_too() -> None:
    env = ScriptedEnv(2)
    buffer = rollouts(env)
    assert buffer.get_all() == {}
    Actor(buffer, env).act(7)
    assert check_transitions(buffer.get_all()) == 12
    assert buffer.get(-1)["step"] == 5
    with pytest.raises(IndexError):
        buffer.get(12)
    with pytest.raises(ReplayError, match="take its rollouts"):
        buffer.sample()


def test_get_reads_rollouts_with_rewards_by_agent() -> None:
    buffer, agents = rollouts(), ("left", "right")
    buffer.open_group(EnvMeta("env"))
    for step in range(5):
        env_ret = MultiAgentEnvRet(
            "env", np.zeros(2, np.float32), dict.fromkeys(agents, float(step))
        )
        item = Item(env_ret, PolicyResponse("env", action=np.int64(step)))
        buffer.commit(buffer.prepare("env", [item]))
    assert buffer.get(-1)["reward"] == {"left": 4, "right": 4}
    assert buffer.get([0, 3])["reward"]["right"].tolist() == [1, 4]


def test_a_message_larger_than_all_rollouts_is_refused() -> None:
    env = ScriptedEnv(1)
    buffer = rollouts(env, length=1, most=2)
    env_ret = env.reset()
    items = [Item(env_ret, PolicyResponse("env", action=np.zeros(1)))] * 3
    with pytest.raises(InvalidRowError, match="3 items at once; a rollout takes 1"):
        buffer.prepare("env", items)
