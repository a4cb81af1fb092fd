"""Priorities, sequences, filters, removal and discarded episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.buffer import (
    BufferConfig,
    ReplayBuffer,
    RolloutBuffer,
    SamplerConfig,
    Where,
    build_data_buffer,
)
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.postprocess import default_postprocess_fn
from rlightning.buffer.utils.sum_tree import SumTree
from rlightning.errors import BufferEmptyError, ConfigError, ReplayError
from rlightning.types import ActionSource, EnvMeta, EnvRet, PolicyResponse


def make(sampler: Any = None, **config: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(
        BufferConfig(
            **{"type": "ReplayBuffer", "capacity": 100, "sampler": sampler, **config},
        )
    )
    buffer.init()
    return buffer


def add(
    buffer: ReplayBuffer, *lengths: int, first: int = 0, env_id: str = "env", **fields: Any
) -> None:
    """Adds episodes of so many transitions; rewards count all transitions from `first` + 1."""
    for length in lengths:
        for t in range(length + 1):
            env_ret = EnvRet(env_id, np.full(2, first + t, np.float32), float(first + t), **fields)
            response = PolicyResponse(env_id, action=np.int64(t), policy_version=first + t)
            buffer.add_transition(env_id, env_ret, response, truncated=t == length)
        first += length


PRIORITISED = {"type": "prioritised", "seed": 3}


def test_a_tree_finds_by_running_total() -> None:
    rng = np.random.default_rng(1)
    for capacity in (1, 2, 5, 64, 100):
        tree, plain = SumTree(capacity), np.zeros(capacity)
        for turn in range(20):
            slots = rng.integers(0, capacity, 30)
            if turn % 2:  # neighbours
                slots = np.arange(slots.min(), slots[0] + 1)
            slots, values = np.unique(slots), rng.random(len(np.unique(slots)))
            values[rng.random(len(values)) < 0.3] = 0
            tree.set(slots, values)
            plain[slots] = values
            assert tree.total == pytest.approx(plain.sum())
            np.testing.assert_array_equal(tree.values, plain)
            if tree.total:
                sums = rng.random(50) * tree.total
                found = tree.find(sums)
                assert (plain[found] > 0).all()
                expected = np.searchsorted(np.cumsum(plain), sums, side="right")
                assert (found == expected).mean() > 0.95  # rounding may move a border


def test_chances_follow_priorities() -> None:
    buffer = make({**PRIORITISED, "alpha": 1.0, "beta": 1.0})
    add(buffer, 4)
    assert buffer.update_priorities([0, 1, 2, 3], [0.0, 1.0, 2.0, 5.0]) == 4
    drawn = np.concatenate([buffer.sample(4)[0]["sample_index"] for _ in range(2000)])
    np.testing.assert_allclose(
        np.bincount(drawn, minlength=4) / 8000, [0, 1 / 8, 2 / 8, 5 / 8], atol=0.02
    )
    (batch,) = buffer.sample(4)
    chances = np.array([0, 1 / 8, 2 / 8, 5 / 8])[batch["sample_index"]]
    np.testing.assert_allclose(batch["sample_weight"], chances.min() / chances, rtol=1e-5)
    np.testing.assert_array_equal(batch["reward"], batch["sample_index"] + 1)


def test_new_rows_get_the_highest_priority() -> None:
    buffer = make({**PRIORITISED, "alpha": 1.0})
    add(buffer, 2)
    buffer.update_priorities([0, 1], [8.0, 0.0])
    add(buffer, 1)
    drawn = np.concatenate([buffer.sample(2)[0]["sample_index"] for _ in range(500)])
    assert np.bincount(drawn, minlength=3).tolist() == pytest.approx([500, 0, 500], abs=60)


def test_rows_whose_place_was_taken_keep_their_new_priority() -> None:
    buffer = make(PRIORITISED, capacity=4)
    add(buffer, 4)
    (batch,) = buffer.sample(4)
    add(buffer, 4, first=10)
    updated = buffer.update_priorities(
        batch["sample_index"], np.zeros(4), batch["sample_generation"]
    )
    assert updated == 0
    again = np.arange(4)
    assert (
        buffer.update_priorities(again, np.zeros(4), buffer.storages[0].container.generation) == 4
    )
    assert buffer.sample(3)[0]["reward"].min() >= 11  # all are 0: drawn evenly


@pytest.mark.parametrize(
    ("indices", "priorities", "error"),
    [
        ([0], [np.nan], ValueError),
        ([0], [np.inf], ValueError),
        ([0], [-1.0], ValueError),
        ([0, 1], [1.0], ValueError),
        ([9], [1.0], IndexError),
        ([0.5], [1.0], TypeError),
    ],
)
def test_priorities_that_are_refused(indices: Any, priorities: Any, error: Any) -> None:
    buffer = make(PRIORITISED)
    add(buffer, 3)
    with pytest.raises(error):
        buffer.update_priorities(indices, priorities)
    with pytest.raises(ValueError, match="generations: expected 1"):
        buffer.update_priorities([0], [1.0], [1, 2])


def test_priorities_need_their_sampler() -> None:
    buffer = make()
    add(buffer, 3)
    with pytest.raises(ReplayError, match="prioritised"):
        buffer.update_priorities([0], [1.0])
    with pytest.raises(ValueError, match="'prioritised' needs a batch_size"):
        make(PRIORITISED).sample()
    with pytest.raises(BufferEmptyError):
        make(PRIORITISED).sample(0)


def test_seeds_repeat_prioritised_batches() -> None:
    batches = []
    for _ in range(2):
        buffer = make(PRIORITISED)
        add(buffer, 20)
        batches.append(buffer.sample(8)[0]["sample_index"].tolist())
    assert batches[0] == batches[1]


def test_sequences_stay_within_an_episode() -> None:
    buffer = make({"type": "sequence", "length": 3, "seed": 1}, capacity=20)
    for first in range(0, 60, 12):
        add(buffer, 5, 2, 5, first=first)
        (batch,) = buffer.sample(12)
        assert batch["reward"].shape == (12, 3)
        np.testing.assert_array_equal(np.diff(batch["reward"]), 1)
        np.testing.assert_array_equal(
            batch["observation"][:, 1:], batch["next_observation"][:, :-1]
        )
        assert not batch["cut"][:, :-1].any()


def test_sequences_end_where_the_env_ended_an_episode() -> None:
    buffer = make({"type": "sequence", "length": 2})
    for t in range(7):
        env_ret = EnvRet("env", np.full(2, t, np.float32), float(t), t == 3)
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=t), truncated=t == 6)
    rewards = np.concatenate([buffer.sample(5)[0]["reward"] for _ in range(10)])
    assert {tuple(pair) for pair in rewards.tolist()} == {(1, 2), (2, 3), (5, 6)}


def test_sequences_of_n_steps_reach_the_end_of_their_episode() -> None:
    sampler = {"type": "sequence", "length": 4}
    config = BufferConfig(type="ReplayBuffer", capacity=20, sampler=sampler, n_step=3)
    buffer = build_data_buffer("ReplayBuffer", config)
    buffer.init()
    for ends in (5, 2, 2):  # the others are too short, and not joined
        for t in range(ends + 1):
            env_ret = EnvRet("env", np.full(2, t, np.float32), float(t), t == ends)
            response = PolicyResponse("env", action=np.int64(t))
            buffer.add_transition("env", env_ret, response, truncated=t == ends)
    begins = np.concatenate([buffer.sample(9)[0]["observation"][:, 0, 0] for _ in range(10)])
    assert set(begins.tolist()) == {0, 1}


def test_sequences_end_where_a_function_of_the_user_says_so() -> None:
    """Such as one that brings each episode twice, with other goals."""

    def twice(steps: Any) -> dict[str, Any]:
        columns = default_postprocess_fn(steps)
        return {name: np.concatenate([column, column]) for name, column in columns.items()}

    config = BufferConfig(
        type="ReplayBuffer", capacity=20, sampler={"type": "sequence", "length": 3}
    )
    buffer = build_data_buffer("ReplayBuffer", config, postprocess_fn=twice)
    buffer.init()
    for t in range(6):
        env_ret = EnvRet("env", np.full(2, t, np.float32), float(t), t == 5)
        response = PolicyResponse("env", action=np.int64(t))
        buffer.add_transition("env", env_ret, response, truncated=t == 5)
    begins = np.concatenate([buffer.sample(9)[0]["observation"][:, 0, 0] for _ in range(10)])
    assert set(begins.tolist()) == {0, 1, 2}


def test_too_short_episodes_give_no_sequence() -> None:
    buffer = make({"type": "sequence", "length": 5})
    with pytest.raises(BufferEmptyError):  # nothing is there at all
        buffer.sample(1)
    add(buffer, 4, 4)
    with pytest.raises(BufferEmptyError):
        buffer.sample(1)


@pytest.mark.parametrize("sampler", ["uniform", "batch", "all", "prioritised"])
def test_filters_hold_for_every_sampler(sampler: Any) -> None:
    buffer = make({"type": sampler})
    add(buffer, 20)
    count = None if sampler == "all" else 5
    for where, low, high in (
        (Where(min_version=15), 15, 19),
        (Where(max_version=3), 0, 3),
        (Where(min_version=7, max_version=11), 7, 11),
    ):
        if sampler == "batch":
            count = 4
        (batch,) = buffer.sample(count, where=where)
        assert low <= batch["policy_version"].min() <= batch["policy_version"].max() <= high
    with pytest.raises(BufferEmptyError):
        buffer.sample(count, where=Where(min_version=99))


def test_filters_hold_for_all_of_a_sequence() -> None:
    buffer = make({"type": "sequence", "length": 3})
    add(buffer, 20)
    (batch,) = buffer.sample(20, where=Where(min_version=5, max_version=8))
    assert set(batch["policy_version"][:, 0]) <= {5, 6}


def test_rows_are_filtered_by_who_acted() -> None:
    buffer = make()
    add(buffer, 5, action_source=ActionSource.HUMAN)
    add(buffer, 5, first=10)
    (batch,) = buffer.sample(10, where=Where(sources=[ActionSource.HUMAN]))
    assert set(batch["action_source"]) == {ActionSource.HUMAN}
    (batch,) = buffer.sample(10, where=Where(sources=(ActionSource.POLICY,)))
    assert batch["reward"].min() > 10


def test_a_filter_needs_its_column_and_transitions() -> None:
    buffer = make()
    buffer.add_episode({"x": np.zeros(3)})
    with pytest.raises(ValueError, match="no column 'policy_version'"):
        buffer.sample(1, where=Where(min_version=1))
    whole = make(storage={"unit": "episode"})
    with pytest.raises(ValueError, match="unit here is the episode"):
        whole.sample(1, where=Where())


def test_optional_columns() -> None:
    buffer = make(columns=["ts_observed_ns", "action_age"])
    for t in range(4):
        env_ret = EnvRet("env", np.zeros(2), 0.0, ts_observed_ns=10**18 + t, chunk_index=t)
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=t), t == 3)
    columns = buffer.get_all()
    assert columns["ts_observed_ns"].tolist() == [10**18, 10**18 + 1, 10**18 + 2]
    assert columns["action_age"].tolist() == [1, 2, 3]
    plain = make()
    add(plain, 3)
    assert not {"ts_observed_ns", "action_age"} & plain.get_all().keys()


def test_optional_columns_of_vector_envs() -> None:
    buffer = make(columns=["ts_observed_ns", "action_age"])
    for t in range(3):
        env_ret = EnvRet("env", np.zeros((2, 3)), np.zeros(2), ts_observed_ns=t, chunk_index=1)
        buffer.add_transition("env", env_ret, PolicyResponse("env", action=np.zeros(2)), t == 2)
    assert buffer.get_all()["ts_observed_ns"].tolist() == [0, 1, 0, 1]


# Removal.


def rewards(buffer: ReplayBuffer) -> list[float]:
    return sorted(buffer.get_all()["reward"].tolist())


def test_removal_of_the_oldest() -> None:
    buffer = make(capacity=6)
    add(buffer, 4, 4)
    assert rewards(buffer) == [3, 4, 5, 6, 7, 8]


def test_removal_of_the_newest() -> None:
    buffer = make(capacity=6, storage={"removal": "lifo"})
    add(buffer, 4, 4, 3)
    assert rewards(buffer) == [1, 2, 5, 9, 10, 11]
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["next_observation"][:, 0], columns["reward"])
    np.testing.assert_array_equal(columns["observation"][:, 0], columns["reward"] - 1)


@pytest.mark.parametrize("removal", ["fifo", "lifo"])
def test_removal_leaves_sequences_whole(removal: str) -> None:
    sampler = {"type": "sequence", "length": 3, "seed": 1}
    buffer = make(sampler, capacity=12, storage={"removal": removal})
    for first in range(0, 50, 10):
        add(buffer, 5, 5, first=first)
        (batch,) = buffer.sample(10)
        np.testing.assert_array_equal(np.diff(batch["reward"]), 1)
        np.testing.assert_array_equal(batch["observation"][..., 0], batch["reward"] - 1)
        episodes = (batch["reward"] - 1) // 5
        np.testing.assert_array_equal(episodes, episodes[:, :1].repeat(3, 1))
    first_kept = {"fifo": 39, "lifo": 1}[removal]
    assert rewards(buffer)[:7] == list(range(first_kept, first_kept + 7))


def test_removal_of_the_newest_forgets_their_priorities() -> None:
    buffer = make(PRIORITISED, capacity=6, storage={"removal": "lifo"})
    add(buffer, 6)
    buffer.update_priorities(np.arange(6), [0.0, 0.0, 0.0, 0.0, 1e6, 1e6])
    add(buffer, 1, first=10)  # instead of the last one
    (batch,) = buffer.sample(6)  # the new one has the highest priority, too
    assert sorted(batch["reward"].tolist()) == [5, 5, 5, 11, 11, 11]
    buffer.update_priorities([4], [0.0])
    assert set(buffer.sample(6)[0]["reward"].tolist()) == {11}
    assert rewards(buffer) == [1, 2, 3, 4, 5, 11]


def test_removal_of_the_lowest_priority() -> None:
    buffer = make(PRIORITISED, capacity=6, storage={"removal": "priority"})
    add(buffer, 6)
    buffer.update_priorities(np.arange(6), [5.0, 0.1, 4.0, 0.2, 3.0, 0.3])
    add(buffer, 3, first=10)
    assert rewards(buffer) == [1, 3, 5, 11, 12, 13]
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["next_observation"][:, 0], columns["reward"])
    np.testing.assert_array_equal(columns["observation"][:, 0], columns["reward"] - 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"storage": {"removal": "priority"}}, "removal: 'priority' needs"),
        (
            {"storage": {"removal": "priority"}, "sampler": {"type": "sequence", "length": 2}},
            "removal: 'priority' needs .* got 'sequence'",
        ),
        ({"storage": {"removal": "lifo", "unit": "episode"}}, "removal: 'lifo' needs unit"),
        ({"storage": {"unit": "episode"}, "sampler": PRIORITISED}, "'prioritised' needs"),
        (
            {"storage": {"unit": "episode"}, "sampler": {"type": "sequence", "length": 2}},
            "'sequence' needs",
        ),
        (
            {"sampler": {"type": "sequence", "length": 101}},
            "sampler.length: expected at most buffer.capacity, 100, got 101",
        ),
    ],
)
def test_what_does_not_go_together(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**config)


def test_removal_by_priority_needs_priorities() -> None:
    container = DataContainer(2, removal="priority")
    container.push({"x": np.zeros(2)})
    with pytest.raises(ReplayError, match="prioritised"):
        container.push({"x": np.zeros(1)})


@pytest.mark.parametrize("length", [None, 3])
def test_only_sequences_have_a_length(length: Any) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        SamplerConfig(type="sequence" if length is None else "uniform", length=length)


# Discarded episodes.


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_the_open_episode_is_discarded_first_then_the_last_once(unit: str) -> None:
    buffer = make(storage={"unit": unit})
    add(buffer, 3, 2)
    for t in range(4):
        buffer.add_transition(
            "env",
            EnvRet("env", np.zeros(2, np.float32)),
            PolicyResponse("env", action=np.int64(t), policy_version=0),
        )
    assert buffer.discard_episode("env") == 3
    assert buffer.num_transitions() == 5
    assert buffer.discard_episode(EnvRet("env", 0)) == 2
    assert buffer.discard_episode("env") == 0
    assert rewards(buffer) == [1, 2, 3]
    assert buffer.counters.discarded == 5
    with pytest.raises(KeyError):
        buffer.discard_episode("else")
    add(buffer, 2, first=20)
    assert rewards(buffer) == [1, 2, 3, 21, 22]


@pytest.mark.parametrize("unit", ["transition", "episode"])
def test_a_discarded_episode_among_others_leaves_a_hole_that_nobody_sees(unit: str) -> None:
    buffer = make(storage={"unit": unit}, capacity=10)
    add(buffer, 3, env_id="a")
    add(buffer, 2, first=10, env_id="b")
    add(buffer, 3, first=20, env_id="c")
    assert buffer.discard_episode("b") == 2
    assert rewards(buffer) == [1, 2, 3, 21, 22, 23]
    assert buffer.size() == (6 if unit == "transition" else 2)
    if unit == "transition":
        drawn = buffer.sample(6)[0]["reward"]
        assert set(drawn) <= {1, 2, 3, 21, 22, 23}
        assert buffer.get(3)["reward"] == 21
        assert buffer.get(-1)["reward"] == 23
        container = buffer.storages[0].container
        assert container.starts(3).tolist() == [0, 3]
        assert container.read_slots(container.following(np.array([3]), 3))["reward"].tolist() == [
            [21, 22, 23]
        ]
    add(buffer, 3, first=30, env_id="a")
    expected = [2, 3, 21, 22, 23, 31, 32, 33] if unit == "transition" else [21, 22, 23, 31, 32, 33]
    assert rewards(buffer) == expected
    columns = buffer.get_all()
    np.testing.assert_array_equal(columns["next_observation"][:, 0], columns["reward"])
    add(buffer, 6, first=40, env_id="a")
    assert len(rewards(buffer)) == (9 if unit == "episode" else 10) or unit == "episode"


def test_what_was_overwritten_is_not_discarded_again() -> None:
    buffer = make(capacity=4)
    add(buffer, 3, env_id="a")
    add(buffer, 3, first=10, env_id="b")
    assert buffer.discard_episode("a") == 1
    assert rewards(buffer) == [11, 12, 13]


def test_discarded_rows_are_not_drawn_by_priority() -> None:
    buffer = make(PRIORITISED)
    add(buffer, 3, env_id="a")
    add(buffer, 3, first=10, env_id="b")
    add(buffer, 3, first=20, env_id="c")
    buffer.discard_episode("b")
    drawn = np.concatenate([buffer.sample(6)[0]["reward"] for _ in range(10)])
    assert set(drawn) == {1, 2, 3, 21, 22, 23}
    (filtered,) = buffer.sample(6, where=Where(min_version=20))
    assert set(filtered["reward"]) == {21, 22, 23}
    everything = buffer.get_all()["reward"]
    generations = buffer.storages[0].container.generation_of(np.arange(6))
    batch = {"sample_index": np.arange(6), "reward": everything, "sample_generation": generations}
    buffer.update_priorities(batch["sample_index"], batch["reward"], batch["sample_generation"])
    held = buffer.storages[0].container.slots_of(np.arange(6))
    assert buffer.sampler._tree.values[held].tolist() == pytest.approx(  # type: ignore[union-attr]
        (buffer.get_all()["reward"] ** 0.6).tolist()
    )


def test_rollouts_have_no_episode_to_discard() -> None:
    buffer = RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=5))
    buffer.init()
    buffer.open_group(EnvMeta("env"))
    with pytest.raises(ReplayError, match="out of rollouts"):
        buffer.discard_episode("env")
