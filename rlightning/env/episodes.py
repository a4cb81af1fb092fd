"""Counts the episodes of a group's rows and keeps the finished ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

KEPT_EPISODES = 10_000


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode.

    Attributes:
        env_id: The group.
        row: Its row.
        episode_id: Id of the episode, unique within the group.
        episode_return: Sum of its rewards.
        length: Its steps.
        seed: Seed of the row's first reset; None if it had none.
        policy_version: Version of the weights that chose its last action; 0 if not known.
        reason: `terminated`; `truncated`, also when its client left; or `cut`, when the env failed
            in the middle of it.
        ts_end_ns: When it ended: Unix time in nanoseconds.
    """

    env_id: str
    row: int
    episode_id: int
    episode_return: float
    length: int
    seed: int | None
    policy_version: int
    reason: str
    ts_end_ns: int


class EpisodeLog:
    """The last finished episodes of all groups of a process, for readers that come by now and then.

    Belongs to one event loop or thread.

    Args:
        capacity: How many are kept.
    """

    def __init__(self, capacity: int = KEPT_EPISODES) -> None:
        self._records: deque[EpisodeRecord] = deque(maxlen=capacity)
        self.cursor = 0
        """How many there have been: where a reader that has seen all of them stands."""

    def append(self, record: EpisodeRecord) -> None:
        """Adds one; the oldest gives way when there is no room."""
        self._records.append(record)
        self.cursor += 1

    def since(self, cursor: int) -> list[EpisodeRecord]:
        """Returns those after a cursor that are still kept, oldest first; all of them for 0."""
        # A reader that outlived the process it read from begins again.
        new = self.cursor - cursor if 0 <= cursor <= self.cursor else self.cursor
        return list(islice(self._records, max(0, len(self._records) - new), None))


class RowCounter:
    """Ids, steps and returns of the running episodes of a group; call `begin` first.

    Args:
        env_id: The group.
        rows: How many rows it has.
        log: Takes what finishes.
        seeds: Seeds of the rows' first resets.

    Attributes:
        episode_id: Of each row's running episode, int64 [rows]; never written to, but replaced.
        step: Of each row within it, int64 [rows]; never written to, but replaced.
    """

    def __init__(
        self, env_id: str, rows: int, log: EpisodeLog, seeds: Sequence[int] | None = None
    ) -> None:
        self._env_id = env_id
        self._rows = rows
        self._log = log
        self._seeds = seeds
        self._next_id = 0
        self._returns = np.zeros(rows)
        self._whole = np.ones(rows, bool)
        self.episode_id = np.zeros(rows, np.int64)
        self.step = np.zeros(rows, np.int64)

    def count_from(self, episode_id: int) -> None:
        """Gives the next episode that begins this id, and those after it the following ones."""
        self._next_id = episode_id

    def begin(self) -> None:
        """Begins a new episode in every row."""
        self.episode_id = np.arange(self._next_id, self._next_id + self._rows, dtype=np.int64)
        self._next_id += self._rows
        self.step = np.zeros(self._rows, np.int64)
        self._returns = np.zeros(self._rows)
        self._whole = np.ones(self._rows, bool)

    def follow(self, episode_id: npt.NDArray[np.int64], step: npt.NDArray[np.int64]) -> None:
        """Takes over the numbers of an env that counts by itself, after `begin` or `advance`.

        An episode that is met after its first step is not recorded: its return is not known.
        """
        self._whole &= step == self.step
        self.episode_id, self.step = episode_id, step

    def advance(
        self,
        reward: npt.NDArray[np.float32],
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        policy_version: int,
        rows: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.intp]:
        """Counts a step of some rows; records the episodes that it ends and begins the next ones.

        Args:
            reward: Of each of these rows.
            terminated: Likewise.
            truncated: Likewise.
            policy_version: Version of the weights that chose the action.
            rows: Which rows, ascending; None: all.

        Returns:
            The rows that ended, ascending.
        """
        self.step = self.step.copy()
        stepped = slice(None) if rows is None else rows
        self._returns[stepped] += reward
        self.step[stepped] += 1
        positions = np.flatnonzero(terminated | truncated)
        ended = positions if rows is None else rows[positions].astype(np.intp)
        if ended.size:
            for row, position in zip(ended.tolist(), positions.tolist(), strict=True):
                reason = "terminated" if terminated[position] else "truncated"
                self._record(row, reason, policy_version)
            self._returns[ended] = 0.0
            self._whole[ended] = True
            self.step[ended] = 0
            self.episode_id = self.episode_id.copy()
            self.episode_id[ended] = np.arange(self._next_id, self._next_id + ended.size)
            self._next_id += ended.size
        return ended

    def cut(self, policy_version: int, reason: str = "cut") -> None:
        """Records the running episodes, as far as they have steps, as ended for this reason."""
        for row in np.flatnonzero(self.step).tolist():
            self._record(row, reason, policy_version)

    def _record(self, row: int, reason: str, policy_version: int) -> None:
        if not self._whole[row]:
            return
        self._log.append(
            EpisodeRecord(
                env_id=self._env_id,
                row=row,
                episode_id=int(self.episode_id[row]),
                episode_return=float(self._returns[row]),
                length=int(self.step[row]),
                seed=None if self._seeds is None else self._seeds[row],
                policy_version=policy_version,
                reason=reason,
                ts_end_ns=time.time_ns(),
            )
        )
