"""Ports of the actor loop for tests: an env that counts, a policy that repeats, a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from rlightning.env.control import ActorControl
from rlightning.errors import EnvError, RLightningError
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose


class FakeEnv:
    """One row whose observation is the number of its steps, negative at a reset; an `EnvPort`.

    Args:
        fails: Numbers of the steps that raise an `EnvError`.
        info: Info of every step.

    Attributes:
        steps: Steps so far, failed ones included.
        resets: Resets so far.
        executed: The action of each step that succeeded.
    """

    def __init__(self, fails: Iterable[int] = (), info: dict[str, Any] | None = None) -> None:
        self.meta = EnvMeta("e", None, None, 1)
        self.steps = self.resets = 0
        self.executed: list[float] = []
        self._fails, self._info = set(fails), info or {}

    async def reset(self) -> EnvRet:
        """Returns minus the number of resets."""
        self.resets += 1
        return EnvRet("e", np.array([-float(self.resets)]), ts_env_sent_ns=0)

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Returns the number of steps."""
        self.steps += 1
        if self.steps in self._fails:
            raise EnvError(f"step {self.steps} failed")
        self.executed.append(float(response.action[0]))
        return EnvRet("e", np.array([float(self.steps)]), info=dict(self._info), ts_env_sent_ns=0)


class Asked(NamedTuple):
    """One request that a `FakePolicy` got."""

    observation: float
    mode: Mode
    purpose: Purpose
    reset_state: bool


class FakePolicy:
    """Answers with the observation; a `PolicyPort`.

    Args:
        errors: What the next calls raise, in order; None answers.
        env_id: Whom it answers.

    Attributes:
        asked: The requests so far.
        sent_ns: Stamp of the last EnvRet.
    """

    def __init__(self, errors: Iterable[RLightningError | None] = (), env_id: str = "e") -> None:
        self.asked: list[Asked] = []
        self.sent_ns = 0
        self._errors, self._env_id = list(errors), env_id

    async def act(
        self, env_ret: EnvRet, *, mode: Mode, purpose: Purpose, reset_state: bool = False
    ) -> PolicyResponse:
        """Returns the observation as the action, under the number of this request."""
        self.asked.append(Asked(float(env_ret.observation[0]), mode, purpose, reset_state))
        self.sent_ns = env_ret.ts_env_sent_ns
        await asyncio.sleep(0)
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return PolicyResponse(self._env_id, action=env_ret.observation, seq=len(self.asked))


class Inserted(NamedTuple):
    """One item that a `FakeBuffer` got; `action` is None where no answer came with it."""

    observation: float
    action: float | None
    answered_seq: int
    new_segment: bool


class FakeBuffer:
    """Keeps what it gets and stops the actor when it has enough; a `BufferPort`.

    Args:
        control: Of the actor.
        enough: Items after which it stops.

    Attributes:
        items: What it got.
        last: The last EnvRet.
        gate: Inserts wait while it is not set, as for a full buffer.
    """

    def __init__(self, control: ActorControl, enough: int) -> None:
        self.items: list[Inserted] = []
        self.last: EnvRet | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._control, self._enough = control, enough

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        """Keeps an item."""
        action = None if response is None else float(response.action[0])
        observation = float(env_ret.observation[0])
        self.items.append(Inserted(observation, action, env_ret.answered_seq, new_segment))
        self.last = env_ret
        await self.gate.wait()
        if len(self.items) == self._enough:
            self._control.stop()
