"""The server's side of attached envs: clients bring them, and an actor or a driver steps them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlightning.env.attached_cameras import CameraDecoder
from rlightning.env.attached_step import ArrivedStep, StepChecker
from rlightning.env.episodes import EpisodeLog, RowCounter
from rlightning.env.utils.agents import team_outcome
from rlightning.env.utils.infos import InfoFilter
from rlightning.errors import (
    CodecError,
    EnvError,
    InvalidRequestError,
    PreconditionError,
)
from rlightning.rpc.activity import Activity
from rlightning.rpc.protocol import Arrival, stamp
from rlightning.rpc.session import Session
from rlightning.types import EnvRet, PolicyResponse
from rlightning.types.sent import WhenLeft
from rlightning.utils.config import DEFAULT_POLICY
from rlightning.utils.conversions import map_leaves
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import (
    Reader,
    Writer,
    fill_policy_response,
    read_env_ret,
)

_LOG = logging.getLogger(__name__)

PREFIX = "attached/"
"""What the id of an attached group begins with; the rest is the id of its client."""

# Steps of one client that wait to be stored; one that sends more is read no further.
_MAX_WAITING = 128
# Acks are withheld while so many wait: who waits for acks keeps the rest, and is read on.
_MAX_ACKED = 32
# Pixels of one client that wait to be stored, in messages as large as they may be.
_MAX_PIXELS = 1
# Answers of which is known to which act request they were.
_KEPT_ACTS = 64
# Counted no further: sums of such counts have to fit in 64 bits.
_MAX_DROPPED = 2**48

Store = Callable[[EnvRet, PolicyResponse | None], Awaitable[None]]


class AttachedGroup:
    """The env of one client as a group of rows: an `EnvPort` whose steps happen elsewhere.

    `step` sends the answer to the client and waits for what its env returns. A step is taken once,
    however often it comes, and the answer to the last one is kept to be sent again. The env resets
    itself, at the client. Belongs to one event loop.

    Args:
        session: The client's session; outlives cuts.
        log: Takes finished episodes.
        counted: Told how many env steps were taken; every row counts.
        policy: Name of the policy that shall act.
        cameras: Which pictures of an observation come encoded.

    Attributes:
        env_id: Id of the group.
        meta: Spaces and number of rows.
        policy: Name of the policy that shall act.
        activity: Whether it waits for the client, and since when.
        store: Takes the EnvRets that want no answer, each with the one that another server gave to
            it, if one did; set before the first. None: `step` and `reset` hand these out like the
            others, and what they are answered with goes nowhere.
        failure: Why nobody drives it any more; None while somebody does.
        dropped: Steps that the client said it had to drop.
        wants_acks: Whether the client keeps steps until they are acked.

    Raises:
        InvalidRequestError: The client did not say its spaces and rows, or a camera is none.
        PreconditionError: There are cameras, and this server cannot decode them.
        ResourceExhaustedError: Their pixels take more than a message may.
    """

    def __init__(
        self,
        session: Session,
        log: EpisodeLog,
        counted: Callable[[int], None],
        policy: str = DEFAULT_POLICY,
        cameras: Sequence[pb.CameraEncoding] = (),
    ) -> None:
        self.env_id = PREFIX + session.client_id
        self._checker = checker = StepChecker(session.spec, self.env_id)
        self._rows, lossy = checker.rows, checker.spec.lossy
        self._cameras: CameraDecoder | None = None
        self._max_waiting, self._max_acked = _MAX_WAITING, _MAX_ACKED
        if cameras:
            cap = session.rpc.max_message_bytes
            self._cameras = CameraDecoder(cameras, checker.space, self._rows, cap // 2)
            held = max(1, _MAX_PIXELS * cap // self._cameras.nbytes)
            self._max_waiting = min(_MAX_WAITING, held)
            self._max_acked = min(_MAX_ACKED, held // 4)
            lossy = tuple(dict.fromkeys((*lossy, *self._cameras.lossy)))
        self.meta = replace(checker.spec, env_id=self.env_id, lossy=lossy)
        self.policy = policy
        self.activity = Activity()
        self.store: Store | None = None
        self.failure: Exception | None = None
        self._session = session
        self._counted = counted
        self._counter = RowCounter(self.env_id, self._rows, log)
        self._policy_version = 0
        self._of_interest = InfoFilter()
        self.dropped = 0
        self.wants_acks = False
        self._ack_due = False
        self._acts: dict[int, int] = {}
        self._inbox: deque[ArrivedStep] = deque()
        self._changed = asyncio.Event()
        self._left = False
        self._began = False
        self._seen = np.zeros(self._rows, bool)
        # What was handed out last and is not answered; and whether it is the outcome of a step.
        self._standing: tuple[EnvRet, bool] | None = None
        self._seq: int | None = None
        # The step that is answered, and the answer once there is one.
        self._asked: ArrivedStep | None = None
        self._answer: PolicyResponse | None = None

    # What the actor loop calls, or the session of a driver.

    async def came(self) -> None:
        """Returns when the client has sent its first step, or has left."""
        while not self._inbox and not self._left:
            await self._wait()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Returns the observation with which the client begins, or has begun anew.

        Somebody else who takes over gets the one at which the client stands.

        Raises:
            EnvError: The client has left.
            PreconditionError: A seed or options, which the client would not hear of.
        """
        if seed is not None or options:
            raise PreconditionError(
                f"env {self.env_id!r} is attached: it resets itself, and takes no seed and no "
                "options",
                reason="ATTACHED",
            )
        if self._standing is None:
            env_ret, stepped = await self._next()
            # The outcome of a step that another driver began is not of interest to this one.
            self._standing = env_ret, stepped and self.store is None
        env_ret, stepped = self._standing
        return self._as_begun(env_ret) if stepped else env_ret

    async def step(self, response: PolicyResponse, *, autoreset: bool = True) -> EnvRet:
        """Lets the client execute an answer; returns what its env returned.

        Args:
            response: The answer.
            autoreset: No matter what, the env begins its next episode in the step that ends one.

        Raises:
            EnvError: The client has left, or its env has failed and begun anew.
        """
        self._policy_version = getattr(response, "policy_version", 0)
        self._answer, self._standing = response, None
        if self._asked is not None:
            self._acts[self._asked.seq] = getattr(response, "seq", 0)
            if len(self._acts) > _KEPT_ACTS:
                del self._acts[next(iter(self._acts))]
        await self._send_answer()
        with self.activity.stepping():
            env_ret, continues = await self._next()
        self._standing = env_ret, continues
        if not continues:
            raise EnvError(f"env {self.env_id!r} failed at its client and was reset")
        return env_ret

    async def drain(self) -> None:
        """Stores the step that was handed out and is not answered, and those that came after it."""
        if self.store is None:
            return
        if self._standing is not None:
            (env_ret, _), self._standing = self._standing, None
            await self._store(env_ret, None)
        while self._inbox:
            came = self._inbox[0]
            env_ret, _ = self._pop()
            await self._store(env_ret, came.response)

    # What the session calls.

    @property
    def decodes_cameras(self) -> bool:
        """Whether pictures come encoded."""
        return self._cameras is not None

    @property
    def taken_seq(self) -> int:
        """The last step that was taken; 0 before the first."""
        return self._seq or 0

    async def take(
        self,
        reader: Reader[pb.AttachRequest],
        arrival: Arrival,
        base: int,
        left: WhenLeft | None = None,
    ) -> None:
        """Takes the steps of a message; those that came before are answered again, or ignored.

        After `leave` it takes none, and says so to a client that wants acks.

        Args:
            reader: The message.
            arrival: Its stamps.
            base: The last step that the client had sent when it came to this server.
            left: Tells when it left the client; None: nobody knows.

        Raises:
            InvalidRequestError: A step is missing, or is not what the spec says.
        """
        if self._left:
            await self._ack()
            return
        for step in reader.message.steps.steps:
            # The last step before a restart comes again if the client still waits for its answer.
            expected = (max(1, base), base + 1) if self._seq is None else (self._seq + 1,)
            if self._seq is not None and step.seq <= self._seq:
                if self._asked is not None and step.seq == self._asked.seq:
                    self._asked.arrival = arrival
                    await self._send_answer()
                continue
            if step.seq not in expected:
                raise InvalidRequestError(f"expected step {expected[-1]}, got {step.seq}")
            if step.dropped < 0:
                raise InvalidRequestError(f"step {step.seq}: dropped: {step.dropped} is below 0")
            env_ret = read_env_ret(step.env_ret, reader)
            if left is not None:
                env_ret.mark_left(left)
            if self._cameras is not None:
                await self._decode(step.seq, env_ret, self._cameras)
            self._checker.check(step.seq, env_ret)
            while len(self._inbox) >= self._max_waiting and not self._left:
                await self._wait()
            if self._left:  # meanwhile: nobody looks at the inbox once it is empty
                await self._ack()
                return
            self._seq = step.seq
            came = ArrivedStep(step.seq, env_ret, step.wants_action, step.dropped, arrival)
            if step.HasField("response") and not step.wants_action:
                came.response = self._checker.response_of(step, reader)
            self._inbox.append(came)
            self._changed.set()
        self._ack_due = self.wants_acks
        await self._ack_if_due()

    def leave(self) -> None:
        """Takes note that the client does not come back; what came of it is still handed out."""
        self._left = True
        self._changed.set()

    def close(self) -> None:
        """Ends the open episodes; nobody drives the group any more."""
        self._counter.cut(self._policy_version, "truncated")

    def fail(self, error: Exception) -> None:
        """Ends the client's session with an error, also one that is away at the moment."""
        self.failure = error
        if self._session.owner is not None:
            self._session.owner.end(error)

    async def _next(self) -> tuple[EnvRet, bool]:
        """Stores the EnvRets up to the newest one that wants an answer.

        Returns:
            That one, and whether it follows the one before it without a reset in between.

        Raises:
            EnvError: The client has left before.
        """
        while True:
            while not self._inbox:
                if self._left:
                    raise EnvError(f"client {self._session.client_id} has left")
                await self._wait()
            came = self._inbox[0]
            env_ret, continues = self._pop()
            await self._ack_if_due()
            # A client that goes on without an answer has no use for one to what it has passed.
            passed = self.store is not None and any(later.wants_action for later in self._inbox)
            asked = came.wants_action and not passed
            self._asked, self._answer = (came if asked else None), None
            if asked or self.store is None:
                return env_ret, continues
            await self._store(env_ret, came.response)

    async def _store(self, env_ret: EnvRet, response: PolicyResponse | None) -> None:
        assert self.store is not None
        env_ret.info = self._of_interest(env_ret.info)
        await self.store(env_ret, response)

    def _pop(self) -> tuple[EnvRet, bool]:
        """Returns the next EnvRet, counted, and whether it is the step after the last one."""
        came = self._inbox.popleft()
        self._changed.set()
        env_ret = came.env_ret
        env_ret.answered_seq = self._acts.get(env_ret.answered_seq, 0)
        if came.dropped:
            self.dropped = min(self.dropped + came.dropped, _MAX_DROPPED)
            _LOG.warning(
                "%s had no room for %d steps while it was away; its episode before them ends as "
                "truncated",
                self.env_id,
                came.dropped,
            )
        return env_ret, self._count(env_ret, gap=came.dropped > 0)

    def _count(self, env_ret: EnvRet, *, gap: bool) -> bool:
        """Counts a step or the beginning of new episodes, and numbers them if the client does not.

        Args:
            env_ret: The step.
            gap: Whether steps before it are missing.

        Returns:
            Whether it is the step after the last one.
        """
        counter, episode_id, step = self._counter, env_ret.episode_id, env_ret.step
        rows = slice(None) if env_ret.rows is None else env_ret.rows
        numbered = episode_id is not None and step is not None
        reward, terminated, truncated = team_outcome(
            env_ret.last_reward, env_ret.last_terminated, env_ret.last_truncated
        )
        continues = self._began and not gap
        if continues and numbered:
            same = (episode_id == counter.episode_id[rows]) & (step == counter.step[rows] + 1)
            ended = (terminated | truncated) & (step == 0)
            # Of a row that was not there when the group began here, nothing is known.
            continues = bool((same | ended | ~self._seen[rows]).all())
        if continues:
            self._counted(len(reward))
            counter.advance(reward, terminated, truncated, self._policy_version, env_ret.rows)
        else:
            counter.cut(self._policy_version)
            counter.begin(env_ret.rows)
            self._began = True
            self._seen[:] = False
        self._seen[rows] = True
        if episode_id is not None and step is not None:
            counter.follow(episode_id, step, env_ret.rows)
        else:
            env_ret.episode_id, env_ret.step = counter.episode_id[rows], counter.step[rows]
        return continues

    def _as_begun(self, env_ret: EnvRet) -> EnvRet:
        """Returns an observation without the outcome of the step before it."""
        return env_ret.copy(
            last_reward=map_leaves(np.zeros_like, env_ret.last_reward),
            last_terminated=map_leaves(np.zeros_like, env_ret.last_terminated),
            last_truncated=map_leaves(np.zeros_like, env_ret.last_truncated),
            info={},
            executed_action=None,
            action_source=None,
        )

    async def _decode(self, seq: int, env_ret: EnvRet, cameras: CameraDecoder) -> None:
        try:
            await cameras.decode(env_ret)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"step {seq}: {error}") from None

    async def _send_answer(self) -> None:
        if self._asked is None or self._answer is None:
            return
        message, writer = pb.AttachResponse(), Writer()
        message.answer.seq = self._asked.seq
        try:
            fill_policy_response(message.answer.response, self._answer, writer)
        except CodecError as error:
            raise InvalidRequestError(f"the policy's answer cannot be sent: {error}") from error
        stamp(message, self._asked.arrival)
        # Lost if the client is away: it asks for it again when it comes back.
        await self._session.send(writer.finish(message))

    async def _ack_if_due(self) -> None:
        if self._ack_due and len(self._inbox) <= self._max_acked:
            self._ack_due = False
            await self._ack()

    async def _ack(self) -> None:
        """Says which steps were taken. Lost if the client is away: the welcome says it again."""
        if self.wants_acks:
            ack = pb.AttachAck(taken_seq=self.taken_seq, closing=self._left)
            await self._session.send(pb.AttachResponse(ack=ack))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
