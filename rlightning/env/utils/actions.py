"""Makes what a policy answers into what an env takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.errors import EnvError
from rlightning.types import ActionSource

BoolRows = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class FittedAction:
    """An action as the env takes it.

    Attributes:
        action: Of the dtypes and shapes of the action space.
        source: `ActionSource` of each row when one was clipped: int8 [rows], or one number without
            rows; None when the policy's action is executed as it came.
        executed: Then the action that is executed, in the shapes and kinds of the policy's.
    """

    action: Any
    source: npt.NDArray[np.int8] | int | None = None
    executed: Any = None


class ActionFitter:
    """Casts actions to the dtypes of an action space and clips them to its bounds.

    Args:
        space: Space of one row's action.
        rows: Length of the leading dimension; None: there is none.
        env_id: For messages.
    """

    def __init__(self, space: gym.Space[Any], rows: int | None, env_id: str) -> None:
        self.env_id = env_id
        self._space = space
        self._rows = rows
        self._leading = () if rows is None else (rows,)

    def fit(self, action: Any) -> FittedAction:
        """Returns an action that the env can execute.

        Args:
            action: Leaves `[rows, ...]` or `[...]`, arrays or tensors on the CPU; not changed.

        Raises:
            EnvError: A shape or kind does not fit, a number is not finite, or a choice is not one
                of the space's; the message names the env and the row.
        """
        fitted, clipped = self._fit(self._space, action, "action")
        if clipped is None:
            return FittedAction(fitted)
        executed = _in_form_of(action, fitted)
        if self._rows is None:
            return FittedAction(fitted, int(ActionSource.CLIPPED), executed)
        source = np.where(clipped, ActionSource.CLIPPED, ActionSource.POLICY).astype(np.int8)
        return FittedAction(fitted, source, executed)

    def _fit(self, space: gym.Space[Any], action: Any, name: str) -> tuple[Any, BoolRows | None]:
        if isinstance(space, gym.spaces.Box):
            return self._fit_box(space, self._array(space, action, name), name)
        if isinstance(space, gym.spaces.Discrete):
            low, high = space.start, space.start + space.n - 1
            return self._fit_choice(space, self._array(space, action, name), low, high, name)
        if isinstance(space, gym.spaces.MultiDiscrete):
            low, high = space.start, space.start + space.nvec - 1
            return self._fit_choice(space, self._array(space, action, name), low, high, name)
        if isinstance(space, gym.spaces.MultiBinary):
            return self._fit_choice(space, self._array(space, action, name), 0, 1, name)
        if isinstance(space, gym.spaces.Dict):
            if not isinstance(action, Mapping) or action.keys() != space.spaces.keys():
                raise self._error(name, f"expected a dict with keys {sorted(space.spaces)}", action)
            fitted = {
                key: self._fit(child, action[key], f"{name}.{key}") for key, child in space.items()
            }
            values = {key: value for key, (value, _) in fitted.items()}
            return values, _any_of([clipped for _, clipped in fitted.values()])
        if isinstance(space, gym.spaces.Tuple):
            if not isinstance(action, (tuple, list)) or len(action) != len(space.spaces):
                raise self._error(name, f"expected {len(space.spaces)} parts", action)
            parts = [
                self._fit(child, part, f"{name}[{i}]")
                for i, (child, part) in enumerate(zip(space.spaces, action, strict=True))
            ]
            return tuple(value for value, _ in parts), _any_of([clipped for _, clipped in parts])
        return action, None  # a space without a fixed shape: one item per row

    def _array(self, space: gym.Space[Any], action: Any, name: str) -> npt.NDArray[Any]:
        array = np.asarray(action)
        shape = (*self._leading, *(space.shape or ()))
        if array.dtype.kind not in "biuf":
            raise self._error(name, "expected numbers", action)
        if array.shape == shape:
            return array
        # A policy may or may not keep a last axis of length 1.
        if array.shape == (*shape, 1) or (*array.shape, 1) == shape:
            return array.reshape(shape)
        raise self._error(name, f"expected {space.dtype}{list(shape)}", action)

    def _fit_box(
        self, space: gym.spaces.Box, array: npt.NDArray[Any], name: str
    ) -> tuple[npt.NDArray[Any], BoolRows | None]:
        # Clipped before the cast, so that a number too large for an integer dtype does not wrap.
        clipped = np.clip(array, space.low, space.high)
        if clipped.dtype.kind == "f" and not (finite := np.isfinite(clipped)).all():
            raise self._bad_row(name, array, finite, "is not finite")
        changed = np.asarray(self._by_row(clipped != array).any(axis=1))
        return clipped.astype(space.dtype, copy=False), changed if changed.any() else None

    def _fit_choice(
        self, space: gym.Space[Any], array: npt.NDArray[Any], low: Any, high: Any, name: str
    ) -> tuple[npt.NDArray[Any], None]:
        valid = (array >= low) & (array <= high)  # false for NaN
        if array.dtype.kind == "f":
            valid &= array == np.trunc(array)
        if not valid.all():
            raise self._bad_row(name, array, valid, f"is not in {space}")
        # Without rows a choice is a number: envs look it up in tables.
        return array.astype(space.dtype, copy=False)[()], None

    def _by_row(self, mask: BoolRows) -> BoolRows:
        return mask.reshape(self._rows or 1, -1)

    def _bad_row(
        self, name: str, array: npt.NDArray[Any], good: BoolRows, complaint: str
    ) -> EnvError:
        if self._rows is None:
            return EnvError(f"env {self.env_id!r}: {name} {array} {complaint}")
        row = int(np.argmin(self._by_row(good).all(axis=1)))
        return EnvError(f"env {self.env_id!r}, row {row}: {name} {array[row]} {complaint}")

    def _error(self, name: str, expected: str, action: Any) -> EnvError:
        got = np.asarray(action)
        kind = f"{got.dtype}{list(got.shape)}" if got.dtype != object else type(action).__name__
        return EnvError(f"env {self.env_id!r}: {name}: {expected}, got {kind}")


def _in_form_of(answer: Any, fitted: Any) -> Any:
    """Returns a fitted action in the shapes and float dtypes of the answer."""
    if isinstance(fitted, dict):
        return {key: _in_form_of(answer[key], value) for key, value in fitted.items()}
    if isinstance(fitted, tuple):
        return tuple(_in_form_of(one, value) for one, value in zip(answer, fitted, strict=True))
    if not isinstance(fitted, np.ndarray):
        return fitted
    form = np.asarray(answer)
    floats = form.dtype.kind == fitted.dtype.kind == "f"
    return fitted.reshape(form.shape).astype(form.dtype if floats else fitted.dtype, copy=False)


def _any_of(masks: list[BoolRows | None]) -> BoolRows | None:
    present = [mask for mask in masks if mask is not None]
    return np.any(present, axis=0) if present else None
