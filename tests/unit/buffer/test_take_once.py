"""A ring as a queue."""

from __future__ import annotations

import numpy as np
import pytest

from rlightning.buffer.take_once import TakeOnce
from rlightning.buffer.utils.container import DataContainer


def queue(capacity: int = 8) -> tuple[DataContainer, TakeOnce]:
    container = DataContainer(capacity)
    return container, TakeOnce(container)


def push(container: DataContainer, first: int, count: int) -> None:
    container.push({"number": np.arange(first, first + count)})


def numbers(container: DataContainer, taken: object) -> list[int]:
    return container.read_slots(taken.slots)["number"].tolist()  # type: ignore[attr-defined]


def test_transitions_come_once_in_their_order_and_leave_when_confirmed() -> None:
    container, mine = queue()
    push(container, 0, 3)
    push(container, 3, 3)
    first = mine.take(4)
    assert numbers(container, first) == [0, 1, 2, 3]
    assert (mine.waiting, mine.taken, len(container)) == (2, 4, 6)
    mine.remove(first)
    assert (mine.waiting, mine.taken, len(container)) == (2, 0, 2)
    mine.remove(first)  # once more changes nothing
    assert len(container) == 2
    assert numbers(container, mine.take(2)) == [4, 5]


def test_what_is_put_back_comes_first_again() -> None:
    container, mine = queue()
    push(container, 0, 6)
    first, second = mine.take(2), mine.take(2)
    mine.put_back(second)
    mine.put_back(first)
    assert numbers(container, mine.take(5)) == [0, 1, 2, 3, 4]


def test_room_is_what_the_next_slots_hold() -> None:
    container, mine = queue(8)
    push(container, 0, 6)
    assert mine.has_room(2)
    assert not mine.has_room(3)
    early, late = mine.take(2), mine.take(4)
    mine.remove(late)
    push(container, 6, 2)
    mine.remove(early)
    assert mine.has_room(6)
    for first in range(8, 60, 4):
        push(container, first, 4)
        taken = mine.take(4)
        assert numbers(container, taken) == list(range(first - 2, first + 2))
        mine.remove(taken)


def test_what_is_cleared_or_discarded_is_not_handed_out() -> None:
    container, mine = queue()
    push(container, 0, 4)
    push(container, 4, 3)
    taken = mine.take(1)
    container.discard(0, 4)
    assert mine.waiting == 3
    mine.put_back(taken)  # it is gone
    assert numbers(container, mine.take(3)) == [4, 5, 6]
    push(container, 7, 2)
    container.clear()
    assert (mine.waiting, mine.taken) == (0, 0)
    push(container, 9, 1)
    assert numbers(container, mine.take(1)) == [9]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_calls_hands_each_out_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    container, mine = queue(16)
    pushed, held, confirmed = 0, [], []
    for _ in range(500):
        choice = rng.integers(4)
        count = int(rng.integers(1, 6))
        if choice == 0 and mine.has_room(count):
            push(container, pushed, count)
            pushed += count
        elif choice == 1 and mine.waiting >= count:
            held.append(mine.take(count))
        elif choice == 2 and held:
            mine.put_back(held.pop(int(rng.integers(len(held)))))
        elif held:
            one = held.pop(int(rng.integers(len(held))))
            confirmed += numbers(container, one)
            mine.remove(one)
    while held:
        mine.put_back(held.pop())
    confirmed += numbers(container, mine.take(mine.waiting)) if mine.waiting else []
    assert sorted(confirmed) == list(range(pushed))
