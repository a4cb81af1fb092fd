"""Recurrent state: what a policy remembers of the episode of each row, from step to step."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlightning.errors import InvalidRequestError, PolicyError, ResourceExhaustedError
from rlightning.policy.base_policy import BasePolicy
from rlightning.types import EnvRet
from rlightning.utils.conversions import array_of, to_device

_IntArray = npt.NDArray[np.int64]

_NO_EPISODE = -1


class GroupState:
    """The state of the rows of one group. Its tensors belong to the inference thread.

    Args:
        rows: How many rows it has; None: as many as ask.
        leaves: What it is now, tensors [rows, ...]; None: every row is at the beginning.
        carried: It came with one request, and is of the rows of that.

    Attributes:
        rows: As given.
        carried: As given.
        nbytes: What it may take, as a `StateBudget` counts it.
    """

    __slots__ = ("carried", "episode_id", "leaves", "nbytes", "rows")

    def __init__(
        self, rows: int | None, leaves: list[Tensor] | None = None, *, carried: bool = False
    ) -> None:
        self.rows = rows
        self.leaves = leaves
        self.carried = carried
        self.episode_id = np.full(rows or 0, _NO_EPISODE, np.int64)
        self.nbytes = 0


@dataclass(slots=True)
class StateUse:
    """The part of a group's state that one request reads and writes.

    Attributes:
        group: Whose state.
        rows: Which rows, int64 [k].
        episode_id: The episode that each row is in, int64 [k]; None if the env counts none.
        fresh: Whether all of them begin anew, though no episode ended.
    """

    group: GroupState
    rows: _IntArray
    episode_id: _IntArray | None
    fresh: bool

    @staticmethod
    def of(group: GroupState, env_ret: EnvRet, count: int, *, fresh: bool) -> StateUse:
        """Returns the use that a request makes.

        Args:
            group: State of the group that asks.
            env_ret: The request.
            count: How many rows its observation has.
            fresh: Begin anew.

        Raises:
            InvalidRequestError: `rows` or `episode_id` do not fit the observation, or the group.
        """
        if group.carried:
            if group.rows not in (None, count):
                raise InvalidRequestError(f"state: expected {count} rows, got {group.rows}")
            return StateUse(group, np.arange(count, dtype=np.int64), None, fresh)
        limit = np.iinfo(np.int32).max if group.rows is None else group.rows
        if env_ret.rows is None:
            rows = np.arange(count, dtype=np.int64)
        else:
            rows = np.atleast_1d(np.asarray(env_ret.rows, np.int64))
            if len(rows) != count:
                raise InvalidRequestError(f"rows: expected {count} rows, got {len(rows)}")
            if count > 1 and not (np.diff(rows) > 0).all():
                raise InvalidRequestError("rows: expected ascending rows, each once")
        if rows[0] < 0 or rows[-1] >= limit:
            raise InvalidRequestError(
                f"rows: the policy keeps state for rows 0 to {limit - 1}, as many as the spec "
                f"declares (num_envs), got rows {rows[0]} to {rows[-1]}"
            )
        episode_id = env_ret.episode_id
        if episode_id is not None:
            episode_id = np.atleast_1d(np.asarray(episode_id, np.int64))
            if len(episode_id) != count:
                raise InvalidRequestError(
                    f"episode_id: expected {count} episodes, got {len(episode_id)}"
                )
        return StateUse(group, rows, episode_id, fresh)


class StateLayout:
    """How the state of a policy looks and begins, and where the rows of a batch have theirs.

    For the inference thread, but for `row_bytes`, `read_carried` and `arrays`.

    Args:
        policy: Its network exists, and it keeps state.

    Attributes:
        row_bytes: Size of the state of one row.

    Raises:
        PolicyError: `initial_state` returns something else than tensors [1, ...] for one row.
    """

    def __init__(self, policy: BasePolicy) -> None:
        self._policy = policy
        self._example: Any = None
        self._initial: list[Tensor] = []
        self.refresh()
        self.row_bytes = sum(leaf.numel() * leaf.element_size() for leaf in self._initial)

    @staticmethod
    def of(policy: BasePolicy) -> StateLayout | None:
        """Returns the layout of a policy's state; None if it keeps none."""
        with torch.inference_mode():
            return None if policy.initial_state(1) is None else StateLayout(policy)

    @property
    def initial(self) -> Any:
        """The state with which one row begins, as arrays [1, ...]."""
        return self._nest([array_of(leaf) for leaf in self._initial])

    def refresh(self) -> None:
        """Asks the policy again how rows begin: that may depend on its weights."""
        with torch.inference_mode():
            example = self._policy.initial_state(1)
        leaves = list(_leaves(example, "initial_state"))
        for name, leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (1,):
                raise PolicyError(
                    f"{type(self._policy).__name__}.initial_state(1): '{name}' came as "
                    f"{_show(leaf)}, expected a tensor whose leading dimension is that 1 row"
                )
        self._example = example
        self._initial = [leaf.to(self._policy.device) for _, leaf in leaves]

    def gather(self, uses: Sequence[StateUse], ended: Tensor) -> list[Tensor]:
        """Returns the state of the rows of a batch, tensors [B, ...] of their own.

        Args:
            uses: Whose they are, in order.
            ended: Whether each row begins an episode: bool [B] on the policy's device.
        """
        parts = [self._read(use) for use in uses]
        fresh = np.concatenate([_begins(use) for use in uses])
        if fresh.any():
            ended = ended | torch.from_numpy(fresh).to(ended.device)
        state = []
        for i, initial in enumerate(self._initial):
            kept = parts[0][i] if len(parts) == 1 else torch.cat([part[i] for part in parts])
            state.append(torch.where(ended.view(-1, *(1,) * (kept.ndim - 1)), initial, kept))
        return state

    def scatter(
        self, uses: Sequence[StateUse], leaves: Sequence[Tensor], but: Container[int] = ()
    ) -> None:
        """Keeps what became of the state of the rows of a batch.

        Args:
            uses: As `gather` got them.
            leaves: Tensors [B, ...].
            but: Which of the uses keep what they had.
        """
        start = 0
        for i, use in enumerate(uses):
            stop = start + len(use.rows)
            if i in but:
                start = stop
                continue
            group = use.group
            assert group.leaves is not None
            for kept, leaf in zip(group.leaves, leaves, strict=True):
                kept[_index(use.rows)] = leaf[start:stop]
            group.episode_id[use.rows] = _NO_EPISODE if use.episode_id is None else use.episode_id
            start = stop

    def nest(self, leaves: Sequence[Tensor]) -> Any:
        """Returns tensors in the structure of the policy's state."""
        return self._nest(leaves)

    def flatten(self, state: Any, rows: int, name: str) -> list[Tensor]:
        """Returns the tensors of a state that is like that of the policy.

        Args:
            state: A nest of tensors or arrays [rows, ...].
            rows: Its rows.
            name: What it is, for the error.

        Raises:
            PolicyError: It has another structure, dtype or shape; the message names the leaf.
        """
        expected = list(_leaves(self._example, name))
        got = dict(_leaves(state, name))
        if got.keys() != {leaf for leaf, _ in expected}:
            names = ", ".join(f"'{leaf}'" for leaf, _ in expected)
            raise PolicyError(f"{name}: expected {names}, got {', '.join(map(repr, got))}")
        leaves = []
        for leaf, example in expected:
            value = got[leaf]
            tensor = to_device(value, example.device)
            shape = (rows, *example.shape[1:])
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype != example.dtype
                or (tensor.shape != shape)
            ):
                dtype = str(example.dtype).removeprefix("torch.")
                raise PolicyError(f"'{leaf}' came as {_show(value)}, expected {dtype}{list(shape)}")
            leaves.append(tensor)
        return leaves

    @staticmethod
    def begin_carried() -> GroupState:
        """Returns the state for one request whose rows begin anew."""
        return GroupState(None, carried=True)

    def read_carried(self, state: Any) -> GroupState:
        """Returns the state that a client sent with one request.

        Raises:
            InvalidRequestError: It is not like that of the policy; the message names the leaf.
        """
        _, first = next(_leaves(state, "state"), ("", None))
        rows = len(first) if isinstance(first, np.ndarray) and first.ndim else 0
        try:
            leaves = [leaf.clone() for leaf in self.flatten(state, rows, "state")]
        except PolicyError as error:
            raise InvalidRequestError(str(error)) from error
        return GroupState(rows, leaves, carried=True)

    def arrays(self, group: GroupState) -> Any:
        """Returns the state of a group as arrays; call when no request uses it."""
        assert group.leaves is not None
        return self._nest([array_of(leaf) for leaf in group.leaves])

    def _read(self, use: StateUse) -> list[Tensor]:
        """Returns what is kept for the rows of one request: views, or copies."""
        group = use.group
        needed = max(int(use.rows[-1]) + 1, group.rows or 0)
        have = 0 if group.leaves is None else len(group.leaves[0])
        if have < needed:
            more = [leaf.expand(needed - have, *leaf.shape[1:]) for leaf in self._initial]
            if group.leaves is None:
                group.leaves = [leaf.clone() for leaf in more]
            else:
                group.leaves = [torch.cat(pair) for pair in zip(group.leaves, more, strict=True)]
            missing = needed - len(group.episode_id)
            group.episode_id = np.append(group.episode_id, np.full(missing, _NO_EPISODE, np.int64))
        assert group.leaves is not None
        return [leaf[_index(use.rows)] for leaf in group.leaves]

    def _nest(self, leaves: Sequence[Any]) -> Any:
        return _fill(self._example, iter(leaves))


