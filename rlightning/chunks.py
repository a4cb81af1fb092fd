"""Executes answers that carry several actions: one for the step that asked, and for those after."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.actor import BufferPort, PolicyPort
from rlightning.env.remote_env.answers import as_executed, split_chunk
from rlightning.errors import RLightningError
from rlightning.types import EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.conversions import map_leaves

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chunk:
    """The actions of one answer: action h is for the h-th step after the one that asked.

    Attributes:
        response: The answer.
        actions: Leaves [rows, ...], one for each step.
        asked: The observation that was answered.
    """

    response: PolicyResponse
    actions: list[Any]
    asked: EnvRet

    def index(self, env_ret: EnvRet) -> int | None:
        """Returns which action is for a step; None if none is: in each row it must be so."""
        asked = self.asked
        if env_ret is asked:
            return 0
        if (
            env_ret.step is None
            or asked.step is None
            or not np.array_equal(env_ret.row_ids(), asked.row_ids())
            or not np.array_equal(env_ret.episode_id, asked.episode_id)  # type: ignore[arg-type]
        ):
            return None
        ahead = env_ret.step - asked.step
        index = int(ahead[0])
        return index if 0 <= index < len(self.actions) and (ahead == index).all() else None


@dataclass(frozen=True)
class _Executed:
    """What was chosen for one step."""

    action: Any
    index: int
    seq: int


class ChunkedActions:
    """Between an actor and its policy and buffer: gives each step the one action that is for it.

    An answer is a chunk if its action has an axis more than the space, [rows, H, ...]; others go
    through as they are. An action is executed at the step that it is for, counted in steps of the
    env, within the episodes that asked: when one of the rows ends its own, all are asked about
    again. The policy is asked when no action is left, or already when `ahead` are: then the env
    steps on meanwhile, and the actions of the new answer whose steps have passed are skipped.

    What was executed is stored as `action`, the chunk as `policy_action` of the step that asked. A
    step that nobody asked about has an answer of zeros, without a version, and `chunk_index` and
    `answered_seq` say whose action it was. A `PolicyPort` and a `BufferPort`, for one actor.

    Args:
        policy: Who answers.
        buffer: Who stores; None: nobody.
        space: Of the actions of one row.
        ahead: How many actions are left when the policy is asked again; 0 asks when none is.

    Attributes:
        skipped: Actions whose step had passed when their answer came.
    """

    def __init__(
        self,
        policy: PolicyPort,
        buffer: BufferPort | None,
        space: gym.Space[Any],
        *,
        ahead: int = 0,
    ) -> None:
        self.skipped = 0
        self._policy = policy
        self._buffer = buffer
        self._space = space
        self._ahead = ahead
        self._chunk: _Chunk | None = None
        self._asking: asyncio.Task[_Chunk | None] | None = None
        self._blank: PolicyResponse | None = None
        self._chosen: _Executed | None = None
        self._executed: _Executed | None = None
        # What is stored with the step that was answered last.
        self._answer: PolicyResponse | asyncio.Task[_Chunk | None] | None = None
        self._held: deque[_Item] = deque()

    @property
    def times(self) -> Any:
        """Where the time of the policy's last answer went, if it tells."""
        return getattr(self._policy, "times", None)

    async def act(
        self, env_ret: EnvRet, *, mode: Mode, purpose: Purpose, reset_state: bool = False
    ) -> PolicyResponse:
        """Returns the answer for one step, asking the policy if there is none; see `PolicyPort`."""
        if reset_state:
            self._chunk = None
        if self._asking is not None and (self._asking.done() or self._index(env_ret) is None):
            await self._replace(env_ret, usable=not reset_state)
        index = self._index(env_ret)
        if index is None:
            response = await self._policy.act(
                env_ret, mode=mode, purpose=purpose, reset_state=reset_state
            )
            self._answer, self._chunk = response, self._split(env_ret, response)
            if self._chunk is None:
                self._chosen = None
                return response
            index = 0
        else:
            self._answer = self._blank
            left = 0 if self._chunk is None else len(self._chunk.actions) - index
            if left <= self._ahead and self._asking is None:
                asked = self._ask(env_ret, mode, purpose)
                self._answer = self._asking = asyncio.create_task(asked)
        assert self._chunk is not None
        response = self._chunk.response.copy()
        response.action = self._chunk.actions[index]
        self._chosen = _Executed(response.action, index, getattr(response, "seq", 0))
        return response

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        """Stores a step with the policy's own answer, and what was executed before it."""
        executed, self._executed = self._executed, self._chosen
        if executed is not None and not new_segment:
            if env_ret.executed_action is None:
                env_ret.executed_action = as_executed(self._space, executed.action)
            env_ret.chunk_index = executed.index
            env_ret.answered_seq = env_ret.answered_seq or executed.seq
        answer = None if response is None else self._answer
        self._held.append(_Item(env_ret, answer, new_segment))
        if response is None:
            await self.finish()
        else:
            await self._flush()

    async def finish(self) -> None:
        """Stores what is held back, without an answer that has not come."""
        if self._asking is not None and not self._asking.done():
            self._asking.cancel()
            await asyncio.wait([self._asking])
        self._asking = None
        await self._flush()

    def _index(self, env_ret: EnvRet) -> int | None:
        return None if self._chunk is None else self._chunk.index(env_ret)

    def _split(self, env_ret: EnvRet, response: PolicyResponse) -> _Chunk | None:
        """Returns the actions of an answer; None if it is no chunk."""
        actions = split_chunk(self._space, response.action)
        if actions[0] is response.action:
            return None
        self._blank = blank_of(response)
        return _Chunk(response, actions, env_ret)

    async def _ask(self, env_ret: EnvRet, mode: Mode, purpose: Purpose) -> _Chunk | None:
        response = await self._policy.act(env_ret, mode=mode, purpose=purpose)
        return self._split(env_ret, response)

    async def _replace(self, env_ret: EnvRet, *, usable: bool) -> None:
        """Takes the answer that was asked for ahead, once it is there, if it has one for a step."""
        asking, self._asking = self._asking, None
        assert asking is not None
        await asyncio.wait([asking])
        if (error := asking.exception()) is not None:
            if not isinstance(error, RLightningError):
                raise error
            # The policy is asked again when no action is left: then it is told.
            _LOG.debug("asking ahead: %s", error)
            return
        chunk = asking.result()
        index = None if chunk is None or not usable else chunk.index(env_ret)
        if index is not None:
            self._chunk = chunk
            self.skipped += index

    async def _flush(self) -> None:
        while self._held and self._held[0].is_answered:
            item = self._held.popleft()
            if self._buffer is not None:
                answer = item.answered(self._blank)
                await self._buffer.insert(item.env_ret, answer, new_segment=item.new_segment)


@dataclass(frozen=True)
class _Item:
    """A step that is to be stored."""

    env_ret: EnvRet
    answer: PolicyResponse | asyncio.Task[_Chunk | None] | None
    new_segment: bool

    @property
    def is_answered(self) -> bool:
        return not isinstance(self.answer, asyncio.Task) or self.answer.done()

    def answered(self, blank: PolicyResponse | None) -> PolicyResponse | None:
        """Returns the policy's answer; `blank` if it gave none."""
        if not isinstance(self.answer, asyncio.Task):
            return self.answer
        if self.answer.cancelled() or self.answer.exception() is not None:
            return blank
        chunk = self.answer.result()
        return blank if chunk is None else chunk.response


def blank_of(response: PolicyResponse) -> PolicyResponse:
    """Returns an answer of zeros in the form of another, without a version."""
    blank = PolicyResponse(response.env_id)
    for name, value in response.to_dict().items():
        setattr(blank, name, map_leaves(np.zeros_like, value))
    return blank
