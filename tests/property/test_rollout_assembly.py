"""Transitions of a group against a naive model that walks each row alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlightning.buffer import BufferConfig, DataBuffer, ReplayBuffer, RolloutBuffer
from rlightning.buffer.pipeline import Item
from rlightning.types import EnvRet
from tests.unit.buffer.scripted import answer, check_order, check_transitions, meta, reward_of

RUNS, AUTORESETS, ENDS = "runs", "autoresets", "ends"  # what a row does in one step


@dataclass
class Message:
    """What happens to some of the rows in one step."""

    fates: list[str]
    terminated: bool
    rows: list[int] | None
    answered: bool
    new_segment: bool
    skipped: bool
    cut: list[int]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[Message]]:
    rows = draw(st.integers(1, 4))
    some = st.sets(st.integers(0, rows - 1), min_size=1).map(sorted)
    message = st.builds(
        Message,
        fates=st.lists(
            st.sampled_from([RUNS, RUNS, RUNS, AUTORESETS, ENDS]), min_size=rows, max_size=rows
        ),
        terminated=st.booleans(),
        rows=st.none() | some,
        answered=st.sampled_from([True] * 7 + [False]),
        new_segment=st.sampled_from([False] * 7 + [True]),
        skipped=st.sampled_from([False] * 7 + [True]),
        cut=st.just([]) | st.just([]) | some,
    )
    return rows, draw(st.lists(message, min_size=1, max_size=25))


@dataclass
class Row:
    """One row of the env and what should become of it."""

    number: int
    episode: int
    step: int = 0
    pending: tuple[int, int] | None = None
    stored: list[dict[str, Any]] = field(default_factory=list)

    @property
    def observation(self) -> tuple[int, int, int]:
        return self.number, self.episode, self.step


class World:
    """Plays a history: makes the EnvRets, and keeps the naive account of each row."""

    def __init__(self, rows: int) -> None:
        self.rows = [Row(i, i) for i in range(rows)]
        self._episodes = rows
        self._resets = [True] * rows
        # Messages are never lost in between; only a row that runs on can show that one was.
        self._gap = [False] * rows

    def play(self, message: Message) -> Item | None:
        chosen = [row for row in self.rows if message.rows is None or row.number in message.rows]
        rewards, dones, finals, observations = [], [], [], []
        for position, row in enumerate(chosen):
            fate = message.fates[row.number]
            if self._gap[row.number] and fate == AUTORESETS:
                fate = RUNS
            self._gap[row.number] = message.skipped
            reward, done, final = self._advance(row, fate)
            rewards.append(reward)
            dones.append(done)
            if final is not None:
                finals.append((position, final))
            observations.append(row.observation)
            if not message.skipped:
                self._account(row, message, reward, done, final)
        if message.skipped:
            return None
        done_flags = np.array(dones)
        env_ret = EnvRet(
            "env",
            np.array(observations, np.float32),
            np.array(rewards),
            done_flags & message.terminated,
            done_flags & (not message.terminated),
            episode_id=np.array([row.episode for row in chosen]),
            step=np.array([row.step for row in chosen]),
            rows=None if message.rows is None else np.array(message.rows, np.int32),
        )
        if finals:
            env_ret.info = {
                "final_rows": np.array([position for position, _ in finals], np.int32),
                "final_observation": np.array([final for _, final in finals], np.float32),
            }
        response = answer(env_ret) if message.answered else None
        for number in message.cut:
            self._cut(self.rows[number])
        return Item(env_ret, response, message.new_segment, message.cut)

    def _advance(self, row: Row, fate: str) -> tuple[float, bool, Any]:
        """Steps the env of one row; returns reward, flag and final observation."""
        if self._resets[row.number]:
            self._resets[row.number] = False
            self._begin(row)
            return 0.0, False, None
        row.step += 1
        reward = float(reward_of(*row.observation))
        if fate == RUNS:
            return reward, False, None
        if fate == ENDS:
            self._resets[row.number] = True
            return reward, True, None
        final = row.observation
        self._begin(row)
        return reward, True, final

    def _begin(self, row: Row) -> None:
        row.episode, row.step = self._episodes, 0
        self._episodes += 1

    def _account(self, row: Row, message: Message, reward: float, done: bool, final: Any) -> None:
        shown = row.observation if final is None else final
        if row.pending is not None and row.pending[0] >= 0:
            episode, step = row.pending
            if not message.new_segment and (episode, step + 1) == shown[1:]:
                row.stored.append(
                    {"before": (row.number, episode, step), "done": done, "reward": reward}
                )
            else:
                self._cut(row)
        elif row.pending is not None:
            self._cut(row)
        row.pending = None
        if not done or final is not None:
            unanswered = (-1, -1)
            row.pending = (row.episode, row.step) if message.answered else unanswered

    def _cut(self, row: Row) -> None:
        if row.pending is not None and row.stored and not row.stored[-1]["done"]:
            row.stored[-1]["cut"] = True
        row.pending = None


def check(columns: dict[str, Any], rows: list[Row]) -> None:
    expected = [transition for row in rows for transition in row.stored]
    assert len(columns.get("reward", [])) == len(expected)
    if not expected:
        return
    assert check_transitions(columns) == len(expected)
    before = np.array([transition["before"] for transition in expected])
    np.testing.assert_array_equal(columns["observation"], before)
    done = columns["terminated"] | columns["truncated"]
    np.testing.assert_array_equal(done, [transition["done"] for transition in expected])
    cut = [transition.get("cut", False) for transition in expected]
    np.testing.assert_array_equal(columns["cut"], cut)


@settings(max_examples=300, deadline=None)
@given(histories())
def test_every_row_is_paired_as_if_it_were_alone(history: tuple[int, list[Message]]) -> None:
    rows, messages = history
    buffer = RolloutBuffer(
        BufferConfig(type="RolloutBuffer", capacity=1, rollout_length=30, max_rollouts=1)
    )
    buffer.init()
    buffer.open_group(meta(rows))
    world = World(rows)
    for message in messages:
        item = world.play(message)
        if item is not None:
            buffer.commit(buffer.prepare("env", [item]))
    check(buffer.get_all(), world.rows)
    counters = buffer.counters
    assert counters.completed == sum(len(row.stored) for row in world.rows)


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 4), st.integers(1, 3))
def test_rollouts_are_the_same_transitions_in_the_same_order(
    history: tuple[int, list[Message]], length: int, max_rollouts: int
) -> None:
    """Rows that fall behind others of their env make those lose some; the others lose none."""
    rows, messages = history
    buffer = RolloutBuffer(
        BufferConfig(
            type="RolloutBuffer", capacity=1, rollout_length=length, max_rollouts=max_rollouts
        )
    )
    buffer.init()
    buffer.open_group(meta(rows))
    world = World(rows)
    seen: list[list[tuple[int, ...]]] = [[] for _ in range(rows)]
    for message in messages:
        item = world.play(message)
        if item is None:
            continue
        prepared = buffer.prepare("env", [item])
        while not buffer.has_room(prepared):
            rollout = buffer.rollouts.take()
            assert rollout is not None
            columns = rollout.columns()
            assert columns["reward"].shape == (length, rows)
            check_transitions(columns)
            check_order(columns, lossless=False)
            for row in range(rows):
                seen[row] += map(tuple, columns["observation"][:, row].astype(int).tolist())
            buffer.rollouts.release(rollout)
            prepared = buffer.prepare("env", [item])
        buffer.commit(prepared)
        assert buffer.rollouts.held <= max_rollouts
    for row in world.rows:
        stored = [transition["before"] for transition in row.stored]
        got = iter(stored)
        assert all(transition in got for transition in seen[row.number])  # in order, none twice


def ended_beside_a_lost_one() -> tuple[int, list[Message]]:
    """One row ends and shows it, another shows the next episode already and has nothing pending."""
    message = Message([RUNS] * 2, False, None, True, False, False, cut=[1])
    return 2, [message, replace(message, fates=[ENDS, AUTORESETS], cut=[])]


@settings(max_examples=100, deadline=None)
@given(histories())
@example(ended_beside_a_lost_one())
def test_finished_episodes_are_stored_as_they_end(history: tuple[int, list[Message]]) -> None:
    rows, messages = history
    buffer: DataBuffer = ReplayBuffer(
        BufferConfig(type="ReplayBuffer", capacity=1000, auto_truncate_episode=True)
    )
    buffer.init([meta(rows)])
    world = World(rows)
    for message in messages:
        item = world.play(message)
        if item is not None:
            buffer.commit(buffer.prepare("env", [item]))
    try:
        buffer.truncate_one_episode("env")
    except KeyError:
        assert not any(row.stored for row in world.rows)
    for row in world.rows:
        world._cut(row)
    columns = buffer.get_all()
    if columns:
        # Episodes lie in the order of their ends; sorted by row they are as they were.
        order = np.argsort(columns["observation"][:, 0], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    check(columns, world.rows)
