"""The control loop: steps an env at a fixed rate, whatever the network does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from rlightning.env.hosting import HostedGroup
from rlightning.env.remote_env.answers import (
    ActionQueue,
    Chosen,
    as_executed,
    is_plain,
    zero_action,
)
from rlightning.env.remote_env.spool import Spool, nbytes_of
from rlightning.env.utils.infos import InfoFilter
from rlightning.errors import ConfigError, DeadlineExceededError, EnvError
from rlightning.types import ActionSource, EnvRet, PolicyResponse

OnLate = Literal["hold", "zero", "stop"]

# A wait for the next tick is interrupted so often, to hear of a stop.
_SLICE_S = 0.05
# Steps over which jitter and the age of actions are told.
_RECENT = 512


@dataclass(frozen=True)
class Pace:
    """How a client steps its env by itself.

    Attributes:
        hz: Steps a second.
        on_late: What is executed when no answer is there in time: the last action again (`hold`),
            zeros (`zero`), or nothing more (`stop`).
        max_action_age_ms: An action is not used when the observation that it answers is older, in
            milliseconds; None: however old it is.
        spool_steps: Steps that may wait for the server.
        spool_mb: Megabytes of them.

    Raises:
        ConfigError: One of them is out of range.
    """

    hz: float
    on_late: OnLate = "hold"
    max_action_age_ms: float | None = None
    spool_steps: int = 10_000
    spool_mb: float = 256.0

    def __post_init__(self) -> None:
        age = self.max_action_age_ms
        for name, value, valid, expected in (
            ("control_hz", self.hz, 0 < self.hz <= 10_000, "a number above 0, up to 10000"),
            ("on_late", self.on_late, self.on_late in ("hold", "zero", "stop"), "hold, zero, stop"),
            ("max_action_age_ms", age, age is None or age > 0, "a number above 0"),
            ("spool_steps", self.spool_steps, self.spool_steps >= 2, "2 or more"),
            ("spool_mb", self.spool_mb, self.spool_mb > 0, "a number above 0"),
        ):
            if not valid:
                raise ConfigError(f"{name}: expected {expected}, got {value!r}")


@dataclass
class ControlCounts:
    """What a control loop has done so far.

    Attributes:
        held: Steps with the last action again, since no answer was there.
        zeroed: Steps with zeros instead.
        waited: Ticks without a step, at the beginning of an episode, before its first answer.
        missed: Ticks that passed while the env was still at the step before.
        dropped: Steps that are lost, since the spool was full.
        overflows: Times that it was.
    """

    held: int = 0
    zeroed: int = 0
    waited: int = 0
    missed: int = 0
    dropped: int = 0
    overflows: int = 0


class ControlLoop:
    """Steps one env by the monotonic clock, in the thread that calls `run`.

    At every tick it executes the action that the newest answer has for this step, else what
    `on_late` says, and puts what came of it into the spool. It waits for nothing but the clock and
    the env. A tick that passed while the env was busy is left out and counted; the next ones come
    when they would have. A reset begins the clock anew. Until the first answer of an episode is
    there, nothing was executed that could be held, and the env is not stepped (but with `zero`).

    Args:
        group: The env, of one row, and started.
        spool: Where steps go.
        pace: How fast, and what when.
        notify: Called after each step; must not wait.
        stopping: Asked often whether to end.
        may_go_on: Asked before each tick; may raise what ends the loop.
        on_env_error: Called when the env failed, before it is reset, with how often it has done so
            since its last step; raises if that is no use.
        of_interest: Chooses what of the infos is kept.

    Attributes:
        actions: Where answers come in.
        counts: What it has done so far.

    Raises:
        ConfigError: The env has several rows, or actions that nobody can hold or zero.
    """

    def __init__(
        self,
        group: HostedGroup,
        spool: Spool,
        pace: Pace,
        *,
        notify: Callable[[], None],
        stopping: Callable[[], bool],
        may_go_on: Callable[[], bool],
        on_env_error: Callable[[EnvError, int], None],
        of_interest: InfoFilter,
    ) -> None:
        space = group.meta.action_space
        if group.meta.num_envs != 1:
            raise ConfigError(
                f"control_hz: expected an env of one row, got {group.meta.num_envs} rows"
            )
        if not isinstance(space, gym.Space) or not is_plain(space):
            raise ConfigError(f"control_hz: actions of {space} have no fixed shape")
        if pace.on_late == "zero" and not space.contains(zero_action(space)):
            raise ConfigError(f"on_late: zero is no action of {space}")
        self.actions = ActionQueue(pace.max_action_age_ms)
        self.counts = ControlCounts()
        self.space: gym.Space[Any] = space
        self._group = group
        self._spool = spool
        self._on_late = pace.on_late
        self._zero = as_executed(space, zero_action(space)) if pace.on_late == "zero" else None
        self._period_ns = round(1e9 / pace.hz)
        self._notify = notify
        self._stopping = stopping
        self._may_go_on = may_go_on
        self._on_env_error = on_env_error
        self._of_interest = of_interest
        self._failures = 0
        self._last: Any = None
        self._index = 0
        self._observed_ns = 0
        # Steps dropped since the spool was full; None while it is not.
        self._gap: int | None = None
        self._late_ns: deque[int] = deque(maxlen=_RECENT)
        self._ages_ns: deque[int] = deque(maxlen=_RECENT)

    def run(self) -> None:
        """Steps the env until told to stop.

        Raises:
            DeadlineExceededError: An answer was late, and `on_late` is `stop`.
            EnvError: What `on_env_error` raised.
        """
        self._reset()
        due_ns = time.monotonic_ns()
        while self._may_go_on():
            due_ns += self._period_ns
            if not self._sleep_until(due_ns):
                return
            now_ns = time.monotonic_ns()
            missed, rest_ns = divmod(now_ns - due_ns, self._period_ns)
            self.counts.missed += missed
            due_ns += missed * self._period_ns
            self._late_ns.append(rest_ns)
            if self._tick(now_ns):
                due_ns = time.monotonic_ns()

    def jitter_s(self) -> float:
        """Returns by how much steps were behind the clock lately, 99th percentile, in seconds."""
        return _quantile(self._late_ns, 0.99)

    def action_age_s(self, q: float) -> float:
        """Returns a quantile of the age of the policy's actions lately, in seconds; 0 if none."""
        return _quantile(self._ages_ns, q)

    def _sleep_until(self, due_ns: int) -> bool:
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(min(left_ns / 1e9, _SLICE_S))
            if self._stopping():
                return False
        return True

    def _tick(self, now_ns: int) -> bool:
        """Steps the env once, unless it has to wait; returns whether it was reset."""
        standing = self._last is None and self._on_late != "zero"
        chosen = self.actions.at(self._index, now_ns, any_age=standing)
        if chosen is None and standing:
            self.counts.waited += 1
            return False
        action, source = self._action_of(chosen)
        response = PolicyResponse(self._group.env_id, action=action)
        if chosen is not None:
            response.policy_version = getattr(chosen.answer.response, "policy_version", 0)
            self._ages_ns.append(chosen.age_ns)
        try:
            env_ret = self._group.step_here(response)
        except EnvError as error:
            if not self._stopping():
                self._note(error)
                self._reset()
            return True
        self._failures = 0
        self._observed_ns = time.monotonic_ns()
        self._index += 1
        self._stamp(env_ret, action, source, chosen)
        ended = bool(env_ret.last_terminated[0] | env_ret.last_truncated[0])
        if ended:
            self._begin_episode()
        self._hand_over(env_ret)
        return ended

    def _action_of(self, chosen: Chosen | None) -> tuple[Any, ActionSource]:
        if chosen is not None:
            return chosen.action, ActionSource.POLICY
        if self._on_late == "stop":
            raise DeadlineExceededError(
                "no action of the policy was there in time, and on_late is stop"
            )
        if self._on_late == "zero":
            self.counts.zeroed += 1
            return self._zero, ActionSource.ZERO
        self.counts.held += 1
        return self._last, ActionSource.HOLD

    def _stamp(
        self, env_ret: EnvRet, action: Any, source: ActionSource, chosen: Chosen | None
    ) -> None:
        """Says what was executed, and who chose it; the env knows if it was a person."""
        if env_ret.action_source is not None:
            said = ActionSource(int(np.ravel(env_ret.action_source)[0]))
            if said is ActionSource.HUMAN or source is ActionSource.POLICY:
                source = said
        executed = action if env_ret.executed_action is None else env_ret.executed_action
        self._last = as_executed(self.space, executed)
        env_ret.executed_action = self._last
        env_ret.action_source = np.array([source], np.int8)
        if chosen is not None and source in (ActionSource.POLICY, ActionSource.CLIPPED):
            env_ret.answered_seq = chosen.answer.seq
            env_ret.chunk_index = chosen.chunk_index

    def _reset(self) -> None:
        """Resets the env until that works, or until told to stop: what fails is left alone then."""
        while not self._stopping():
            try:
                env_ret = self._group.reset_here()
                break
            except EnvError as error:
                if not self._stopping():
                    self._note(error)
        else:
            return
        self._observed_ns = time.monotonic_ns()
        self._index += 1
        self._begin_episode()
        self._hand_over(env_ret, begins=True)

    def _note(self, error: EnvError) -> None:
        self._failures += 1
        self._on_env_error(error, self._failures)

    def _begin_episode(self) -> None:
        self._last = None
        self.actions.begin_episode(self._index)

    def _hand_over(self, env_ret: EnvRet, *, begins: bool = False) -> None:
        """Spools a step; when that is full, ends the episode there, as far as is told of it."""
        env_ret.info = self._of_interest(env_ret.info)
        nbytes, wants_action, dropped = nbytes_of(env_ret), True, 0
        if self._gap is not None:
            self._gap += 1
            self.counts.dropped += 1
            if not self._spool.is_half_empty:
                return
            dropped, self._gap = self._gap, None
            env_ret = self._as_begun(env_ret)
        elif not begins and self._spool.is_last(nbytes):
            self._gap = 0
            self.counts.overflows += 1
            env_ret, wants_action = self._as_ended(env_ret), False
        self._spool.put(
            env_ret,
            index=self._index,
            observed_ns=self._observed_ns,
            nbytes=nbytes,
            wants_action=wants_action,
            dropped=dropped,
        )
        self._notify()

    def _as_begun(self, env_ret: EnvRet) -> EnvRet:
        """Returns a step as the beginning of an episode."""
        begun = EnvRet(
            env_ret.env_id,
            env_ret.observation,
            np.zeros(1, np.float32),
            np.zeros(1, bool),
            np.zeros(1, bool),
            _extra=env_ret._extra,
            ts_observed_ns=env_ret.ts_observed_ns,
        )
        self._group.begin_episode(begun)
        return begun

    def _as_ended(self, env_ret: EnvRet) -> EnvRet:
        """Returns a step as the last of its episode, with nothing of the next one."""
        info = dict(env_ret.info)
        if info.pop("final_rows", None) is None:
            return replace(env_ret, last_truncated=np.ones(1, bool))
        before = self._spool.newest
        assert before is not None
        assert before.env_ret.step is not None
        return replace(
            env_ret,
            observation=info.pop("final_observation"),
            info=info,
            episode_id=before.env_ret.episode_id,
            step=before.env_ret.step + 1,
        )


def _quantile(recent_ns: deque[int], q: float) -> float:
    values = sorted(recent_ns.copy())  # the other thread may go on
    return values[min(len(values) - 1, int(q * len(values)))] / 1e9 if values else 0.0
