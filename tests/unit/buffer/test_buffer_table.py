"""One table of a buffer server: what it counts, and who writes to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.pipeline import Item
from rlightning.types import EnvMeta, MultiAgentEnvRet, MultiAgentPolicyResponse
from rlightning.utils.config import BufferConfig


def made(**config: Any) -> BufferTable:
    settings = {"type": "ReplayBuffer", "capacity": 100, "auto_truncate_episode": True, **config}
    return BufferTable("default", BufferConfig(**settings))


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
