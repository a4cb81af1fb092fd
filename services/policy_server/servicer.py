"""Decodes requests, asks the policy host, encodes answers."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlightning.errors import (
    CodecError,
    InvalidRequestError,
    PolicyError,
    PreconditionError,
    ResourceExhaustedError,
    RLightningError,
)
from rlightning.latency import LatencyStats
from rlightning.policy.pending import Pending
from rlightning.policy.preload import preload_torch
from rlightning.policy.transfer import SERVICE
from rlightning.policy.weight_store import Weights
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, stream_unary, unary_stream, unary_unary
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.protocol import LIBRARY_VERSION, Arrival, arrival_of, stamp
from rlightning.rpc.session import Session, SessionHandler, SessionMethod, SessionRegistry
from rlightning.rpc.status import to_error_status
from rlightning.types import Mode
from rlightning.utils.config import MainConfig, RpcConfig
from rlightning.utils.failpoints import failpoint
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1 import space_pb2
from rlightning.wire import (
    Reader,
    Writer,
    fill_env_meta,
    fill_policy_response,
    fill_value,
    read_env_ret,
    read_value,
    split_batch,
)

if TYPE_CHECKING:
    from rlightning.policy.host import PolicyHost
    from rlightning.policy.state import GroupState

_LOG = logging.getLogger(__name__)

# What a value takes once it is read, beside its bytes.
_VALUE_BYTES = 256
# A client has one request in flight; one that does not is read no further.
_MAX_ANSWERING = 8


class PolicyService:
    """`rlightning.v1.PolicyService` over one `PolicyHost`.

    Args:
        config: Sections `policy` and `services.policy`, and `log.latency`.
    """

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Act": "actor",
        "PublishWeights": "learner",
        "PullWeights": "learner",
        "Describe": "learner",
    }
    # A learner may bring the first weights, which a server without initial ones waits for.
    early_methods = ("PublishWeights", "Describe")

    def __init__(self, config: MainConfig) -> None:
        self._config = config.policy
        self._lockstep = config.train.lockstep
        self._measures = config.log.latency
        self._rpc = config.services.policy.rpc
        self._host: PolicyHost | None = None
        self._hosting = asyncio.Event()
        self._registry = SessionRegistry(self._rpc, f"/{SERVICE}/Act")
        self._acting = ActHandler(self._rpc, carried=self._config.state == "carried")
        self._uploaded = 0  # bytes of all the weights that are coming in

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handlers of all methods."""
        return {
            "Act": SessionMethod(self._registry, self._acting),
            "PublishWeights": stream_unary(pb.PublishWeightsRequest, self._publish_weights),
            "PullWeights": unary_stream(pb.PullWeightsRequest, self._pull_weights),
            "Describe": unary_unary(pb.PolicyServiceDescribeRequest, self._describe),
        }

    async def start(self) -> None:
        """Imports torch and the policy, and returns when it may act."""
        # In a thread, since the import takes a second or more and health must answer meanwhile.
        await asyncio.to_thread(preload_torch)
        module: Any = await asyncio.to_thread(import_module, "rlightning.policy.host")
        make = partial(module.PolicyHost, self._config, lockstep=self._lockstep)
        host: PolicyHost = await asyncio.to_thread(make)
        if not self._measures:
            host.batcher.stats.latency = LatencyStats(enabled=False)
        await host.start()
        # What torch made lives for ever: looking through it would stop the loop for 0.2 s.
        gc.freeze()
        self._host = self._acting.host = host
        self._hosting.set()
        await host.ready()

    async def drain(self, deadline_s: float) -> None:
        """Waits until every request that came has its answer."""
        await self._acting.drain(self._registry.sessions, deadline_s)

    async def close(self) -> None:
        """Ends the inference thread."""
        if self._host is not None:
            await self._host.close()

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.sessions("Act", self._registry.sessions)
        host = self._host
        if host is None:
            return
        stats = host.batcher.stats
        metrics.stages(stats.latency)
        metrics.counts("inference_batch_size", "Rows in one inference.", stats.batch_rows)
        queued = host.batcher.queued_rows
        metrics.gauge("queue_depth", "What waits, by queue.", queued, queue="inference_rows")
        metrics.gauge("policy_version", "Version of the weights in use.", host.version)
        metrics.gauge("state_bytes", "Recurrent state that is kept.", host.state_bytes)
        for name, text, value in (
            ("requests_total", "Requests answered.", stats.requests),
            ("rows_total", "Rows answered.", stats.rows),
            ("inference_errors_total", "Requests whose inference failed.", stats.errors),
            ("overloaded_total", "Requests refused since too much waited.", stats.overloaded),
        ):
            metrics.counter(name, text, value)
        text = "Work dropped since nobody waited for it any more."
        metrics.counter("expired_total", text, stats.expired, where="policy_queue")

    async def _hosted(self) -> PolicyHost:
        await self._hosting.wait()
        assert self._host is not None
        return self._host

    async def _publish_weights(
        self, requests: AsyncIterator[pb.PublishWeightsRequest], context: Context
    ) -> pb.PublishWeightsResponse:
        host = await self._hosted()
        received_ns = time.monotonic_ns()
        upload = _Upload()
        try:
            weights = await self._receive(requests, upload)
            await host.publish(weights, received_ns=received_ns)
        finally:
            self._uploaded -= upload.nbytes
        failpoint("weights.swapped")
        _LOG.debug("policy version %d is in use", weights.version)
        return pb.PublishWeightsResponse(policy_version=host.version)

    async def _receive(
        self, requests: AsyncIterator[pb.PublishWeightsRequest], upload: _Upload
    ) -> Weights:
        """Reads header and chunks; holds no more than the header announced."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("body") != "header":
            raise InvalidRequestError("the first message must be the header")
        header = first.header
        cap = self._config.max_weights_bytes
        if not 0 < header.total_bytes <= cap:
            raise ResourceExhaustedError(
                f"weights of {header.total_bytes} bytes; policy.max_weights_bytes of the server "
                f"allows {cap}",
                reason="WEIGHTS_TOO_LARGE",
            )
        digest = hashlib.sha256()
        parts: list[bytes] = []
        async for request in requests:
            upload.nbytes += len(request.chunk)
            self._uploaded += len(request.chunk)
            if request.WhichOneof("body") != "chunk" or upload.nbytes > header.total_bytes:
                raise InvalidRequestError(
                    f"expected chunks of {header.total_bytes} bytes in all, as announced"
                )
            if self._uploaded > cap:
                raise ResourceExhaustedError(
                    "the weights of several learners come at once: more than "
                    f"policy.max_weights_bytes of the server, {cap}",
                    reason="WEIGHTS_TOO_LARGE",
                )
            parts.append(request.chunk)
            await asyncio.to_thread(digest.update, parts[-1])
        received = upload.nbytes
        if received != header.total_bytes or digest.digest() != header.sha256:
            raise InvalidRequestError(
                f"{received} of {header.total_bytes} bytes came, with SHA-256 "
                f"{digest.hexdigest()}, expected {header.sha256.hex()}"
            )
        data = await asyncio.to_thread(b"".join, parts)
        return Weights(header.policy_version, data, header.sha256)

    async def _pull_weights(
        self, request: pb.PullWeightsRequest, context: Context
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        host = await self._hosted()
        # Somewhat less than the caller's time, so that the error still reaches it.
        left_s = context.time_remaining()
        timeout_s = self._rpc.lease_s if left_s is None else 0.9 * left_s
        await host.wait_for_version(request.min_policy_version, timeout_s)
        weights = host.weights
        header = pb.WeightsHeader(
            policy_version=weights.version,
            total_bytes=len(weights.data),
            sha256=weights.sha256,
        )
        yield pb.PullWeightsResponse(header=header)
        for _, part in split_batch(weights.data):
            yield pb.PullWeightsResponse(chunk=bytes(part))

    async def _describe(self, request: pb.PolicyServiceDescribeRequest, context: Context) -> bytes:
        arrival = arrival_of(request)
        host = await self._hosted()
        response = pb.PolicyServiceDescribeResponse(
            library_version=LIBRARY_VERSION,
            policy_version=host.version,
            sessions=self._registry.open_count,
        )
        writer = Writer()
        stats = {**host.describe(), "sessions": describe_sessions(self._registry.sessions)}
        fill_value(response.stats, stats, writer)
        if host.meta is not None:
            fill_env_meta(response.spec, host.meta, writer)
        stamp(response, arrival)
        return writer.finish(response)


@dataclass
class _Upload:
    """Weights that are coming in, until they are installed: how many bytes have come."""

    nbytes: int = 0


@dataclass
class _Group:
    """What the server keeps of one session: the last request, so its answer, and recurrent state.

    Attributes:
        seq: Number of the last request that was inferred.
        pending: That request.
        carried: State that came with it, and then that for its answer.
        state: State that is kept from step to step.
        begun: Whether `state` has followed the session from its beginning or a reset.
    """

    seq: int = 0
    pending: Pending | None = None
    carried: GroupState | None = None
    state: GroupState | None = None
    begun: bool = False
    open: bool = False
    answering: set[asyncio.Task[None]] = field(default_factory=set)


class ActHandler(SessionHandler[pb.ActRequest, pb.ActResponse]):
    """Serves the sessions of `Act`.

    Args:
        rpc: Limits and times.
        carried: Clients carry the policy's recurrent state.

    Attributes:
        host: Set once the service has one; sessions open only after that.
    """

    request_type = pb.ActRequest
    response_type = pb.ActResponse

    def __init__(self, rpc: RpcConfig, *, carried: bool) -> None:
        self._carried = carried
        self.host: PolicyHost | None = None
        self._wait_s = rpc.lease_s
        self._answering: set[asyncio.Task[None]] = set()

    async def on_open(self, session: Session, reader: Reader[pb.ActRequest]) -> pb.ActResponse:
        """Lets the session's group ask; waits for the weights it needs."""
        if session.spec is None:
            raise InvalidRequestError("hello names no spec: which spaces will ask?")
        host = self._hosted()
        await host.open_group(
            session.spec,
            min_version=reader.message.hello.min_policy_version,
            timeout_s=self._wait_s,
        )
        group = session.state if isinstance(session.state, _Group) else _Group()
        try:
            self._keep_state(group, max(1, session.spec.num_envs or 1))
        except RLightningError:
            host.close_group()
            raise
        session.state = group
        group.open = True
        response = pb.ActResponse()
        response.welcome.policy_version = host.version
        if host.states is not None:
            response.welcome.recurrent = True
            if self._carried:
                writer = Writer()
                fill_value(response.welcome.initial_state, host.states.initial, writer)
                # Another writer will finish the welcome: this one must leave nothing out of it.
                response = pb.ActResponse.FromString(writer.finish(response))
        return response

    async def on_close(self, session: Session, *, resumable: bool) -> None:
        """Closes the group; its last answer is kept for as long as the client may come back."""
        group: _Group = session.state
        if group.open:
            group.open = False
            self._hosted().close_group()
        if not resumable and group.state is not None:
            self._hosted().drop_state(group.state)
            group.state = None

    def message_cap(self, spec: space_pb2.EnvMeta, rpc: RpcConfig) -> int:
        """Returns the cap of any session, and room for the state that a client carries."""
        cap = super().message_cap(spec, rpc)
        states = self._hosted().states
        if self._carried and states is not None:
            cap += max(1, spec.num_envs) * states.row_bytes
        return cap

    async def on_message(self, session: Session, reader: Reader[pb.ActRequest]) -> None:
        """Queues a step, or finds the answer it already has."""
        if reader.message.WhichOneof("body") != "step":
            raise InvalidRequestError("expected a step")
        step = reader.message.step
        arrival = session.arrival
        group: _Group = session.state
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
                state = self._state_of(group, step, reader)
                pending = self._hosted().enqueue(
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
            group.carried = state if self._carried else None
        if pending.done or self._hosted().batcher.prompt:
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
        waiting: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(group.pending.wait())
            for group in groups
            if group.pending is not None and not group.pending.done
        }
        waiting |= self._answering
        if waiting:
            await asyncio.wait(waiting, timeout=deadline_s)

    def _keep_state(self, group: _Group, rows: int) -> None:
        """Lets a group have recurrent state for its rows: that of before, if it had some."""
        if group.state is not None:
            if group.state.rows == rows:
                return
            self._hosted().drop_state(group.state)
            group.state, group.begun = None, False
        if not self._carried:
            group.state = self._hosted().keep_state(rows)

    def _state_of(
        self, group: _Group, step: pb.ActStep, reader: Reader[pb.ActRequest]
    ) -> GroupState | None:
        """Returns the recurrent state that a step goes on from; None if the policy has none.

        Raises:
            PreconditionError: It is lost.
            InvalidRequestError: The step brings one that the policy cannot take.
        """
        states = self._hosted().states
        if states is not None and self._carried:
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
            states = self._hosted().states
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

    def _hosted(self) -> PolicyHost:
        if self.host is None:
            raise PreconditionError("the server is still starting")
        return self.host
