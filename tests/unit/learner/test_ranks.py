"""Learners that share their gradients: two of them do what one does with all the rows."""

import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError
from rlightning.learner import build_learner
from rlightning.learner.ranks import Order, Ranks, follow
from rlightning.policy.weights import parse_weights
from rlightning.types import ActionSource
from tests.unit.learner import replayed, test_own_loss, test_ppo


class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank, world_size, barrier, board):
        self.rank, self.world_size = rank, world_size
        self._barrier, self._board = barrier, board

    def _gather(self, value):
        self._board[self.rank] = value
        self._barrier.wait(30)
        values = [self._board[rank] for rank in range(self.world_size)]
        self._barrier.wait(30)
        return values

    def least(self, value):
        return min(self._gather(value))

    def total(self, value):
        return sum(self._gather(value))

    def average(self, parameters, rows):
        parameters = list(parameters)
        zeros = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        shares = self._gather((zeros, rows))
        total = sum(count for _, count in shares)
        for index, parameter in enumerate(parameters):
            parameter.grad = sum(grads[index] * count for grads, count in shares) / total

    def concatenate(self, values):
        return torch.cat(self._gather(values))


def as_two(make, updates):
    """Makes the updates with two learners; returns the weights of both, which have to be equal."""
    barrier, board = threading.Barrier(2), {}
    ranks = [ThreadRanks(rank, 2, barrier, board) for rank in range(2)]
    learners = [make() for _ in ranks]

    def learn(rank):
        try:
            learners[rank].ranks = ranks[rank]
            for columns in updates:
                learners[rank].update(halved(columns, rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(learn, range(2)))
    first, second = (learner.weights() for learner in learners)
    assert first == second
    return first


def halved(columns, rank):
    axis = columns["reward"].ndim - 1
    return {name: np.array_split(column, 2, axis)[rank] for name, column in columns.items()}


def assert_close(one, other):
    other = parse_weights(other)
    for name, tensor in parse_weights(one).items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


TWO = gym.spaces.Discrete(2)


def test_two_dqn_learners_are_one_with_twice_the_batch():
    rng = np.random.default_rng(0)
    updates = [replayed.make_columns(rng.integers(0, 2, replayed.B), rng=seed) for seed in range(3)]

    def make():
        return replayed.make_learner("dqn", TWO)

    one = make()
    before = one.weights()
    for columns in updates:
        one.update(columns)
    assert one.weights() != before
    assert_close(as_two(make, updates), one.weights())


# Rows that are left out: none, some on one side, all on one side, all but one.
@pytest.mark.parametrize("masked", [(), np.s_[:5, :4], np.s_[:, :8], np.s_[:, 1:]])
@pytest.mark.parametrize("algorithm", ["ppo", "vtrace"])
def test_two_ppo_learners_are_one_with_twice_the_batch(algorithm, masked):
    updates = []
    for seed in range(3):
        columns = test_ppo.make_columns(seed)
        if masked != ():
            columns["action_source"][masked] = ActionSource.HUMAN
        updates.append(columns)

    def make(rows=64):
        return test_ppo.make_ppo(algorithm=algorithm, train={"batch_size": rows})

    one = make(128)
    for columns in updates:
        one.update(columns)
    assert_close(as_two(make, updates), one.weights())


def test_learners_with_minibatches_take_as_many_steps_each():
    columns = test_ppo.make_columns()
    columns["action_source"][:, 3:8] = ActionSource.HUMAN  # 24 rows here, 64 there
    as_two(lambda: test_ppo.make_ppo(train={"batch_size": 8}), [columns])


def test_a_loss_of_the_user_is_averaged_at_each_step():
    ones = {"reward": np.ones(8, np.float32)}
    as_two(test_own_loss.make_learner, [ones, ones])


def test_an_algorithm_that_does_not_share_is_refused(monkeypatch):
    class Joined(Ranks):
        world_size = 2

    monkeypatch.setattr(test_own_loss, "lonely", Lonely, raising=False)
    config = test_own_loss.make_config(algorithm="tests.unit.learner.test_own_loss:lonely")
    assert build_learner(config, test_own_loss.META)
    with pytest.raises(ConfigError, match="has no attribute 'ranks': it learns alone"):
        build_learner(config, test_own_loss.META, Joined())


class Lonely:
    def __init__(self, policy, learner, train, *, seed):
        pass

    def update(self, columns):
        return {}

    def weights(self):
        return b""

    def state(self):
        return {}

    def restore(self, state):
        pass


class Told(Ranks):
    """The orders of rank 0."""

    rank, world_size = 1, 2

    def __init__(self, *orders):
        self.orders = list(orders)
        self.told = []

    def receive_order(self):
        return self.orders.pop(0)

    def oldest(self, versions):
        self.told.append(versions.min())
        return self.told[-1]


class Share:
    def __init__(self, *batches):
        self.batches = list(batches)
        self.released = 0
        self.priorities = []

    def next_batch(self):
        return self.batches.pop(0)

    def release(self):
        self.released += 1

    def update_priorities(self, columns, priorities):
        self.priorities.append((columns["sample_index"].tolist(), priorities))


class Learner:
    def __init__(self):
        self.got = []
        self.priorities = [0.5]

    def update(self, columns):
        self.got.append(columns["reward"].tolist())


def batch(number, version):
    column = np.array([number], np.float32)
    return {
        "reward": column,
        "policy_version": np.array([version]),
        "sample_index": np.array([number]),
    }


def test_a_rollout_is_taken_before_it_is_known_whether_it_is_learned_from():
    take, update, stop = (Order.TAKE, 0), (Order.UPDATE, 3), (Order.STOP, 0)
    learner, share = Learner(), Share(batch(0, 0), batch(1, 3))
    ranks = Told(take, take, update, stop)
    follow(learner, share, ranks, replays=False, max_staleness=None)
    assert (learner.got, ranks.told, share.released) == ([[1.0]], [0, 3], 1)
    assert share.priorities == []


def test_replayed_batches_of_old_rows_alone_are_left_out():
    learner, share = Learner(), Share(batch(0, 1), batch(1, 8), batch(2, 9))
    ranks = Told((Order.UPDATE, 9), (Order.UPDATE, 9), (Order.STOP, 0))
    follow(learner, share, ranks, replays=True, max_staleness=1)
    assert learner.got == [[1.0], [2.0]]
    assert share.priorities == [([1], [0.5]), ([2], [0.5])]
