"""One table of a buffer server: what it counts, and who writes to it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlightning.buffer import Where
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.feeds import TableFeed
from rlightning.buffer.pipeline import Item
from rlightning.errors import ConfigError, InvalidRequestError
from rlightning.types import EnvMeta, MultiAgentEnvRet, MultiAgentPolicyResponse
from rlightning.utils.config import BufferConfig
from tests.unit.buffer.scripted import ScriptedEnv, answer, meta

SEQUENCES = {"type": "sequence", "length": 4}


def made(**config: Any) -> BufferTable:
    settings = {"type": "ReplayBuffer", "capacity": 100, "auto_truncate_episode": True, **config}
    return BufferTable("default", BufferConfig(**settings))


def store(table: BufferTable, env: ScriptedEnv, steps: int) -> None:
    """Stores so many steps of an env, the version of each its number."""
    table.open_writer(env.meta, "writer")
    env_ret = env.reset()
    for step in range(steps):
        assert table.try_insert(env.env_id, [Item(env_ret, answer(env_ret, step))])
        env_ret = env.step()
    assert table.try_insert(env.env_id, [Item(env_ret)])


def test_a_batch_of_all_that_is_wanted_counts_what_is_in_it() -> None:
    limit = {"samples_per_insert": 1, "error_buffer": 100}
    table = made(sampler={"type": "all"}, rate_limiter=limit)
    store(table, ScriptedEnv(1, lambda row, episode: (1, True)), 10)
    taken = table.take(where=Where(min_version=6))
    assert taken is not None
    assert table.limiter is not None
    assert (taken.transitions, table.sampled_total, table.limiter.sampled) == (4, 4, 4)


def test_a_sequence_counts_as_its_transitions() -> None:
    limit = {"samples_per_insert": 8, "error_buffer": 100}
    table = made(sampler=SEQUENCES, rate_limiter=limit)
    store(table, ScriptedEnv(1, lambda row, episode: (6, True)), 12)
    taken = table.take(3)
    assert taken is not None
    assert table.limiter is not None
    assert (taken.transitions, table.sampled_total, table.limiter.sampled) == (12, 12, 12)
    TableFeed(table, 48)
    with pytest.raises(InvalidRequestError, match="error_buffer of .* at most 48 at once"):
        TableFeed(table, 49)


def test_after_a_clear_neither_side_waits_for_what_was_before() -> None:
    limit = {"samples_per_insert": 1, "error_buffer": 20}
    table, env = made(rate_limiter=limit), ScriptedEnv(1, lambda row, episode: (1, True))
    store(table, env, 21)
    assert not table.try_insert(env.env_id, [Item(env.reset())])
    assert table.clear() == 21
    store(table, env, 16)
    assert table.take(16) is not None
    assert table.limiter is not None
    assert table.limiter.state() == {"inserted": 16, "sampled": 16}


def test_transitions_need_the_same_memory_however_they_are_sampled() -> None:
    plain, table = made(), made(sampler=SEQUENCES)
    for one in (plain, table):
        store(one, ScriptedEnv(1, lambda row, episode: (6, True)), 12)
    assert table.transit_bytes(12) == plain.transit_bytes(12) > 0


def test_batches_with_rewards_by_agent_are_counted_and_written_anew() -> None:
    table, agents = made(), ("left", "right", "third")
    table.open_writer(EnvMeta("env"), "writer")
    for step in range(9):
        env_ret = MultiAgentEnvRet(
            "env",
            {agent: np.full(2**13, step, np.float32) for agent in agents},
            dict.fromkeys(agents, float(step)),
            dict.fromkeys(agents, step == 8),
            dict.fromkeys(agents, False),
        )
        response = MultiAgentPolicyResponse("env", action=dict.fromkeys(agents, np.int64(step)))
        assert table.try_insert("env", [Item(env_ret, response)])
    taken = table.take(5)
    assert taken is not None
    assert (taken.transitions, table.sampled_total) == (5, 5)
    used = taken.columns()["observation"]["left"]
    table.copied(taken)
    again = table.take(5)
    assert again is not None
    columns = again.columns()
    assert np.shares_memory(columns["observation"]["left"], used)
    np.testing.assert_array_equal(columns["reward"]["third"], columns["action"]["left"] + 1)


def test_a_writer_whose_env_cannot_be_stored_leaves_nothing_of_the_one_before() -> None:
    table = made(type="RolloutBuffer")
    table.open_writer(meta(1), "one")
    endless = gym.spaces.Sequence(gym.spaces.Discrete(2))
    with pytest.raises(ConfigError, match="no fixed shape"):
        table.open_writer(meta(1, observation=endless), "two")
    assert not table.producers
    table.open_writer(meta(1), "one")  # it comes back
    assert table.rollout_rows == 1
