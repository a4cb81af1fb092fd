"""The sessions of `Act`: decodes steps, asks the policy that a session names, encodes answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rlightning.errors import (
    CodecError,
    InvalidRequestError,
    PolicyError,
    PreconditionError,
    ResourceExhaustedError,
    RLightningError,
)
from rlightning.policy.pending import Pending
from rlightning.rpc.protocol import Arrival, arrival_of, stamp
from rlightning.rpc.session import Session, SessionHandler
from rlightning.rpc.status import to_error_status
from rlightning.types import EnvRet, Mode
from rlightning.utils.config import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1 import space_pb2
from rlightning.v1.session_pb2 import CLIENT_STATE_RESETTING
from rlightning.wire import (
    Reader,
    Writer,
    fill_env_ret,
    fill_policy_response,
    fill_value,
    read_env_ret,
    read_value,
)

if TYPE_CHECKING:
    from rlightning.policy.host import PolicyHost
    from rlightning.policy.hosts import PolicyHosts
    from rlightning.policy.state import GroupState

_LOG = logging.getLogger(__name__)

# What a value takes once it is read, beside its bytes.
_VALUE_BYTES = 256
# A client has one request in flight; one that does not is read no further.
_MAX_ANSWERING = 8
# After so many requests a small network's are known to be short, and the interpreter has adapted.
_REHEARSALS = 64
# Who opens the first session waits for them, but no longer than this and one inference.
_REHEARSE_S = 0.05


@dataclass
class _Group:
    """What the server keeps of one session: the last request, so its answer, and recurrent state.

    Attributes:
        seq: Number of the last request that was inferred.
        pending: That request.
        carried: State that came with it, and then that for its answer.
        state: State that is kept from step to step.
        begun: Whether `state` has followed the session from its beginning or a reset.
        awaited: Whether batches wait for its requests.
    """

    host: PolicyHost
    seq: int = 0
    pending: Pending | None = None
    carried: GroupState | None = None
    state: GroupState | None = None
    begun: bool = False
    awaited: bool = False
    answering: set[asyncio.Task[None]] = field(default_factory=set)

    def expect(self, asks: bool) -> None:
        """Lets batches wait for its requests, or not."""
        if asks and not self.awaited:
            self.host.reopen_group()
        elif self.awaited and not asks:
            self.host.close_group()
        self.awaited = asks


class ActHandler(SessionHandler[pb.ActRequest, pb.ActResponse]):
    """Serves the sessions of `Act`.

    Args:
        rpc: Limits and times.

    Attributes:
        hosts: Set once the service has them; sessions open only after that.
    """

    request_type = pb.ActRequest
    response_type = pb.ActResponse
    # Rows are copied into the batch before the policy gets them.
    shares_memory = True

    def __init__(self, rpc: RpcConfig) -> None:
        self.hosts: PolicyHosts | None = None
        self._rpc = rpc
        self._answering: set[asyncio.Task[None]] = set()

    async def on_open(self, session: Session, reader: Reader[pb.ActRequest]) -> pb.ActResponse:
        """Lets the session's group ask; waits for the weights it needs."""
        if session.spec is None:
            raise InvalidRequestError("hello names no spec: which spaces will ask?")
        hello = reader.message.hello
        host = self._hosted().get(hello.policy)
        kept: _Group | None = session.state
        if kept is not None and kept.host is not host:
            raise PreconditionError(
                f"the session asks another policy than {hello.policy[:80]!r}: open a new one",
                reason="POLICY",
            )
        await host.open_group(
            session.spec,
            min_version=hello.min_policy_version,
            timeout_s=self._rpc.lease_s,
            rehearse=partial(self._rehearse, host),
        )
        group = _Group(host) if kept is None else kept
        try:
            _keep_state(group, max(1, session.spec.num_envs or 1))
            response = _welcome(host)
        except Exception:
            host.close_group()
            raise
        session.state = group
        group.awaited = True
        return response

    def on_state(self, session: Session) -> None:
        """Lets no batch wait for a client that resets, which may take minutes."""
        group: _Group = session.state
        group.expect(session.client_state != CLIENT_STATE_RESETTING)

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Closes the group; its last answer is kept for as long as the client may come back."""
        group: _Group = session.state
        group.expect(False)
        if not resumable and group.state is not None:
            group.host.drop_state(group.state)
            group.state = None

    def message_cap(self, spec: space_pb2.EnvMeta, rpc: RpcConfig) -> int:
        """Returns the cap of any session, and room for the state that a client carries."""
        hosts = self._hosted().by_name.values()
        carried = [
            host.states.row_bytes for host in hosts if host.carried and host.states is not None
        ]
        room = max(1, spec.num_envs) * max(carried, default=0)
        return super().message_cap(spec, rpc) + room

    async def on_message(self, session: Session, reader: Reader[pb.ActRequest]) -> None:
        """Queues a step, or finds the answer it already has."""
        if reader.message.WhichOneof("body") != "step":
            raise InvalidRequestError("expected a step")
        step = reader.message.step
        arrival = session.arrival
        group: _Group = session.state
        group.expect(True)  # its reset is over, if the last heartbeat told of one
        if step.seq < group.seq or step.seq < 1:
            raise PreconditionError(
                f"request {step.seq} came after {group.seq}: its answer is no longer kept",
                reason="SEQ",
            )
        pending = group.pending
        if step.seq > group.seq or pending is None or pending.failed:
            if group.state is not None and pending is not None and not pending.done:
                # Nobody waits for it any more, but it is a step of the state.
                with suppress(RLightningError):
                    await pending.wait()
            try:
                state = _state_of(group, step, reader)
                pending = group.host.enqueue(
                    read_env_ret(step.env_ret, reader),
                    Mode.EXPLOIT if step.mode == pb.MODE_EXPLOIT else Mode.EXPLORE,
                    state=state,
                    reset_state=step.reset_state,
                    received_ns=arrival.received_ns,
                    timeout_us=arrival.timeout_us,
                    nbytes=reader.nbytes + _VALUE_BYTES * reader.used()[0],
                )
            except RLightningError as refused:
                # Nothing was inferred, so the same number may be tried again.
                await self._send_error(session, step.seq, refused, arrival)
                return
            group.seq, group.pending = step.seq, pending
            group.carried = state if group.host.carried else None
        if pending.done or group.host.batcher.prompt:
            await self._answer(session, step.seq, pending, group.carried, arrival)
        else:
            # Not awaited here: the stream's heartbeats must be read during a long inference.
            answering = self._answer(session, step.seq, pending, group.carried, arrival)
            task = asyncio.create_task(answering)
            for tasks in (self._answering, group.answering):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            task.add_done_callback(self._answered)
            if len(group.answering) >= _MAX_ANSWERING:
                await asyncio.wait(group.answering, return_when=asyncio.FIRST_COMPLETED)

    async def drain(self, sessions: Iterable[Session], deadline_s: float) -> None:
        """Waits until what was asked is answered, at the longest for `deadline_s` seconds."""
        groups = [session.state for session in sessions if isinstance(session.state, _Group)]
        pendings = [group.pending.wait() for group in groups if group.pending is not None]
        # Errors among them are told to who asked.
        answered = asyncio.gather(*pendings, *self._answering, return_exceptions=True)
        await asyncio.wait({answered}, timeout=deadline_s)

    async def _rehearse(self, host: PolicyHost, zeros: EnvRet) -> None:
        """Answers requests of zeros, from bytes to bytes, in a session that nobody has."""
        session = Session("rehearsal", self, "Act", self._rpc)
        session.state = group = _Group(host, awaited=True)  # by nobody
        end = time.monotonic() + _REHEARSE_S
        for seq in range(1, _REHEARSALS + 1):
            request = pb.ActRequest()
            stamp(request)
            request.step.seq = seq
            # Explored actions may be drawn, and the first ones of a seed are for who asks.
            request.step.mode = pb.MODE_EXPLOIT
            request.step.reset_state = True
            writer = Writer()
            fill_env_ret(request.step.env_ret, zeros, writer)
            reader = Reader(pb.ActRequest, writer.finish(request))
            session.arrival = arrival_of(reader.message)
            await self.on_message(session, reader)
            if group.pending is None:  # refused
                return
            await group.pending.wait()
            if time.monotonic() > end:
                return

    async def _answer(
        self,
        session: Session,
        seq: int,
        pending: Pending,
        carried: GroupState | None,
        arrival: Arrival,
    ) -> None:
        try:
            policy_response, stages = await pending.wait()
        except RLightningError as error:
            await self._send_error(session, seq, error, arrival)
            return
        writer = Writer()
        response = pb.ActResponse()
        answer = response.answer
        answer.seq = seq
        times = answer.stages
        times.queue_us = stages.queue_us
        times.batch_wait_us = stages.batch_wait_us
        times.inference_us = stages.inference_us
        times.batch_rows = stages.batch_rows
        try:
            policy_response.mark_policy_sent()
            fill_policy_response(answer.response, policy_response, writer)
            group: _Group = session.state
            states = group.host.states
            if carried is not None and states is not None:
                fill_value(answer.state, states.arrays(carried), writer)
            stamp(response, arrival)
            await session.send(writer.finish(response))
        except CodecError as error:
            wrong = PolicyError(f"the policy's answer cannot be sent: {error}")
            await self._send_error(session, seq, wrong, arrival)
        except ResourceExhaustedError as error:
            await self._send_error(session, seq, error, arrival)

    async def _send_error(
        self, session: Session, seq: int, error: RLightningError, arrival: Arrival
    ) -> None:
        response = pb.ActResponse()
        response.answer.seq = seq
        response.answer.error.CopyFrom(to_error_status(error))
        await session.send(response, answers=arrival)

    def _answered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("an answer was not sent", exc_info=error)

    def _hosted(self) -> PolicyHosts:
        if self.hosts is None:
            raise PreconditionError("the server is still starting")
        return self.hosts


def _welcome(host: PolicyHost) -> pb.ActResponse:
    """Returns a welcome with what a client must know of the policy.

    Raises:
        CodecError: It carries the policy's state, which cannot be sent.
    """
    response = pb.ActResponse()
    response.welcome.policy_version = host.version
    if host.states is not None:
        response.welcome.recurrent = True
        if host.carried:
            writer = Writer()
            fill_value(response.welcome.initial_state, host.states.initial, writer)
            # Another writer will finish the welcome: this one must leave nothing out of it.
            response = pb.ActResponse.FromString(writer.finish(response))
    return response


def _keep_state(group: _Group, rows: int) -> None:
    """Lets a group have recurrent state for its rows: that of before, if it had some."""
    if group.state is not None:
        if group.state.rows == rows:
            return
        group.host.drop_state(group.state)
        group.state, group.begun = None, False
    if not group.host.carried:
        group.state = group.host.keep_state(rows)


def _state_of(group: _Group, step: pb.ActStep, reader: Reader[pb.ActRequest]) -> GroupState | None:
    """Returns the recurrent state that a step goes on from; None if the policy has none.

    Raises:
        PreconditionError: It is lost.
        InvalidRequestError: The step brings one that the policy cannot take.
    """
    states = group.host.states
    if states is not None and group.host.carried:
        if step.HasField("state"):
            return states.read_carried(read_value(step.state, reader))
        if step.seq == 1 or step.reset_state:
            return states.begin_carried()
    if step.HasField("state"):
        # Ignoring it would let the client believe that its answers depend on it.
        who = "this server's policy has none" if states is None else "this server keeps it"
        raise InvalidRequestError(f"state: a client brought recurrent state, and {who}")
    group.begun = group.begun or step.seq == 1 or step.reset_state
    if states is not None and not group.begun:
        raise PreconditionError(
            f"the recurrent state before request {step.seq} is not here; send it again with "
            "reset_state",
            reason="STATE_LOST",
        )
    return group.state
