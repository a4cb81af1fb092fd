"""The client of a policy server, which asks for actions; needs no torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import Self

from rlightning.errors import (
    CodecError,
    ConfigError,
    DeadlineExceededError,
    PolicyError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
)
from rlightning.latency import ActTimes, ClockOffset, LatencyStats
from rlightning.latency.stages import ACT, ActStamps
from rlightning.policy.calls import CALL_TIMEOUT_S, PolicyCalls
from rlightning.policy.carried import CarriedState
from rlightning.policy.replicas import Replicas
from rlightning.policy.transfer import SERVICE
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.replicas import Endpoint
from rlightning.rpc.spec import shared_bytes
from rlightning.rpc.status import from_error_status
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose
from rlightning.types.sent import Left
from rlightning.utils.config import DEFAULT_POLICY, ClientAuthConfig, RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.v1.session_pb2 import Stages, Timing
from rlightning.wire import (
    Reader,
    Writer,
    fill_observation,
    fill_value,
    read_policy_response,
    read_value,
)

# How long the first heartbeat of a session may take before it is not waited for any more.
_EXCHANGE_S = 1.0

_Session = SessionClient[pb.ActRequest, pb.ActResponse]


class PolicyClient(PolicyCalls):
    """Asks a policy server for actions, publishes and pulls weights, over one connection.

    `act` needs a session, which `start` opens; it is resumed by itself after a cut or a restart of
    the server, and the unanswered request is sent again under its number. Of several servers that
    are given the same weights, replicas, the session goes to the one with the fewest sessions, and
    moves when that one drains or dies. The other methods need no session; they try again while the
    server cannot be reached, and of several ask the one that the session is at, or the first.
    Belongs to one event loop.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`; for replicas their addresses, or a name
            with several addresses.
        spec: Spaces and rows of the group that will ask; only `act` needs it.
        client_id: Who this is, `[A-Za-z0-9._-]{1,64}`, unique among the server's clients; default:
            a random one.
        rpc: Limits and times.
        auth: Token and certificates.
        act_timeout_s: How long an answer may take, reconnects included, in seconds.
        stats: Where durations are recorded; by default, those of this client alone.
        policy: Name of the policy that shall answer, and whose weights are meant; empty: `default`.
        replicas: The servers at `address`, if other clients of this process choose among them, too;
            stays the caller's.

    Attributes:
        stats: Durations of the stages from `encode` to `decode` (see `rlightning.latency.STAGES`)
            and, as `act`, of the whole round trip; `uplink` and `downlink` where the server's clock
            is known, with their uncertainty.
        one_way_unknown: Answers whose `uplink` and `downlink` are not known.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        spec: EnvMeta | None = None,
        client_id: str | None = None,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        act_timeout_s: float = 60.0,
        stats: LatencyStats | None = None,
        policy: str = "",
        replicas: Replicas | None = None,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise ConfigError("a PolicyClient needs an address")
        super().__init__(connect(addresses[0], rpc=rpc, auth=auth), policy)
        self.stats = LatencyStats() if stats is None else stats
        self.one_way_unknown = 0
        self._answered: tuple[int, tuple[Any, ...]] | None = None
        self._rpc = rpc
        self._auth = auth
        self._endpoint = Endpoint(addresses[0], addresses[0])
        self._own_replicas: Replicas | None = None
        if replicas is None:
            replicas = self._own_replicas = Replicas(addresses, rpc=rpc, auth=auth)
        self._seat = replicas.seat()
        self._spec = spec
        self._client_id = client_id or f"policy-client-{uuid.uuid4().hex[:16]}"
        self._act_timeout_s = act_timeout_s
        self._session: _Session | None = None
        self._ask: _Ask | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._seq = 0
        self._version = 0
        self._recurrent = False
        self._carried: CarriedState | None = None
        self._unanswered: EnvRet | None = None

    @property
    def times(self) -> ActTimes | None:
        """Where the time of the last answer went; None before it, or if it was asked for twice."""
        if self._answered is None:
            return None
        seq, stamps = self._answered
        return ActTimes.of(seq, ActStamps(*stamps))

    @property
    def offset(self) -> ClockOffset:
        """The server's clock against this one: as the session knows it, or else as `describe`."""
        return self._offset if self._session is None else self._session.offset

    async def start(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Opens the session.

        Raises:
            ConfigError: No spec was given.
            PreconditionError: The policy is for other spaces; the message lists what differs.
            NotFoundError: The server has no policy of that name.
            UnavailableError: No server answered in time.
        """
        if self._spec is None:
            raise ConfigError("a PolicyClient that acts needs the spec of its group")
        self._session = SessionClient(
            self._channel,
            f"/{SERVICE}/Act",
            request_type=pb.ActRequest,
            response_type=pb.ActResponse,
            client_id=self._client_id,
            spec=self._spec,
            prepare_hello=self._prepare_hello,
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_failure=self._on_failure,
            route=self._route,
            shared_bytes=shared_bytes(self._spec, self._channel.rpc),
        )
        await self._session.start(timeout_s)
        await self._session.exchange(_EXCHANGE_S)

    async def close(self) -> None:
        """Ends the session and closes the connection."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._session is not None:
            await self._session.close()
        self._seat.arrived()
        self._on_failure(UnavailableError("the client was closed", peer=self.address))
        await self._channel.close()
        if self._own_replicas is not None:
            await self._own_replicas.close()

    async def __aenter__(self) -> Self:
        if self._spec is not None:
            try:
                await self.start()
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def act(
        self,
        env_ret: EnvRet,
        *,
        mode: Mode = Mode.EXPLORE,
        purpose: Purpose = Purpose.TRAIN,
        reset_state: bool = False,
    ) -> PolicyResponse:
        """Returns the policy's answer for one group; one call at a time.

        Observation, reward and flags are sent; what else `env_ret` holds is for the buffer. After a
        DeadlineExceededError the same `env_ret` is asked about again, and so answered once.

        Args:
            env_ret: Rows of the group; its arrays must not change before the answer.
            mode: Explore or exploit.
            purpose: What the answer is for.
            reset_state: Begin with a fresh recurrent state.

        Returns:
            The answer, with `policy_version` and `seq`, the number of this request. Its arrays are
            read-only views with the leading dimension of `env_ret`.

        Raises:
            InvalidRequestError: The observation is not in the declared space; the message names the
                key.
            ResourceExhaustedError: The message passes a cap, or too much waits for inference.
            DeadlineExceededError: No answer in time.
            PreconditionError: The server does not hold the recurrent state of these rows any more
                (reason STATE_LOST): ask again with `reset_state`.
            RemoteError: The policy raised (its message is here), or the session ended for good.
        """
        session = self._session
        if session is None:
            raise PolicyError("act needs a session: await start() first")
        if self._ask is not None:
            raise PolicyError("act was called while another call waits for its answer")
        if env_ret is not self._unanswered or reset_state:
            self._seq += 1
        self._unanswered = env_ret
        if reset_state and self._carried is not None:
            self._carried.reset()
        answer: asyncio.Future[PolicyResponse] = asyncio.get_running_loop().create_future()
        begun_ns = time.monotonic_ns()
        deadline_ns = begun_ns + int(self._act_timeout_s * 1e9)
        ask = _Ask(
            self._seq,
            env_ret,
            mode,
            purpose,
            reset_state,
            answer,
            deadline_ns,
            begun_ns,
        )
        self._ask = ask
        if self._alarm is None:
            self._set_alarm(ask)
        try:
            await session.send(self._encode(session, ask))
            response = await answer
            self._unanswered = None
        except DeadlineExceededError:
            raise
        except BaseException as error:
            self._unanswered = None
            if session.memory and isinstance(error, (CodecError, ResourceExhaustedError)):
                session.memory.free(ask.sent_ns)  # nothing was sent
            raise
        finally:
            self._ask = None
        if self.stats.enabled:
            self._record(session, ask)
            if self._answered is not None:
                response.mark_left(partial(_left, *self._answered))
        return response

    async def _route(self) -> Channel:
        # What servers say at once is the version of `default`.
        needed = self._version if self._policy in {"", DEFAULT_POLICY} else 0
        endpoint = await self._seat.choose(needed)
        if endpoint != self._endpoint:
            before, self._endpoint = self._channel, endpoint
            auth = endpoint.auth(self._auth)
            self._channel = connect(endpoint.address, rpc=self._rpc, auth=auth)
            await before.close()
        return self._channel

    def _prepare_hello(self, request: pb.ActRequest) -> None:
        # A server that lost its weights must get them back before it answers this session again.
        request.hello.min_policy_version = self._version
        request.hello.policy = self._policy

    async def _on_welcome(self, reader: Reader[pb.ActResponse]) -> None:
        self._seat.arrived()
        welcome = reader.message.welcome
        self._recurrent = welcome.recurrent
        if not welcome.HasField("initial_state"):
            self._carried = None
        elif self._carried is None and self._spec is not None:
            initial = read_value(welcome.initial_state, reader)
            self._carried = CarriedState(initial, max(1, self._spec.num_envs or 1))
        session, ask = self._session, self._ask
        if session is not None and ask is not None:
            await session.send_now(self._encode(session, ask))

    def _encode(self, session: _Session, ask: _Ask) -> bytes:
        request = session.new_request()
        ask.sent_ns = request.timing.sent_ns
        request.timing.timeout_us = max(1, (ask.deadline_ns - ask.sent_ns) // 1000)
        step = request.step
        step.seq = ask.seq
        step.epoch = session.epoch
        step.mode = int(ask.mode)  # type: ignore[assignment]  # stubs want the generated enum
        step.purpose = int(ask.purpose)  # type: ignore[assignment]
        if ask.reset_state:
            step.reset_state = True
        if session.memory is not None:
            session.memory.begin(ask.sent_ns)
        writer = Writer(memory=session.memory)
        fill_observation(step.env_ret, ask.env_ret, writer, episodes=self._recurrent)
        if self._carried is not None and not ask.reset_state:
            fill_value(step.state, self._carried.of(ask.env_ret), writer)
        data = writer.finish(request)
        ask.encoded_ns = time.monotonic_ns()
        session.encoded = ask.sent_ns, ask.encoded_ns
        return data

    def _on_message(self, reader: Reader[pb.ActResponse]) -> None:
        message = reader.message
        ask = self._ask
        answer = message.answer
        if self._session is not None and self._session.memory is not None:
            self._session.memory.free(message.timing.echo_sent_ns)
        # A late answer must not reach a newer observation; a repeated one has been taken already.
        if ask is None or answer.seq != ask.seq or ask.answer.done():
            return
        if answer.WhichOneof("result") == "error":
            ask.answer.set_exception(from_error_status(answer.error, peer=self.address))
            return
        try:
            response = read_policy_response(answer.response, reader)
            if self._carried is not None and answer.HasField("state"):
                self._carried.keep(ask.env_ret, read_value(answer.state, reader))
        except CodecError as error:
            ask.answer.set_exception(RemoteError(f"bad answer: {error}", peer=self.address))
            return
        response.seq = ask.seq
        self._version = max(self._version, answer.response.policy_version)
        if self._session is not None:
            ask.timing, ask.stages = message.timing, answer.stages
            ask.heard_ns = self._session.heard_ns
        ask.answer.set_result(response)

    def _record(self, session: _Session, ask: _Ask) -> None:
        now_ns, timing, stages = time.monotonic_ns(), ask.timing, ask.stages
        if timing is None or stages is None or timing.echo_sent_ns != ask.sent_ns:
            # Sent twice: the stamps are those of the other one.
            self._answered = None
            self.stats.record("act", (now_ns - ask.begun_ns) * 1e-9)
            return
        encoded_ns, heard_ns = ask.encoded_ns, ask.heard_ns
        received_ns, sent_ns = timing.received_ns, timing.sent_ns
        lower_ns, upper_ns = session.offset.bounds(heard_ns)
        # Not within bounds that are NaN either.
        if not (received_ns - encoded_ns >= lower_ns and sent_ns - heard_ns <= upper_ns):
            self.one_way_unknown += 1
        # As in `ActStamps`, of which making one costs as much as recording it.
        stamps = (
            now_ns,
            ask.begun_ns,
            encoded_ns,
            received_ns,
            sent_ns,
            heard_ns,
            stages.queue_us,
            stages.batch_wait_us,
            stages.inference_us,
            lower_ns,
            upper_ns,
        )
        self._answered = ask.seq, stamps
        self.stats.record_stamps(ACT, stamps)

    def _set_alarm(self, ask: _Ask) -> None:
        # One timer outlives many requests: setting and cancelling one for each costs more.
        left_s = (ask.deadline_ns - time.monotonic_ns()) * 1e-9
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, left_s), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        ask = self._ask
        if ask is None or ask.answer.done():
            return
        if time.monotonic_ns() < ask.deadline_ns:
            self._set_alarm(ask)
            return
        ask.answer.set_exception(
            DeadlineExceededError(
                f"no answer to request {ask.seq} within {self._act_timeout_s:g} s",
                peer=self.address,
            )
        )

    def _on_failure(self, error: RemoteError) -> None:
        if self._ask is not None and not self._ask.answer.done():
            self._ask.answer.set_exception(error)


@dataclass(slots=True)
class _Ask:
    """The request that waits for its answer."""

    seq: int
    env_ret: EnvRet
    mode: Mode
    purpose: Purpose
    reset_state: bool
    answer: asyncio.Future[PolicyResponse]
    deadline_ns: int
    begun_ns: int
    sent_ns: int = 0
    encoded_ns: int = 0
    timing: Timing | None = None
    stages: Stages | None = None
    heard_ns: int = 0


def _left(seq: int, stamps: tuple[Any, ...]) -> Left | None:
    """Returns when an answer left the policy server, and how far that may be off, in ns."""
    times = ActTimes.of(seq, ActStamps(*stamps))
    if times.ways is None:
        return None
    left_ns = times.heard_ns - round(times.ways.downlink_s * 1e9)
    return left_ns, round(times.ways.uncertainty_s * 1e9)
