"""The actor loop: an env steps, a policy answers, a buffer stores; each is known as a port only."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np

from rlightning.env.control import ActorControl
from rlightning.env.utils.infos import INFO_KEYS, InfoFilter
from rlightning.errors import (
    DeadlineExceededError,
    EnvError,
    ObservationError,
    PolicyError,
    PreconditionError,
    RemoteError,
    ResourceExhaustedError,
    RLightningError,
)
from rlightning.latency import ActTimes, LatencyStats
from rlightning.latency.stages import STEP
from rlightning.latency.trace import TraceLog, trace_step
from rlightning.rpc.trace_context import current_trace
from rlightning.types import ActionSource, EnvMeta, EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.failpoints import failpoint

__all__ = [
    "INFO_KEYS",
    "ActorControl",
    "ActorStats",
    "BufferPort",
    "EnvPort",
    "PolicyPort",
    "run_actor",
]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10

_OF_POLICY = (ActionSource.POLICY, ActionSource.CLIPPED)


class EnvPort(Protocol):
    """A group of rows."""

    meta: EnvMeta

    async def reset(self) -> EnvRet:
        """Begins a new episode in every row."""
        ...

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Executes an answer."""
        ...


class PolicyPort(Protocol):
    """Who answers one group; waits through a lost connection by itself.

    One that knows where the time of its last answer went tells in an attribute `times`.
    """

    async def act(
        self,
        env_ret: EnvRet,
        *,
        mode: Mode,
        purpose: Purpose,
        reset_state: bool = False,
    ) -> PolicyResponse:
        """Returns the answer to this observation."""
        ...


class BufferPort(Protocol):
    """Who stores what one group saw and was answered; waits through a lost connection by itself."""

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        """Takes one item; returns when there is room for the next."""
        ...


@dataclass
class ActorStats:
    """What an actor has done so far.

    Attributes:
        steps: Answers executed.
        env_errors: Times that the env failed and was reset.
        policy_errors: Answers that were errors, and were asked for again.
        segments: Segments begun since something was lost.
        last_error: The last of those errors; empty if there was none.
        latency: In seconds: `round_trip` (asked until answered), `insert` (handing over to the
            buffer, which waits when that is full), `action_age` (observation until its action is
            executed), `env_step`, and `step`, the whole.
    """

    steps: int = 0
    env_errors: int = 0
    policy_errors: int = 0
    segments: int = 0
    last_error: str = ""
    latency: LatencyStats = field(default_factory=LatencyStats)


async def run_actor(
    env: EnvPort,
    policy: PolicyPort,
    buffer: BufferPort | None,
    *,
    mode: Mode = Mode.EXPLORE,
    purpose: Purpose = Purpose.TRAIN,
    info_keys: Collection[str] = INFO_KEYS,
    control: ActorControl | None = None,
    stats: ActorStats | None = None,
    traces: TraceLog | None = None,
    max_steps: int | None = None,
    new_segment: bool = False,
) -> None:
    """Steps one group until it is told to stop: asks, stores what was seen and answered, steps.

    At any time one observation waits for its answer, and the answer is executed in the step right
    after it, or not at all. An env that fails is reset and goes on in a new segment; an answer that
    is an error is asked for again. Both are given up after ten failures in a row.

    Args:
        env: The rows.
        policy: Who answers.
        buffer: Who stores; None, or another purpose than `TRAIN`: nobody.
        mode: Explore or exploit.
        purpose: What the answers are for.
        info_keys: What of `info` and `final_info` goes on to policy and buffer.
        control: Pauses and stops; None: runs until cancelled.
        stats: Counts.
        traces: Takes traces of some steps, as often as it says.
        max_steps: Ends after so many executed answers; None: does not.
        new_segment: Joins nothing that was stored before to what comes.

    Raises:
        EnvError: The env failed again and again.
        ObservationError: An observation is not in the declared space.
        RLightningError: The policy failed again and again, or cannot be asked: a spec that does not
            match, an observation that is not in its space, a token that is not accepted.
    """
    control = ActorControl() if control is None else control
    stats = ActorStats() if stats is None else stats
    traces = TraceLog() if traces is None else traces
    actor = _Actor(env, policy, InfoFilter(info_keys), mode, purpose, control, stats, traces)
    if new_segment:
        actor.begin_segment()
    control.enter()
    try:
        await actor.run(buffer if purpose is Purpose.TRAIN else None, max_steps)
    finally:
        control.leave()