class StateBudget:
    """How much state is kept in all, and may be.

    Args:
        session_bytes: What the state of one session may take.
        total_bytes: What that of all together may take.

    Attributes:
        held_bytes: What is kept now.
        groups: Of how many sessions.
    """

    def __init__(self, session_bytes: int, total_bytes: int) -> None:
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self.held_bytes = 0
        self.groups = 0

    def open(self, rows: int, row_bytes: int) -> GroupState:
        """Returns fresh state for a group.

        Raises:
            ResourceExhaustedError: There is no room for so many rows.
        """
        nbytes = rows * max(1, row_bytes)
        if nbytes > self._session_bytes:
            raise ResourceExhaustedError(
                f"the state of {rows} rows takes {nbytes} bytes; policy.max_session_state_bytes of "
                f"the server allows {self._session_bytes}",
                reason="STATE_TOO_LARGE",
            )
        if self.held_bytes + nbytes > self._total_bytes:
            raise ResourceExhaustedError(
                f"{self.held_bytes} bytes of state are kept for other sessions, {nbytes} more "
                f"exceed policy.max_state_bytes of the server, {self._total_bytes}",
                reason="STATE_TOO_LARGE",
            )
        state = GroupState(rows)
        state.nbytes = nbytes
        self.held_bytes += nbytes
        self.groups += 1
        return state

    def close(self, state: GroupState) -> None:
        """Lets go of a group's state; a request that is under way may still use it."""
        self.held_bytes -= state.nbytes
        state.nbytes = 0
        self.groups -= 1


def _begins(use: StateUse) -> npt.NDArray[np.bool_]:
    """Returns which rows of a request begin anew by what its sender says, bool [k]."""
    if use.fresh:
        return np.ones(len(use.rows), bool)
    if use.episode_id is None:
        return np.zeros(len(use.rows), bool)
    # An episode may have ended at a step about which nobody asked.
    known = use.group.episode_id[use.rows]
    begins: npt.NDArray[np.bool_] = (known != _NO_EPISODE) & (known != use.episode_id)
    return begins


def _index(rows: _IntArray) -> Any:
    """Returns the index of rows in a tensor: a slice, which copies nothing, where they are one."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.from_numpy(rows)


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(state, tuple):
        for i, value in enumerate(state):
            yield from _leaves(value, f"{name}[{i}]")
    else:
        yield name, state


def _fill(example: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(example, dict):
        return {key: _fill(value, leaves) for key, value in example.items()}
    if isinstance(example, tuple):
        return tuple(_fill(value, leaves) for value in example)
    return next(leaves)


def _show(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
