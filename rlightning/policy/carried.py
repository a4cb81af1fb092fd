"""Recurrent state that a client carries for its group, so that it outlives the policy server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError, InvalidRequestError
from rlightning.types import EnvRet
from rlightning.utils.conversions import map_leaves

_NO_EPISODE = -1


class CarriedState:
    """The state of the rows of one group, as arrays.

    Args:
        initial: That with which a row begins an episode; leaves [1, ...].
        rows: How many rows the group has.

    Raises:
        CodecError: `initial` is something else.
    """

    def __init__(self, initial: Any, rows: int) -> None:
        def check(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (1,):
                raise CodecError("initial_state: expected arrays [1, ...]")
            return leaf.copy()  # what came is a view of the message

        self._initial = map_leaves(check, initial)
        self._rows = rows
        self.reset()

    def reset(self) -> None:
        """Lets every row begin anew."""
        self._state = map_leaves(lambda leaf: np.repeat(leaf, self._rows, axis=0), self._initial)
        self._episode_id = np.full(self._rows, _NO_EPISODE, np.int64)

    def of(self, env_ret: EnvRet) -> Any:
        """Returns the state of the rows of an EnvRet: leaves [k, ...] of their own.

        Raises:
            InvalidRequestError: The group has no such rows.
        """
        rows, episode_id = self._places(env_ret), env_ret.episode_id
        if episode_id is None:
            return map_leaves(lambda leaf: leaf[rows], self._state)
        known = self._episode_id[rows]
        begins = (known != _NO_EPISODE) & (known != episode_id)
        initial = _leaves(self._initial)

        def take(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            taken = leaf[rows]
            taken[begins] = next(initial)
            return taken

        return map_leaves(take, self._state)

    def keep(self, env_ret: EnvRet, state: Any) -> None:
        """Takes the state that the answer to an EnvRet brought.

        Raises:
            CodecError: It is not like that of before.
        """
        rows = self._places(env_ret)
        came = list(_leaves(state))
        kept = list(_leaves(self._state))
        shapes = [(leaf.dtype, (len(rows), *leaf.shape[1:])) for leaf in kept]
        if [(getattr(leaf, "dtype", None), np.shape(leaf)) for leaf in came] != shapes:
            raise CodecError("state: it is not like the initial state")
        for leaf, new in zip(kept, came, strict=True):
            leaf[rows] = new
        ids = env_ret.episode_id
        self._episode_id[rows] = _NO_EPISODE if ids is None else ids

    def _places(self, env_ret: EnvRet) -> npt.NDArray[np.int64]:
        if env_ret.rows is not None:
            rows = np.atleast_1d(np.asarray(env_ret.rows, np.int64))
            if rows[0] < 0 or rows[-1] >= self._rows:
                raise InvalidRequestError(
                    f"rows: the spec declares {self._rows} (num_envs), got row {rows[-1]}"
                )
            return rows
        # A group of one row may send it without a leading dimension.
        return np.arange(self._rows, dtype=np.int64)


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        state = tuple(state.values())
    if isinstance(state, tuple):
        for value in state:
            yield from _leaves(value)
    else:
        yield state
