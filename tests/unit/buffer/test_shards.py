"""A buffer over several storages of one process is sampled like one storage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rlightning.buffer import (
    BufferConfig,
    DataBuffer,
    ReplayBuffer,
    RolloutBuffer,
    SamplerConfig,
    StorageConfig,
)
from rlightning.buffer.sharded_client import _units
from rlightning.buffer.shards import merge, pack, split_counts, unpack
from rlightning.buffer.utils import Storage
from rlightning.errors import ConfigError, InvalidRowError, ReplayError
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import NodeConfig
from rlightning.wire import Batch


def sharded(
    sampler: str = "uniform", *, shards: int = 2, capacity: int = 1000, **given: Any
) -> DataBuffer:
    storage = StorageConfig(
        type="sharded", num_shards=shards, split=given.pop("split", "proportional"),
        unit=given.pop("unit", "transition"), nodes=given.pop("nodes", {}),
    )  # fmt: skip
    options = {"length": given.pop("length")} if "length" in given else {}
    config = BufferConfig(
        type="ReplayBuffer",
        capacity=capacity,
        sampler=SamplerConfig(type=sampler, seed=3, **options),  # type: ignore[arg-type]
        storage=storage,
        **{name: given.pop(name) for name in tuple(given) if name.startswith("node_affinity")},
    )
    buffer = ReplayBuffer(config, **given)
    buffer.init()
    return buffer


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    numbers = np.arange(first, first + count)
    return {"observation": numbers.astype(np.float32), "reward": numbers.astype(np.float32)}


def fill(buffer: DataBuffer, *counts: int) -> None:
    """Puts rows numbered from 1000 * shard into each shard."""
    for shard, count in enumerate(counts):
        if count:
            buffer.storages[shard].add_episode(rows(1000 * shard, count))


def shares(batch: dict[str, np.ndarray]) -> Counter[int]:
    return Counter((batch["reward"] // 1000).astype(int).tolist())


def test_parts_follow_the_sizes_of_the_shards() -> None:
    buffer = sharded()
    fill(buffer, 900, 100)
    total: Counter[int] = Counter()
    for _ in range(50):
        (batch,) = buffer.sample(200)
        assert len(batch["reward"]) == 200
        total += shares(batch)
    # 1,000 of 10,000 are expected of the second shard; five standard deviations of independent
    # draws are 150, and those without replacement vary less.
    assert 850 < total[1] < 1150


def test_every_row_has_the_same_chance() -> None:
    buffer = sharded()
    fill(buffer, 15, 5)
    seen: Counter[float] = Counter()
    for _ in range(1000):
        seen.update(buffer.sample(10)[0]["reward"].tolist())
    assert len(seen) == 20
    counts = np.array([*seen.values()])  # each 500 of 10,000 expected
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi squared of 19: 50 has a chance of 1e-4


def test_an_equal_split_takes_as_many_of_each() -> None:
    buffer = sharded(split="equal")
    fill(buffer, 900, 100)
    assert shares(buffer.sample(200)[0]) == {0: 100, 1: 100}
    assert shares(buffer.sample(201)[0]) == {0: 101, 1: 100}


def test_a_batch_without_replacement_has_no_row_twice() -> None:
    buffer = sharded("batch")
    fill(buffer, 30, 10)
    (batch,) = buffer.sample(40)
    assert sorted(batch["reward"].tolist()) == [*range(30), *range(1000, 1010)]
    with pytest.raises(ValueError, match="41"):
        buffer.sample(41)


def test_all_of_every_shard() -> None:
    buffer = sharded("all")
    fill(buffer, 3, 2)
    assert buffer.sample(shuffle=False)[0]["reward"].tolist() == [0, 1, 2, 1000, 1001]
    assert len(buffer) == 5
    assert buffer.num_transitions() == 5


def test_an_empty_shard_gives_nothing() -> None:
    buffer = sharded()
    with pytest.raises(ValueError, match="nothing is stored"):
        buffer.sample(1)
    fill(buffer, 0, 8)
    assert shares(buffer.sample(8)[0]) == {1: 8}


def test_indices_carry_their_shard() -> None:
    buffer = sharded("prioritised")
    fill(buffer, 6, 4)
    (batch,) = buffer.sample(10)
    owners, _ = unpack(batch["sample_index"])
    np.testing.assert_array_equal(owners, batch["reward"] // 1000)
    # Only row 1002 can be drawn of the second shard from now on.
    second = pack(1, np.arange(4))
    assert buffer.update_priorities(second, [0.0, 0.0, 1.0, 0.0]) == 4
    drawn = buffer.sample(10)[0]
    mine = drawn["reward"][drawn["reward"] >= 1000]
    assert set(mine.tolist()) == {1002.0}
    # A row that was overwritten is left alone, of its own shard.
    generations = np.array([99, 2])
    assert buffer.update_priorities(second[[0, 2]], [5.0, 5.0], generations) == 1
    with pytest.raises(IndexError):
        buffer.update_priorities(pack(2, [0]), [1.0])
    with pytest.raises(IndexError):
        buffer.update_priorities(pack(1, [4]), [1.0])
    with pytest.raises(InvalidRowError, match="priorities"):
        buffer.update_priorities(second, [1.0])
    with pytest.raises(ReplayError, match="prioritised"):
        sharded().update_priorities([0], [1.0])


def test_a_refused_priority_changes_nothing_in_any_shard() -> None:
    buffer = sharded("prioritised")
    fill(buffer, 2, 2)
    with pytest.raises(InvalidRowError, match="finite"):
        buffer.update_priorities(np.concatenate([pack(0, [0]), pack(1, [1])]), [0.0, np.nan])
    assert 0.0 in np.concatenate([buffer.sample(4)[0]["reward"] for _ in range(20)])


def test_weights_are_those_of_one_storage() -> None:
    """(chance * rows)^-beta, divided by the largest of the whole batch."""
    buffer = sharded("prioritised")
    fill(buffer, 6, 2)
    buffer.update_priorities(pack(0, np.arange(6)), [1, 2, 3, 4, 5, 6])
    buffer.update_priorities(pack(1, np.arange(2)), [1, 7])
    config = buffer.config.sampler
    assert config is not None
    chances = [np.arange(1, 7) ** config.alpha, np.array([1.0, 7.0]) ** config.alpha]
    # A shard is chosen by its size, and a row in it by its priority.
    expected = [(p / p.sum() * len(p)) ** -config.beta for p in chances]
    for _ in range(5):
        (batch,) = buffer.sample(8)
        owners, positions = unpack(batch["sample_index"])
        raw = np.array([expected[s][i] for s, i in zip(owners, positions, strict=True)])
        np.testing.assert_allclose(batch["sample_weight"], raw / raw.max(), rtol=1e-5)


def test_a_shard_without_a_long_enough_episode_gives_no_sequence() -> None:
    buffer = sharded("sequence", length=3)
    fill(buffer, 2, 9)
    (batch,) = buffer.sample(6)
    assert batch["reward"].shape == (6, 3)
    assert (batch["reward"] >= 1000).all()


def test_episodes_of_several_shards() -> None:
    buffer = sharded("all", unit="episode")
    fill(buffer, 3, 3)
    assert buffer.sample(shuffle=False)[0]["reward"].tolist() == [[0, 1, 2], [1000, 1001, 1002]]
    buffer.storages[1].add_episode(rows(1010, 2))
    episodes = buffer.sample(shuffle=False)[0]
    assert sorted(map(len, (e["reward"] for e in episodes))) == [2, 3, 3]
    assert buffer.size() == 3


def test_train_workers_share_a_merged_batch() -> None:
    buffer = sharded("batch")
    fill(buffer, 30, 10)
    buffer.init_storage_table(train_worker_num=3)
    parts = buffer.sample(39)
    assert [len(part["reward"]) for part in parts] == [13, 13, 13]
    together = np.concatenate([part["reward"] for part in parts])
    assert len(set(together.tolist())) == 39


def test_train_workers_read_their_shard_where_the_split_is_equal() -> None:
    buffer = sharded(split="equal")
    fill(buffer, 30, 10)
    buffer.init_storage_table(train_worker_num=4)
    parts = buffer.sample(16)
    assert [shares(part) for part in parts] == [{0: 4}, {0: 4}, {1: 4}, {1: 4}]


def test_envs_stay_with_their_shard() -> None:
    buffer = sharded(shards=3)
    assert buffer.table is not None
    ids = [f"env-{i}" for i in range(7)]
    first = [buffer.table.get_storage_idx_for_env(env_id) for env_id in ids]
    assert [first.count(shard) for shard in range(3)] == [3, 2, 2]
    assert first == [buffer.table.get_storage_idx_for_env(env_id) for env_id in ids]


def test_episodes_are_truncated_by_one_call_to_each_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = sharded()
    ids = [f"env-{i}" for i in range(5)]
    for env_id in ids:
        for t in range(3):
            env_ret = EnvRet(env_id, np.zeros(2, np.float32), float(t))
            buffer.add_transition(env_id, env_ret, PolicyResponse(env_id, action=np.int64(t)))
    calls = []

    def truncate(self: Storage, items: list[str]) -> None:
        calls.append((self, items))
        ends(self, items)

    ends = Storage.truncate_episodes
    monkeypatch.setattr(Storage, "truncate_episodes", truncate)
    buffer.truncate_episodes([EnvRet(ids[0], 0), *ids[1:]])
    assert calls == [(buffer.storages[0], ids[::2]), (buffer.storages[1], ids[1::2])]
    assert [len(storage) for storage in buffer.storages.values()] == [6, 4]


def test_nodes_say_which_shard_an_env_and_a_train_worker_has() -> None:
    nodes = {
        "a": NodeConfig(buffer=[1], env=[0, 2], train=[1]),
        "b": NodeConfig(buffer=[0], env=[1, 3], train=[0]),
    }
    buffer = sharded(nodes=nodes, split="equal", node_affinity_env=True, node_affinity_train=True)
    buffer.init_storage_table(train_worker_num=2)
    assert buffer.table is not None
    shards = [buffer.table.get_storage_idx_for_env(f"robot-{i}") for i in range(4)]
    assert shards == [1, 0, 1, 0]
    fill(buffer, 10, 10)
    assert [shares(part) for part in buffer.sample(8)] == [{0: 4}, {1: 4}]
    with pytest.raises(ConfigError, match=r"storage\.nodes.*one storage"):
        sharded(nodes={"a": NodeConfig(buffer=[0, 1])}, node_affinity_env=True)
    with pytest.raises(ConfigError, match=r"node_affinity_train: needs storage\.split 'equal'"):
        sharded(nodes=nodes, node_affinity_train=True)


def test_reading_names_its_shard() -> None:
    buffer = sharded()
    fill(buffer, 3, 2)
    assert buffer.get({"storage_idx": 1, "indices": [1]})["reward"].tolist() == [1001]
    assert buffer[1, 0]["reward"] == 1000
    assert buffer.get(2)["reward"] == 2
    assert {i: len(data["reward"]) for i, data in buffer.get_all().items()} == {0: 3, 1: 2}
    buffer.clear()
    assert buffer.size() == 0


def test_episodes_made_elsewhere_go_to_any_shard() -> None:
    buffer = sharded(capacity=1000)
    for i in range(40):
        buffer.add_episode(rows(i, 1))
    sizes = [len(storage) for storage in buffer.storages.values()]
    assert sum(sizes) == 40
    assert min(sizes) > 5


def test_seeds_repeat_batches_and_shards_differ() -> None:
    buffer = sharded()
    fill(buffer, 50, 50)
    buffer.seed(7)
    first = buffer.sample(20)[0]["reward"]
    buffer.seed(7)
    np.testing.assert_array_equal(first, buffer.sample(20)[0]["reward"])
    own = np.sort(first[first < 1000])
    assert own.tolist() != np.sort(first[first >= 1000] - 1000).tolist()


def test_a_rollout_buffer_gives_all_shards_once() -> None:
    config = BufferConfig(
        type="RolloutBuffer",
        capacity=10,
        storage=StorageConfig(type="sharded", num_shards=2),
    )
    buffer = RolloutBuffer(config)
    buffer.init()
    fill(buffer, 2, 3)
    assert len(buffer.sample()[0]["reward"]) == 5
    assert buffer.size() == 0
    with pytest.raises(ReplayError, match="one storage"):
        _ = buffer.rollouts


def test_memory_is_shared_by_the_shards() -> None:
    config = BufferConfig(
        type="ReplayBuffer",
        capacity=10,
        max_bytes=10_000,
        storage=StorageConfig(type="sharded", num_shards=4),
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    assert [storage.max_bytes for storage in buffer.storages.values()] == [2500] * 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "sharded", "num_shards": 0}, "num_shards"),
        ({"type": "sharded", "addresses": ["nowhere"]}, "expected HOST:PORT"),
        ({"type": "sharded", "addresses": ["a:1", "a:1"]}, "'a:1' comes twice"),
        (
            {"type": "sharded", "addresses": ["a:1"], "num_shards": 2},
            "num_shards 2, but 1 addresses",
        ),
        ({"addresses": ["a:1", "a:2"]}, "need type 'sharded'"),
    ],
)
def test_shards_that_cannot_be_are_config_errors(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StorageConfig(**given)


def test_counts_never_pass_what_a_shard_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        assert split_counts(10, [3, 0, 9], "proportional", rng)[1] == 0
        counts = split_counts(12, [3, 0, 9], "proportional", rng)
        assert counts == [3, 0, 9]
    assert sum(split_counts(5, [10**9, 2], "proportional", rng)) == 5
    assert split_counts(5, [9, 0, 1], "equal", rng) == [3, 0, 2]


def test_parts_that_differ_are_refused() -> None:
    with pytest.raises(InvalidRowError, match="'more'"):
        merge([{"reward": np.zeros(1)}, {"reward": np.zeros(1), "more": np.zeros(1)}])
    with pytest.raises(InvalidRowError, match="reward"):
        merge([{"reward": np.zeros(1)}, {"reward": np.zeros(1, np.int64)}])


def test_parts_with_rewards_by_agent_are_laid_side_by_side() -> None:
    def episodes(count: int, length: int) -> dict[str, Any]:
        return {"reward": {agent: np.zeros((count, length)) for agent in ("a", "b", "c")}}

    assert merge([episodes(1, 4), episodes(2, 4)])["reward"]["b"].shape == (3, 4)
    merged = merge([episodes(1, 4), episodes(2, 5)])
    assert [episode["reward"]["b"].shape for episode in merged] == [(4,), (5,), (5,)]
    assert _units(Batch(1, episodes(2, 5), {})) == 2
    assert _units(Batch(1, episodes(2, 5), {}), 1) == 5
