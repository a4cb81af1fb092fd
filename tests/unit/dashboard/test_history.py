from itertools import pairwise

import pytest

from rlightning.cluster.dashboard.history import History


def filled(count, **sizes):
    history = History(**sizes)
    for number in range(1, count + 1):
        history.append((number,))
    return history


def numbers(points):
    return [number for (number,) in points]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_short_run_is_kept_whole(count):
    history = filled(count, recent=5, older=4)
    assert history.last == count
    assert numbers(history.since(0)) == list(range(1, count + 1))


@pytest.mark.parametrize("count", [6, 10, 100, 1_000, 4_096])
def test_a_long_run_is_kept_from_its_beginning_to_its_end_in_bounded_memory(count):
    history = filled(count, recent=10, older=8)
    kept = numbers(history.since(0))
    assert kept == sorted(set(kept))
    assert kept[0] == 1
    assert kept[-10:] == list(range(max(1, count - 9), count + 1))[-10:]
    assert len(kept) <= 10 + 8
    older = kept[:-10]
    steps = {after - before for before, after in pairwise(older)}
    assert len(steps) <= 1  # evenly spread
    if older:  # and without a hole before the recent ones
        assert kept[-10] - older[-1] <= max(steps, default=count)


@pytest.mark.parametrize("seen", [1, 85, 89, 90, 91, 99, 100, 101])
def test_what_a_reader_has_not_seen(seen):
    history = filled(100, recent=10, older=8)
    kept = numbers(history.since(0))
    assert numbers(history.since(seen)) == [number for number in kept if number > seen]
