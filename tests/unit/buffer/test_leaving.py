"""Batches that leave a table: another table that begins with its state goes on as it would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.durable.leaving import dump_lending, dump_rollouts
from rlightning.buffer.durable.tables import dump_table, load_table
from rlightning.buffer.pipeline import Item
from rlightning.buffer.taken import Taken
from rlightning.errors import InvalidRequestError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig
from tests.unit.buffer.scripted import SPACE, ScriptedEnv, answer, check_transitions
from tests.unit.buffer.test_state import assert_equal, through_disk

QUEUE: dict[str, Any] = {
    "type": "ReplayBuffer",
    "capacity": 60,
    "auto_truncate_episode": True,
    "rate_limiter": {"queue_size": 40},
}
ROLLOUTS: dict[str, Any] = {
    "type": "RolloutBuffer",
    "capacity": 60,
    "rollout_length": 4,
    "max_rollouts": 3,
}


def ends(row: int, episode: int) -> tuple[int, bool]:
    return 3 + (episode + row) % 5, episode % 2 == 0


class Scene:
    """Tables that are done the same to, and what they should have."""

    def __init__(self, options: dict[str, Any], envs: int = 2) -> None:
        self.config = BufferConfig(**options)
        self.envs = [ScriptedEnv(2, ends, f"env-{number}") for number in range(envs)]
        self.next = [env.reset() for env in self.envs]
        self.tables = [BufferTable("default", self.config)]
        self.taken: list[list[Taken]] = []
        for env in self.envs:
            self.tables[0].open_writer(env.meta, "writer")

    def copy(self, folder: Path) -> None:
        """Adds a table that begins with the state of the first, and knows what it lent."""
        other = BufferTable("default", self.config)
        load_table(other, through_disk(dump_table(self.tables[0]), folder))
        assert other.lending is not None
        lent = list(other.lending.lent.values())
        assert len(lent) == len(self.taken)
        for both, again in zip(self.taken, lent, strict=True):
            both.append(again if again.queued is None else other.read_lent(again))
        self.tables.append(other)

    def insert(self, number: int) -> None:
        env, env_ret = self.envs[number], self.next[number]
        done = [
            table.try_insert(env.env_id, [Item(env_ret, answer(env_ret))]) for table in self.tables
        ]
        assert len(set(done)) == 1
        if done[0]:
            self.next[number] = env.step()

    def take(self, **options: Any) -> int:
        """Takes a batch of each; returns how many transitions it has."""
        taken = [table.take(5, **options) for table in self.tables]
        if taken[0] is None:
            assert set(taken) == {None}
            return 0
        for other in taken[1:]:
            assert other is not None
            assert other.batch_id == taken[0].batch_id
            assert_equal(taken[0].columns(), other.columns())
        self.taken.append([one for one in taken if one is not None])
        return check_transitions(taken[0].columns())

    def end(self, number: int, how: str) -> None:
        """Releases a batch of each, or gives it back."""
        for table, taken in zip(self.tables, self.taken.pop(number), strict=True):
            getattr(table, how)(taken)

    def act(self, rng: np.random.Generator, count: int, **options: Any) -> int:
        seen = 0
        for _ in range(count):
            choice = rng.integers(6)
            if choice < 3:
                self.insert(int(rng.integers(len(self.envs))))
            elif choice == 3:
                seen += self.take(**options)
            elif self.taken:
                how = "release" if choice == 4 else "give_back"
                self.end(int(rng.integers(len(self.taken))), how)
        return seen


@pytest.mark.parametrize("options", [QUEUE, ROLLOUTS], ids=["queue", "rollouts"])
@pytest.mark.parametrize("seed", range(3))
def test_another_table_hands_out_what_this_one_would(
    options: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    scene, rng = Scene(options), np.random.default_rng(seed)
    assert scene.act(rng, 150) > 0
    scene.take()
    scene.copy(tmp_path)
    for both in scene.taken:
        assert_equal(both[0].columns(), both[1].columns())
    assert scene.act(rng, 250) > 0
    one, other = scene.tables
    assert one.sampled_total == other.sampled_total
    assert one.limiter_state() == other.limiter_state()
    assert one.buffer.counters.to_dict() == other.buffer.counters.to_dict()
    while scene.taken:
        scene.end(0, "release")
    scene.take()
    assert_equal(one.buffer.get_all(), other.buffer.get_all())


def test_shares_that_were_used_stay_used(tmp_path: Path) -> None:
    scene = Scene(ROLLOUTS)
    for _ in range(8):
        scene.insert(0)
        scene.insert(1)
    assert scene.take(rank=0, world_size=2)
    assert scene.take(rank=1, world_size=2)
    scene.end(0, "release")  # rank 1 still has its share
    scene.copy(tmp_path)
    for table in scene.tables:
        assert table.take(rank=0, world_size=2) is None
    scene.end(0, "release")
    for table in scene.tables:
        assert table.buffer.rollouts.held == 0  # type: ignore[attr-defined]


def test_an_ack_of_what_was_given_back_still_counts(tmp_path: Path) -> None:
    scene = Scene(QUEUE)
    for _ in range(20):
        scene.insert(0)
    scene.take(learner="learner")
    number = scene.taken[0][0].batch_id
    scene.end(0, "give_back")
    scene.copy(tmp_path)
    sizes = []
    for table in scene.tables:
        assert not table.release_returned(0, 1, number, "another")
        assert table.release_returned(0, 1, number, "learner")
        assert not table.release_returned(0, 1, number, "learner")
        sizes.append(table.buffer.size())
    before = sizes[0]
    scene.take()
    assert sizes == [before, before]
    assert scene.taken[0][0].batch_id == number + 1


def test_an_ack_of_a_share_that_was_given_back_counts_for_who_had_it(tmp_path: Path) -> None:
    scene = Scene(ROLLOUTS)
    for _ in range(8):
        scene.insert(0)
        scene.insert(1)
    for rank in range(2):
        scene.take(rank=rank, world_size=2, learner=f"learner-{rank}")
    number = scene.taken[0][0].batch_id
    scene.end(0, "give_back")
    scene.copy(tmp_path)
    for table in scene.tables:
        assert not table.release_returned(0, 2, number, "learner-1")
        assert not table.release_returned(1, 2, number, "learner-1")  # it has it
        with pytest.raises(InvalidRequestError, match="rank 2: .* world_size of 2"):
            table.release_returned(2, 2, number, "learner-2")
        assert not table.release_returned(2, 2, number + 9, "learner-2")  # long gone
        assert table.release_returned(0, 2, number, "learner-0")
        assert table.take(rank=0, world_size=2) is None  # it has used its share
    scene.end(0, "release")
    for table in scene.tables:
        assert number - 1 not in table.buffer.rollouts._held  # type: ignore[attr-defined]


def test_what_another_number_of_learners_had_is_none_of_the_shares_of_now() -> None:
    scene = Scene(ROLLOUTS)
    for _ in range(8):
        scene.insert(0)
        scene.insert(1)
    (table,) = scene.tables
    before = [table.take(rank=rank, world_size=4, learner="before") for rank in range(4)]
    now = [table.take(rank=rank, world_size=2, learner="now") for rank in range(2)]
    assert {one.batch_id for one in (*before, *now) if one is not None} == {1}
    for taken in before[:2]:
        assert taken is not None
        table.release(taken)
    for taken in before[2:]:
        assert taken is not None
        table.give_back(taken)
    assert table.buffer.rollouts.oldest == 0  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="rank 3: .* world_size of 2"):
        table.release_returned(3, 4, 1, "another")
    assert not table.release_returned(3, 4, 1, "before")
    for taken in now:
        assert taken is not None
        table.release(taken)
    assert table.buffer.rollouts.oldest == 1  # type: ignore[attr-defined]


def with_rollouts() -> tuple[Scene, BufferTable]:
    scene = Scene(ROLLOUTS)
    for _ in range(8):
        scene.insert(0)
        scene.insert(1)
    return scene, scene.tables[0]


def take(table: BufferTable, learner: str, rank: int = 0, world_size: int = 1) -> Taken:
    taken = table.take(rank=rank, world_size=world_size, learner=learner)
    assert taken is not None
    return taken


def test_a_share_that_another_has_now_is_not_released_by_who_had_it(tmp_path: Path) -> None:
    scene, table = with_rollouts()
    before, other = (take(table, name, rank, 2) for rank, name in enumerate("AB"))
    table.release(other)
    table.give_back(before)
    now = take(table, "C", 0, 2)
    assert not table.release_returned(0, 2, before.batch_id, "A")
    assert table.buffer.rollouts.oldest == 0  # type: ignore[attr-defined]
    load_table(BufferTable("default", scene.config), through_disk(dump_table(table), tmp_path))
    table.give_back(now)
    assert table.release_returned(0, 2, before.batch_id, "A")
    assert table.buffer.rollouts.oldest == 1  # type: ignore[attr-defined]


def test_an_ack_of_a_share_is_none_of_the_whole(tmp_path: Path) -> None:
    """Two learners, then one, then two again."""
    scene, table = with_rollouts()
    for before in [take(table, name, rank, 2) for rank, name in enumerate("AB")]:
        table.give_back(before)
    whole = take(table, "D")
    table.give_back(whole)
    other = BufferTable("default", scene.config)
    load_table(other, through_disk(dump_table(table), tmp_path))
    for one in (table, other):
        assert not one.release_returned(0, 2, whole.batch_id, "A")
        assert one.lending is not None
        assert one.lending.had(0, 2, whole.batch_id, "A")
        assert not one.lending.had(0, 1, whole.batch_id, "A")
        assert take(one, "B", 1, 2).batch_id == whole.batch_id  # its half is still there


def test_an_ack_of_the_whole_is_none_of_a_share() -> None:
    """One learner, then two, then one again."""
    _, table = with_rollouts()
    whole = take(table, "A")
    table.give_back(whole)
    share = take(table, "C", 0, 2)
    table.give_back(share)
    assert not table.release_returned(0, 1, whole.batch_id, "A")
    assert table.lending is not None
    assert table.lending.had(0, 1, whole.batch_id, "A")  # so that it is released at the next try
    assert take(table, "C", 0, 2).batch_id == whole.batch_id


def test_rows_of_a_queue_that_were_cleared_are_not_lent_again(tmp_path: Path) -> None:
    scene = Scene(QUEUE)
    for _ in range(20):
        scene.insert(0)
    scene.take()
    scene.tables[0].clear()
    assert scene.tables[0].lending is not None
    assert not scene.tables[0].lending.has(scene.taken[0][0])
    other = BufferTable("default", scene.config)
    load_table(other, through_disk(dump_table(scene.tables[0]), tmp_path))
    assert other.lending is not None
    (lent,) = other.lending.lent.values()
    assert not other.lending.has(lent)
    for table, taken in ((scene.tables[0], scene.taken[0][0]), (other, lent)):
        table.give_back(taken)
        assert table.take(1) is None


def test_a_rollout_keeps_its_actions_when_others_are_executed_later(tmp_path: Path) -> None:
    space = gym.spaces.Box(-1, 1, (2,), np.float32)
    config = BufferConfig(**{**ROLLOUTS, "rollout_length": 2})
    table = BufferTable("default", config)
    table.open_writer(EnvMeta("env", space, SPACE, 2), "writer")
    rng = np.random.default_rng(0)
    for number in range(6):
        env_ret = EnvRet("env", np.full((2, 3), number, np.float32), last_reward=np.ones(2))
        if number > 2:
            env_ret.executed_action = rng.random((2, 2), np.float32)
        response = PolicyResponse("env", action=rng.random((2, 2), np.float32))
        assert table.try_insert("env", [Item(env_ret, response)])
    other = BufferTable("default", config)
    load_table(other, through_disk(dump_table(table), tmp_path))
    for _ in range(2):
        mine, theirs = table.take(), other.take()
        assert mine is not None
        assert theirs is not None
        assert_equal(*(dict(sorted(one.columns().items())) for one in (mine, theirs)))
    assert "policy_action" in mine.columns()


# What is not written of what leaves, because it follows from the rest or is in the configuration.
_DERIVED = {
    "RolloutCollector": {"length", "max_rollouts"},
    "RolloutGroup": {"_collector", "env_id", "_declared", "_all", "_level"},
    "TakeOnce": {"taken", "_container", "_state", "_rows"},  # by way of `order`, and what is lent
    "QueueLending": {"queue"},
    "RolloutLending": {"rollouts"},
    "SharedRollouts": {"_rollouts"},
}


def test_no_attribute_is_forgotten() -> None:
    rollouts, queue = Scene(ROLLOUTS).tables[0], Scene(QUEUE).tables[0]
    rollouts.take(rank=0, world_size=2)
    assert rollouts.lending is not None
    found = [
        *(rollouts.buffer.rollouts, rollouts.buffer.storages[0]._groups["env-0"]),  # type: ignore[attr-defined]
        *(queue.queue, queue.lending, rollouts.lending, rollouts.lending.shares),  # type: ignore[attr-defined]
    ]
    folder = Path(dump_lending.__code__.co_filename).parent
    source = "".join((folder / name).read_text() for name in ("state.py", "leaving.py"))
    for one in found:
        for name in vars(one).keys() - _DERIVED[type(one).__name__]:
            written = f".{name}" in source or f'"{name.removeprefix("_")}"' in source
            assert written, f"{type(one).__name__}.{name}: write it, or say above why not"
    assert dump_rollouts(queue.buffer.storages[0]) is None
