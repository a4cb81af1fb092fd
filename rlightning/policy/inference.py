"""One forward pass for the rows of several groups, and the split of its outputs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlightning.errors import PolicyError
from rlightning.policy.base_policy import BasePolicy, PolicyInput
from rlightning.policy.batch_memory import BatchMemory, Gathered
from rlightning.policy.layout import InputLayout
from rlightning.policy.pending import Answer
from rlightning.policy.state import GroupState, StateLayout, StateUse
from rlightning.types import Mode, MultiAgentPolicyResponse, PolicyResponse
from rlightning.utils.conversions import BFloat16Array, array_of

_LOG = logging.getLogger(__name__)

PADDING_ID = ""
"""What stands for an env id in rows that only fill a batch."""

_AS_IT_IS = nullcontext()
# Kinds of dtypes.
_HAVE_NAN = "fc"
_BFLOAT16_INFINITY = 0x7F80


@dataclass(slots=True)
class Part:
    """The rows of one group in a batch.

    Attributes:
        env_id: Of the group.
        values: What `InputLayout.flatten` returned for it.
        rows: None for one row without a leading dimension; its answer has none either.
        state: Which state it reads and writes; None for a policy that keeps none.
    """

    env_id: str
    values: list[Any]
    rows: int | None
    state: StateUse | None = None


class Inference:
    """Runs a policy on batches of one spec. For one thread at a time, `gather` apart.

    Args:
        policy: Its network exists.
        layout: The arrays it gets.
        states: Its state; None if it keeps none. Each part then says which, another in each part.
    """

    def __init__(
        self, policy: BasePolicy, layout: InputLayout, states: StateLayout | None = None
    ) -> None:
        config = policy.config
        self._policy = policy
        self._layout = layout
        self._states = states
        self._stores = config.store_state
        self._memory = BatchMemory(layout.leaves, policy.device)
        self._autocast = None if config.autocast == "none" else getattr(torch, config.autocast)
        on_cuda = policy.device.type == "cuda"
        pads = config.pad_batches == "always" or (config.pad_batches == "auto" and on_cuda)
        # What has no fixed shape has no zeros either.
        pads = pads and layout.sized
        self._most = config.max_batch_rows if pads else 0

    @property
    def sizes(self) -> list[int]:
        """The rows that a batch can have, ascending; empty if it has as many as are asked for."""
        powers = [1 << i for i in range(self._most.bit_length())]
        return powers if not self._most or powers[-1] == self._most else [*powers, self._most]

    def run(self, parts: Sequence[Part], mode: Mode) -> list[PolicyResponse]:
        """Answers all groups, or none; leaves of the answers are arrays of their own.

        Raises:
            PolicyError: The policy raised, returned something else than leaves [B, ...], or an
                action that is NaN; the message names the env ids. State is what it was before.
        """
        answers = []
        for answer in self.gather(parts, mode, together=True)():
            if isinstance(answer, PolicyError):
                raise answer
            answers.append(answer)
        return answers

    def gather(
        self, parts: Sequence[Part], mode: Mode, *, together: bool = False
    ) -> Callable[[], list[Answer]]:
        """Puts the rows of a batch together on the device.

        On CUDA also from another thread, for the next batch while one is answered.

        Args:
            parts: The groups.
            mode: Explore or exploit.
            together: Keep no group's new state if the action of one is NaN.

        Returns:
            What answers the batch, each group for itself, as they may belong to different clients:
            with a response, or with a `PolicyError` if its action is NaN; its state is what it was
            before, then. Raises a `PolicyError`, as `run`, for what went wrong with all of them.
        """
        sizes = [part.rows or 1 for part in parts]
        rows = sum(sizes)
        values = [part.values for part in parts]
        padding = self._padding(rows)
        if padding:
            values.append(self._zeros(values[0], padding))
        gathered = self._memory.gather(values, rows + padding)
        return partial(self._answer, parts, mode, together, sizes, padding, gathered)

    def _answer(
        self,
        parts: Sequence[Part],
        mode: Mode,
        together: bool,
        sizes: Sequence[int],
        padding: int,
        gathered: Gathered,
    ) -> list[Answer]:
        rows = sum(sizes)
        groups = [(part.env_id, size) for part, size in zip(parts, sizes, strict=True)]
        if padding:
            groups.append((PADDING_ID, padding))
        observation, reward, terminated, truncated = self._layout.build(gathered.take())
        batch = PolicyInput(
            parts[0].env_id if len(parts) == 1 else "batch",
            observation,
            reward,
            terminated,
            truncated,
            mode=mode,
            groups=tuple(groups),
        )
        try:
            with torch.inference_mode(), self._precision():
                if self._states is None:
                    response = self._policy.rollout_step(batch)
                    outputs = _arrays(_data(response), rows, rows + padding)
                    failed = self._failed(parts, outputs)
                else:
                    response, outputs, after = self._step_state(self._states, parts, batch, padding)
                    failed = self._failed(parts, outputs)
                    if not (failed and together):
                        self._states.scatter(_uses(parts), after, but=failed)
        except Exception as error:  # the user's code: whatever it raises answers this batch
            who = ", ".join(repr(part.env_id) for part in parts)
            kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
            what = f"{self._failed_for} {who}"
            _LOG.exception("%s", what)
            raise PolicyError(f"{what}: {kind}{error}") from error
        made = type(response) if isinstance(response, MultiAgentPolicyResponse) else PolicyResponse
        whole = len(parts) == 1 and parts[0].rows is not None
        answers: list[Answer] = []
        start = 0
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            where = start if part.rows is None else slice(start, start + size)
            start += size
            if i in failed:
                answers.append(failed[i])
                continue
            answer = made(part.env_id, **(outputs if whole else _cut(outputs, where)))
            answer.policy_version = self._policy.weights_version
            answers.append(answer)
        return answers

    @property
    def _failed_for(self) -> str:
        return f"{type(self._policy).__name__}.rollout_step failed for env"

    def _failed(self, parts: Sequence[Part], outputs: Mapping[str, Any]) -> dict[int, PolicyError]:
        """Returns an error for each part whose action is none, which an env, or a robot, might do.

        The message names what is NaN and the first such row of the part.
        """
        failed: dict[int, PolicyError] = {}
        action = outputs.get("action")
        if type(action) is np.ndarray and action.dtype.kind not in _HAVE_NAN:
            return failed
        for name, rows in _nan_rows(action, "action"):
            start = 0
            for i, part in enumerate(parts):
                stop = start + (part.rows or 1)
                if i not in failed and rows[start:stop].any():
                    row = int(rows[start:stop].argmax())
                    failed[i] = PolicyError(
                        f"{self._failed_for} {part.env_id!r}: '{name}' is NaN, in row {row}"
                    )
                    _LOG.error("%s", failed[i])
                start = stop
        return failed

    def _padding(self, rows: int) -> int:
        """Returns how many rows a batch of so many lacks."""
        if rows >= self._most:  # also without padding, and for a request above the limit
            return 0
        return min(1 << (rows - 1).bit_length(), self._most) - rows

    def _zeros(self, values: Sequence[Any], rows: int) -> list[Any]:
        """Returns rows of zeros, each leaf where that of another group is."""
        zeros: list[Any] = []
        for leaf, value in zip(self._layout.leaves, values, strict=True):
            if isinstance(value, Tensor):
                zeros.append(value.new_zeros((rows, *leaf.shape)))
            else:
                zeros.append(np.broadcast_to(np.zeros((), leaf.dtype), (rows, *leaf.shape)))
        return zeros

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return _AS_IT_IS
        return torch.autocast(self._policy.device.type, self._autocast)

    def _step_state(
        self, states: StateLayout, parts: Sequence[Part], batch: PolicyInput, padding: int
    ) -> tuple[Any, dict[str, Any], list[Tensor]]:
        """Runs the policy with the state of its rows; returns also what becomes of it."""
        uses = _uses(parts)
        rows = sum(len(use.rows) for use in uses)
        padded = rows + padding
        nobody = [StateUse(GroupState(padding), np.arange(padding), None, fresh=True)]
        ended = _ended(batch.last_terminated, batch.last_truncated)
        before = states.gather([*uses, *nobody] if padding else uses, ended)
        batch.state = states.nest(before)
        # Copied before the policy may write to it.
        stored = _output(batch.state, "state", rows, padded) if self._stores else None
        response = self._policy.rollout_step(batch)
        data = _data(response)
        if "next_state" not in data:
            raise PolicyError("the response has no 'next_state', though initial_state returns one")
        after = states.flatten(data.pop("next_state"), padded, "next_state")
        outputs = _arrays(data, rows, padded)
        if stored is not None:
            if "state" in outputs:
                raise PolicyError("policy.store_state adds 'state': choose another name for yours")
            outputs["state"] = stored
        return response, outputs, after


def _uses(parts: Sequence[Part]) -> list[StateUse]:
    return [part.state for part in parts if part.state is not None]


def _arrays(data: Mapping[str, Any], rows: int, padded: int) -> dict[str, Any]:
    """Returns outputs of `padded` rows as arrays [rows, ...] that share memory with nothing."""
    return {name: _output(value, name, rows, padded) for name, value in data.items()}


def _data(response: Any) -> dict[str, Any]:
    if not isinstance(response, PolicyResponse):
        if inspect.iscoroutine(response):
            response.close()
            raise PolicyError("rollout_step is a coroutine; write it as a function that may block")
        raise PolicyError(f"expected a PolicyResponse, got {type(response).__name__}")
    return response.to_dict()


def _nan_rows(value: Any, name: str) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yields each leaf that has a NaN: its name, and which of its rows do, bool [B]."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _nan_rows(item, f"{name}.{key}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _nan_rows(item, f"{name}[{i}]")
    elif isinstance(value, np.ndarray):
        nan: npt.NDArray[np.bool_]
        if isinstance(value, BFloat16Array) and value.dtype == np.uint16:
            nan = (value.view(np.ndarray) & 0x7FFF) > _BFLOAT16_INFINITY
        elif value.dtype.kind in _HAVE_NAN:
            nan = np.isnan(value)
        else:
            return
        if nan.any():
            yield name, np.logical_or.reduce(nan.reshape(len(value), -1), axis=1)


def _ended(terminated: Any, truncated: Any) -> Tensor:
    """Returns which rows have ended an episode, bool [B]: each of their agents has."""
    if isinstance(terminated, Mapping):
        ended = [terminated[agent] | truncated[agent] for agent in terminated]
        return torch.stack(ended).all(dim=0)
    either: Tensor = terminated | truncated
    return either


def _output(value: Any, name: str, rows: int, padded: int) -> Any:
    # Copied, since the policy may return memory that it, or the next batch, will write to.
    if isinstance(value, Tensor):
        if value.ndim and value.shape[0] == padded:
            value = value if rows == padded else value[:rows]
            plain = value.is_cpu and value.dtype is not torch.bfloat16 and not value.requires_grad
            return (value.numpy() if plain else array_of(value)).copy()
        got = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif isinstance(value, np.ndarray):
        if value.ndim and len(value) == padded:
            return value[:rows].copy()
        got = f"{value.dtype}{list(value.shape)}"
    elif isinstance(value, Mapping):
        return {key: _output(item, f"{name}.{key}", rows, padded) for key, item in value.items()}
    elif isinstance(value, tuple):
        return tuple(_output(item, f"{name}[{i}]", rows, padded) for i, item in enumerate(value))
    elif isinstance(value, list) and len(value) == padded:
        return value[:rows]
    else:
        got = type(value).__name__
    raise PolicyError(
        f"'{name}' came as {got}, expected a tensor or array whose leading dimension is the "
        f"{padded} rows of the batch"
    )


def _cut(value: Any, where: slice | int) -> Any:
    """Returns some rows of every leaf, or one row without its leading dimension."""
    if isinstance(value, dict):
        return {key: _cut(item, where) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(item, where) for item in value)
    return value[where]
