"""Which action of which answer is for a step."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.remote_env.answers import (
    ActionQueue,
    Answer,
    as_executed,
    is_plain,
    split_chunk,
    zero_action,
)
from rlightning.types import PolicyResponse

BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(4)
DICT = gym.spaces.Dict({"arm": BOX, "grip": DISCRETE})
MS = 10**6


def answer(index, *actions, observed_ns=0):
    return Answer(index, index, observed_ns, list(actions), PolicyResponse("e"))


def chosen(queue, index, now_ns=0, **options):
    found = queue.at(index, now_ns, **options)
    return None if found is None else (found.action, found.chunk_index)


def test_an_action_is_for_one_step():
    queue = ActionQueue()
    assert chosen(queue, 3) is None
    queue.offer(answer(3, "a"))
    assert chosen(queue, 3) == ("a", 0)
    assert chosen(queue, 4) is None
    assert queue.skipped == 0


def test_a_chunk_is_for_the_steps_that_follow():
    queue = ActionQueue()
    queue.offer(answer(3, "a", "b", "c", "d"))
    assert chosen(queue, 5) == ("c", 2)
    assert queue.skipped == 2  # their steps had passed
    assert chosen(queue, 6) == ("d", 3)
    queue.offer(answer(5, "e", "f", "g"))
    assert chosen(queue, 6) == ("f", 1)
    assert queue.skipped == 3
    assert chosen(queue, 8) is None


def test_nothing_is_executed_in_another_episode():
    queue = ActionQueue()
    queue.offer(answer(3, "a", "b", "c", "d"))
    queue.begin_episode(5)
    assert chosen(queue, 5) is None
    queue.offer(answer(5, "e"))
    assert chosen(queue, 5) == ("e", 0)


def test_an_action_that_is_too_old_is_not_used():
    queue = ActionQueue(100)
    queue.offer(answer(3, "a", "b", "c", observed_ns=0))
    assert chosen(queue, 4, 99 * MS) == ("b", 1)
    assert chosen(queue, 5, 101 * MS) is None
    assert queue.too_old == 1
    assert chosen(queue, 5, 101 * MS, any_age=True) == ("c", 2)


@pytest.mark.parametrize(
    ("space", "shape", "count"),
    [
        (BOX, (1, 3), 1),
        (BOX, (1, 5, 3), 5),
        (BOX, (1, 3, 1), 1),  # no chunk: a last axis that the env takes
        (DISCRETE, (1,), 1),
        (DISCRETE, (1, 6), 6),
    ],
)
def test_a_chunk_has_one_axis_more(space, shape, count):
    action = np.arange(np.prod(shape)).reshape(shape)
    parts = split_chunk(space, action)
    assert len(parts) == count
    if count > 1:
        np.testing.assert_array_equal(np.stack(parts, 1), action)
    else:
        assert parts[0] is action


def test_a_chunk_of_a_dict():
    arm, grip = np.arange(15.0).reshape(1, 5, 3), np.arange(5)[None]
    parts = split_chunk(DICT, {"arm": arm, "grip": grip})
    assert len(parts) == 5
    np.testing.assert_array_equal(parts[2]["arm"], arm[:, 2])
    np.testing.assert_array_equal(parts[2]["grip"], [2])
    mixed = {"arm": arm, "grip": grip[:, 0]}
    assert split_chunk(DICT, mixed) == [mixed]  # for the env to refuse


def test_executed_actions_have_the_form_of_the_space():
    executed = as_executed(DICT, {"arm": [[1, 2, 3]], "grip": np.array([[2.0]])})
    assert executed["arm"].shape == (1, 3)
    assert executed["arm"].dtype == np.float32
    assert executed["grip"].shape == (1,)
    assert executed["grip"].dtype == np.int64


def test_zeros():
    zero = zero_action(DICT)
    assert DICT.contains(zero)
    assert not gym.spaces.Box(1, 2, (3,)).contains(zero_action(gym.spaces.Box(1, 2, (3,))))
    assert is_plain(gym.spaces.Tuple((BOX, DICT)))
    assert not is_plain(gym.spaces.Tuple((BOX, gym.spaces.Text(3))))
