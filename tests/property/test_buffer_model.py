"""The buffer against a naive one of Python lists: adds, truncations, wraps, samples, clears, restarts."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlightning.buffer import BufferConfig, ReplayBuffer, SamplerConfig, StorageConfig
from rlightning.buffer.durable import checkpoint
from rlightning.buffer.durable.checkpoint import read_checkpoint, write_checkpoint
from rlightning.buffer.durable.state import dump_sampler, dump_storage, load_sampler, load_storage
from rlightning.types import EnvRet, PolicyResponse

FRAMES = 3
Row = dict[str, Any]


async def _nothing() -> None:
    return


class NaiveEnv:
    """One env whose observations are stacks of frames, and what a buffer should make of it."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id
        self.frame = 0
        self.frames: deque[int] = deque([0] * FRAMES, FRAMES)
        self.pending: Row | None = None
        self.rows: list[Row] = []

    def see(self, *, skip: bool) -> np.ndarray:
        """Returns the next observation; with `skip` its older frames are not those before it."""
        self.frame += 1
        if skip:
            self.frames.extend([self.frame + 100] * FRAMES)
        self.frames.append(self.frame)
        return np.array([[f % 250, len(self.env_id)] for f in self.frames], np.uint8)


class BufferModel(RuleBasedStateMachine):
    """Each rule does the same to both; what is stored must be equal afterwards."""

    @initialize(
        capacity=st.integers(3, 24),
        unit=st.sampled_from(["transition", "episode"]),
        auto=st.booleans(),
        stacks=st.booleans(),
    )
    def make(self, capacity: int, unit: Any, auto: bool, stacks: bool) -> None:
        self.capacity, self.unit, self.auto = capacity, unit, auto
        storage = StorageConfig(
            unit=unit, frame_stack={"observation": {"axis": 0}} if stacks else {}
        )
        config = BufferConfig(
            type="ReplayBuffer",
            capacity=capacity,
            auto_truncate_episode=auto,
            sampler=SamplerConfig(type="uniform", seed=1),
            storage=storage,
        )
        self.buffer = ReplayBuffer(config)
        self.buffer.init()
        self.envs = {env_id: NaiveEnv(env_id) for env_id in ("a", "bb")}
        self.episodes: list[list[Row]] = []  # with their places, oldest first
        self.places: list[int] = []
        self.pointer = 0
        self.ring: list[Row | None] = [None] * capacity

    # The naive buffer.

    def _store(self, rows: list[Row]) -> None:
        if not rows:
            return
        if self.unit == "transition":
            for row in rows[-self.capacity :]:
                if len(rows) > self.capacity and row is rows[-self.capacity]:
                    self.pointer = 0
                self.ring[self.pointer] = row
                self.pointer = (self.pointer + 1) % self.capacity
            return
        rows = rows[-self.capacity :]
        if self.pointer + len(rows) > self.capacity:
            self._drop(self.pointer, self.capacity)
            self.pointer = 0
        self._drop(self.pointer, self.pointer + len(rows))
        self.episodes.append(rows)
        self.places.append(self.pointer)
        self.pointer += len(rows)

    def _drop(self, start: int, stop: int) -> None:
        kept = [
            (place, rows)
            for place, rows in zip(self.places, self.episodes, strict=True)
            if place + len(rows) <= start or place >= stop
        ]
        self.places = [place for place, _ in kept]
        self.episodes = [rows for _, rows in kept]

    def _end(self, env: NaiveEnv) -> None:
        if env.rows and not (env.rows[-1]["terminated"] or env.rows[-1]["cut"]):
            env.rows[-1]["cut"] = True
        rows, env.rows, env.pending = env.rows, [], None
        self._store(rows)

    def _expected(self) -> list[Row]:
        if self.unit == "transition":
            return [row for row in self.ring if row is not None]
        return [row for rows in self.episodes for row in rows]

    # What may happen.

    @rule(
        env_id=st.sampled_from(["a", "bb"]),
        done=st.booleans(),
        skip=st.booleans(),
        truncated=st.integers(0, 5),
    )
    def add(self, env_id: str, done: bool, skip: bool, truncated: int) -> None:
        env = self.envs[env_id]
        if len(env.rows) >= self.capacity - 1:
            return self.truncate(env_id)
        observation, reward = env.see(skip=skip), float(env.frame)
        done = done and env.pending is not None
        env_ret = EnvRet(env_id, observation, reward, done)
        response = PolicyResponse(env_id, action=np.int64(env.frame))
        self.buffer.add_transition(env_id, env_ret, response, truncated == 0)
        if env.pending is not None:
            env.pending |= {"next_observation": observation, "reward": reward, "terminated": done}
            env.rows.append(env.pending)
        # The observation that ends an episode begins none: the next one comes from a reset.
        env.pending = None
        if not done:
            env.pending = {"observation": observation, "action": env.frame, "cut": False}
        if (done and self.auto) or truncated == 0:
            self._end(env)
        return None

    @rule(env_id=st.sampled_from(["a", "bb"]))
    def truncate(self, env_id: str) -> None:
        if env_id in self.buffer.env_ids:
            self.buffer.truncate_one_episode(env_id)
            self._end(self.envs[env_id])

    @rule(length=st.integers(1, 9))
    def add_episode(self, length: int) -> None:
        if not self.buffer.storages[0].container.row_bytes:
            return
        env = NaiveEnv("outside")
        seen = np.stack([env.see(skip=False) for _ in range(length + 1)])
        flags = np.zeros(length, np.bool_)
        counts = np.arange(length)
        self.buffer.add_episode(
            {
                "observation": seen[:-1],
                "next_observation": seen[1:],
                "reward": np.ones(length, np.float32),
                "terminated": flags,
                "truncated": flags,
                "cut": flags,
                "action": counts,
                "policy_version": counts,
                "action_source": counts.astype(np.int8),
                "episode_id": counts,
                "step": counts,
            }
        )
        self._store(
            [
                {
                    "observation": seen[t],
                    "next_observation": seen[t + 1],
                    "reward": 1.0,
                    "terminated": False,
                    "cut": False,
                    "action": t,
                }
                for t in range(length)
            ]
        )

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.pointer, self.episodes, self.places = 0, [], []
        self.ring = [None] * self.capacity

    @rule(now=st.integers(0, 7))
    def restart(self, now: int) -> None:
        """Another process goes on with what this one wrote; not too often, since it takes long."""
        if now:
            return
        storage, sampler = dump_storage(self.buffer.storages[0]), dump_sampler(self.buffer.sampler)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            state = {"storage": storage, "sampler": sampler}
            with patch.object(checkpoint, "sync"), patch.object(checkpoint, "sync_folder"):
                asyncio.run(write_checkpoint(path, state, notes={}, before_rename=_nothing))
            state = read_checkpoint(path)
            self.buffer = ReplayBuffer(self.buffer.config)
            self.buffer.init()
            load_storage(self.buffer.storages[0], state["storage"])
            load_sampler(self.buffer.sampler, state["sampler"])

    @precondition(lambda self: self.buffer.size())
    @rule(share=st.floats(0.1, 1.0))
    def sample(self, share: float) -> None:
        count = max(1, int(share * self.buffer.size()))
        (batch,) = self.buffer.sample(count)
        rows = self._expected()
        parts = batch if isinstance(batch, list) else [batch]
        for part in parts:
            for seen, after, reward in zip(
                part["observation"].reshape(-1, FRAMES, 2),
                part["next_observation"].reshape(-1, FRAMES, 2),
                part["reward"].reshape(-1),
                strict=True,
            ):
                assert any(
                    np.array_equal(seen, row["observation"])
                    and np.array_equal(after, row["next_observation"])
                    and reward == row["reward"]
                    for row in rows
                )

    @invariant()
    def they_are_equal(self) -> None:
        if not hasattr(self, "buffer"):
            return
        expected = self._expected()
        assert self.buffer.num_transitions() == len(expected)
        if self.unit == "episode":
            assert self.buffer.size() == len(self.episodes)
        if not expected:
            return
        columns = self.buffer.get_all()
        for name in expected[0]:
            np.testing.assert_array_equal(columns[name], np.stack([row[name] for row in expected]))


BufferModel.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestBufferModel = BufferModel.TestCase