class _Actor:
    """One run of the loop."""

    def __init__(
        self,
        env: EnvPort,
        policy: PolicyPort,
        info_filter: InfoFilter,
        mode: Mode,
        purpose: Purpose,
        control: ActorControl,
        stats: ActorStats,
        traces: TraceLog,
    ) -> None:
        self._env = env
        self._policy = policy
        self._of_interest = info_filter
        self._mode = mode
        self._purpose = purpose
        self._control = control
        self._stats = stats
        self._traces = traces
        self._failures = 0
        self._new_segment = False

    async def run(self, buffer: BufferPort | None, max_steps: int | None) -> None:
        control, stats, resets = self._control, self._stats, self._control.resets
        last = inf if max_steps is None else stats.steps + max_steps
        env_ret: EnvRet | None = await self._reset()
        while env_ret is not None and stats.steps < last and await control.go_on():
            if resets != control.resets:
                resets = control.resets
                self.begin_segment()
                env_ret = await self._reset()
                continue
            env_ret.info = self._of_interest(env_ret.info)
            env_ret.mark_env_sent()
            asked = time.monotonic_ns()
            response = await self._ask(env_ret)
            if response is None:
                break
            answered = time.monotonic_ns()
            if buffer is not None:
                await buffer.insert(env_ret, response, new_segment=self._new_segment)
            self._new_segment = False
            stored = time.monotonic_ns()
            env_ret = await self._step(response)
            failpoint("actor.stepped")
            if stats.latency.enabled:
                self._record(asked, answered, stored, time.monotonic_ns())
        if buffer is not None and env_ret is not None and stats.steps and not self._new_segment:
            # The outcome of the last answer, which would else be lost.
            env_ret.info = self._of_interest(env_ret.info)
            await buffer.insert(env_ret, None)

    def _record(self, asked: int, answered: int, stored: int, stepped: int) -> None:
        """Records one step by its stamps, in monotonic nanoseconds."""
        self._stats.latency.record_stamps(STEP, (stepped, asked, answered, stored))
        every = self._traces.every
        if every and self._stats.steps % every == 0:
            times: ActTimes | None = getattr(self._policy, "times", None)
            env_id = self._env.meta.env_id or ""
            context = current_trace()
            if times is not None and times.begun_ns >= asked:
                trace = trace_step(
                    *(env_id, times),
                    asked_ns=asked,
                    answered_ns=answered,
                    stored_ns=stored,
                    stepped_ns=stepped,
                    traceparent="" if context is None else context.traceparent,
                )
                if trace is not None:
                    self._traces.add(trace)

    async def _ask(self, env_ret: EnvRet) -> PolicyResponse | None:
        """Returns the answer to an observation; None when told to stop before there is one."""
        while not self._control.stopping:
            try:
                response = await self._policy.act(
                    env_ret,
                    mode=self._mode,
                    purpose=self._purpose,
                    reset_state=self._new_segment,
                )
            except PreconditionError as error:
                if error.reason != "STATE_LOST" or self._new_segment:
                    raise
                self.begin_segment()
            except (PolicyError, RemoteError) as error:
                if not _may_pass(error):
                    raise
                self._stats.policy_errors += 1
                await self._back_off("policy", error)
            else:
                if response.env_id != env_ret.env_id:
                    raise PolicyError(
                        f"the answer to env {env_ret.env_id!r} is for env {response.env_id!r}"
                    )
                return response
        return None

    async def _step(self, response: PolicyResponse) -> EnvRet | None:
        """Executes an answer; after a failure returns the reset of a new segment."""
        try:
            env_ret = await self._env.step(response)
        except EnvError as error:
            if self._control.stopping:  # a client that has left takes no more steps
                return None
            self.begin_segment()
            self._stats.env_errors += 1
            await self._back_off("env", error)
            return await self._reset()
        if _executed_answer(env_ret):
            env_ret.answered_seq = env_ret.answered_seq or getattr(response, "seq", 0)
        self._stats.steps += 1
        self._failures = 0
        return env_ret

    async def _reset(self) -> EnvRet | None:
        while not self._control.stopping:
            try:
                return await self._env.reset()
            except EnvError as error:
                self._stats.env_errors += 1
                await self._back_off("env", error)
        return None

    def begin_segment(self) -> None:
        """Notes that nothing before the next item may be joined to it."""
        if not self._new_segment:
            self._new_segment = True
            self._stats.segments += 1

    async def _back_off(self, who: str, error: RLightningError) -> None:
        """Waits before another attempt.

        Raises:
            RLightningError: `error`, when there were too many, or another is of no use.
        """
        self._failures += 1
        self._stats.last_error = str(error)
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "%s %s: %s", who, self._env.meta.env_id, error)
        if self._failures >= MAX_ATTEMPTS or isinstance(error, ObservationError):
            raise error
        await self._control.sleep(min(0.05 * 2**self._failures, 1.0))


def _executed_answer(env_ret: EnvRet) -> bool:
    """Whether what was executed was an answer of the policy, in one row at least."""
    sources = env_ret.action_source
    return sources is None or bool(np.isin(sources, _OF_POLICY).any())


def _may_pass(error: RLightningError) -> bool:
    """Whether the same request may succeed later: the policy raised, or had too much to do."""
    if isinstance(error, ResourceExhaustedError):
        return error.reason == "OVERLOADED"
    if isinstance(error, RemoteError):
        return type(error) is RemoteError or isinstance(error, DeadlineExceededError)
    return True
