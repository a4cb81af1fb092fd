"""What an env returns from a step or a reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlightning.types.sent import Sent, sent_latency
from rlightning.utils.conversions import to_device, to_numpy

if TYPE_CHECKING:
    from rlightning.utils.conversions import Device

Processed_EnvRet_fields = ("next_observation", "reward", "terminated", "truncated", "info")
"""Names under which the fields of the following EnvRet are stored with a transition."""


class ActionSource(IntEnum):
    """Who chose the action that was executed; the numbers equal those on the wire."""

    POLICY = 1
    """The policy's answer, as it came."""
    HUMAN = 2
    """A person took over."""
    HOLD = 3
    """The last action was held, since no answer came in time."""
    ZERO = 4
    """A zero action, since no answer came in time."""
    CLIPPED = 5
    """The policy's answer, cut to the limits of the env."""


@dataclass
class EnvRet(Sent):
    """An observation, with the reward and flags of the step before it.

    One env gives numbers and flags; a group of rows gives arrays whose leading dimension is the
    number of rows. Where rows ended an episode, `observation` is the first one of the next, and
    `info` holds `final_rows` (their positions, ascending, int32 [k]), `final_observation` (leaves
    [k, ...]) and, if the env gave any, `final_info`; none of them is there when no row ended.
    """

    __slots__ = ("__dict__", "__weakref__", "_left")

    env_id: str
    """Id of the env, or of its group of rows."""
    observation: Any
    """Observation after the step or reset."""
    last_reward: Any = 0.0
    """Reward of the last step: float, or float array [rows]."""
    last_terminated: Any = False
    """Whether the MDP ended the episode at the last step: bool, or bool array [rows]."""
    last_truncated: Any = False
    """Whether the episode was cut from outside at the last step: bool, or bool array [rows]."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further information of the env."""
    _extra: dict[str, Any] = field(default_factory=dict)
    """Further fields that the buffer stores with the observation. One that is called `last_X` tells
    of the last step, as `last_reward` does, and is stored as `X` of that, too, unless there is
    another `X`, such as the policy's `action`."""
    ts_env_sent_ns: int = field(default_factory=time.time_ns)
    """When this left the env: Unix time in nanoseconds, by the wall clock of the env's machine."""

    executed_action: Any = field(default=None, kw_only=True)
    """The action executed at the last step, when it may differ from the policy's answer."""
    action_source: int | npt.NDArray[np.int8] | None = field(default=None, kw_only=True)
    """Who chose that action, as `ActionSource`: one for all, or int8 [rows]; None: the policy."""
    answered_seq: int = field(default=0, kw_only=True)
    """The act request whose answer was executed at the last step; 0 if none."""
    chunk_index: int = field(default=0, kw_only=True)
    """Which action of that answer was executed, when it carried several."""
    ts_observed_ns: int = field(default=0, kw_only=True)
    """When the sensors were read: Unix time in nanoseconds; 0 if not known."""
    episode_id: npt.NDArray[np.int64] | None = field(default=None, kw_only=True)
    """The episode of each row's observation, unique within its writer: int64 [rows]."""
    step: npt.NDArray[np.int64] | None = field(default=None, kw_only=True)
    """The step of that episode for each row, 0 at the reset: int64 [rows]."""
    rows: npt.NDArray[np.int32] | None = field(default=None, kw_only=True)
    """Which rows of the group these are, ascending: int32 [k]; None: all."""

    # Defined here, so that the dataclass decorator keeps it although the class compares by value.
    def __hash__(self) -> int:
        return hash(self.env_id)

    @property
    def left_ns(self) -> int:
        """When `mark_env_sent` was called here, by the monotonic clock; 0 if it was not."""
        left = getattr(self, "_left", None)
        return left[0] if isinstance(left, tuple) else 0

    @property
    def last_info(self) -> dict[str, Any]:
        """The same as `info`."""
        return self.info

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Returns the names of the fields that are data: without ids, stamps and counters."""
        return tuple(item.name for item in fields(cls) if item.name not in _NOT_DATA)

    @classmethod
    def get_defaults(cls) -> dict[str, Any]:
        """Returns the default of each field of `fields()` that has a plain one."""
        return {
            item.name: item.default
            for item in fields(cls)
            if item.name not in _NOT_DATA and item.default is not MISSING
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of `fields()`, then those of `_extra`; values are not copied.

        Raises:
            KeyError: `_extra` holds a name that is a field already.
        """
        result = {name: getattr(self, name) for name in self.fields()}
        clashes = sorted(result.keys() & self._extra.keys())
        if clashes:
            raise KeyError(
                f"extra fields {clashes} have the names of fields of {type(self).__name__}"
            )
        result.update(self._extra)
        return result

    def row_ids(self) -> tuple[int, ...]:
        """Returns which rows of the group the leading dimension stands for.

        Raises:
            ValueError: Neither `rows` nor `episode_id` is given, and no leaf of the observation has
                a leading dimension.
        """
        if self.rows is not None:
            return tuple(np.atleast_1d(self.rows).tolist())
        return tuple(range(self.row_count()))

    def row_count(self) -> int:
        """Returns how many rows the leading dimension stands for.

        Raises:
            ValueError: As `row_ids`.
        """
        for rows in (self.rows, self.episode_id):
            if rows is not None:
                return int(np.size(rows))
        count = _leading_dimension(self.observation)
        if count is None:
            raise ValueError(
                f"env {self.env_id!r}: the observation has no leading dimension of rows"
            )
        return count

    def copy(self, **changes: Any) -> EnvRet:
        """Returns a new EnvRet with the same values but for the fields given; not copied."""
        other = replace(self, **changes)
        if hasattr(self, "_left"):
            other._left = self._left
        return other

    def mark_env_sent(self) -> EnvRet:
        """Stamps this as sent now; returns itself."""
        self.ts_env_sent_ns = time.time_ns()
        self._left = time.monotonic_ns(), 0
        return self

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Returns the seconds since this was sent.

        By wall clocks, which two machines need not agree on: `corrected_latency` is the figure that
        is right between machines, too.

        Args:
            now_ns: Unix time in nanoseconds; now if None.

        Returns:
            Seconds, at least 0.0; 0.0 too if the stamp is missing or no number.
        """
        return sent_latency(self.ts_env_sent_ns, now_ns)

    def numpy(self) -> EnvRet:
        """Returns a new EnvRet with numpy arrays for tensors."""
        return self._converted(to_numpy)

    def cpu(self) -> EnvRet:
        """Returns a new EnvRet with torch tensors on the CPU for tensors and arrays.

        Without torch installed, arrays stay as they are.
        """
        return self._converted(lambda data: to_device(data, "cpu"))

    def cuda(self, device: Device | None = None) -> EnvRet:
        """Returns a new EnvRet with torch tensors on a CUDA device for tensors and arrays.

        Args:
            device: Index or name; `cuda` if None.

        Raises:
            ImportError: torch is not installed.
        """
        return self._converted(lambda data: to_device(data, "cuda" if device is None else device))

    def _converted(self, convert: Callable[[Any], Any]) -> EnvRet:
        names = (*self.fields(), "_extra", "executed_action")
        return self.copy(**{name: convert(getattr(self, name)) for name in names})


class MultiAgentEnvRet(EnvRet):
    """What a multi-agent env returns.

    `last_reward`, `last_terminated` and `last_truncated` are dicts by agent; their defaults are
    those of `EnvRet`.
    """


# Fields that say where and when a return comes from; the buffer keeps what it needs of them itself.
_NOT_DATA = frozenset(
    {"env_id", "ts_env_sent_ns", "_extra"} | {item.name for item in fields(EnvRet) if item.kw_only}
)


def _leading_dimension(data: Any) -> int | None:
    """Returns the length of the first axis of the first array in a nesting, if there is one."""
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, (list, tuple)):
        return next((n for n in map(_leading_dimension, data) if n is not None), None)
    shape: Sequence[int] = getattr(data, "shape", ())
    return int(shape[0]) if len(shape) else None
