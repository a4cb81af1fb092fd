"""The client's side of `Attach`: a session; and one with one step at a time, across cuts."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from rlightning.env.remote_client import SERVICE
from rlightning.env.remote_env.cameras import CameraEncoder
from rlightning.errors import CodecError, PreconditionError, RemoteError, UnavailableError
from rlightning.rpc.channel import connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.status import from_error_status
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_env_ret, read_policy_response

# What gRPC says where somebody listens and hangs up before a word of HTTP/2 has come.
_HUNG_UP = re.compile(r"failed to connect to all addresses.*(Socket closed|reset by peer)")
_TLS_HINT = "does it want TLS? give --ca, or auth with a ca_file"
# An env server answers a hello at once. What vanished on a link that was cut, TCP sends again only
# after as long as it was down.
_WELCOME_S = 2.0


class AttachLink(ABC):
    """One attached env's connection. Belongs to one event loop.

    Args:
        address: `HOST:PORT` of the env server.
        meta: Spaces and rows of the env.
        client_id: Who this is, unique among the clients of the server.
        rpc: Limits and times.
        auth: Token and certificates.
        policy: Name of the policy that shall act; empty: `default`.
        cameras: What encodes the pictures that are sent, if any are.

    Attributes:
        welcomes: How often a server has let this client in.
    """

    def __init__(
        self,
        address: str,
        meta: EnvMeta,
        client_id: str,
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        cameras: CameraEncoder | None = None,
        policy: str = "",
    ) -> None:
        self.welcomes = 0
        self._plaintext = auth is None or not auth.with_tls
        self._policy = policy
        self._cameras = cameras
        self._encodes = False
        self._channel = connect(address, rpc=rpc, auth=auth)
        self._session = SessionClient(
            self._channel,
            f"/{SERVICE}/Attach",
            request_type=pb.AttachRequest,
            response_type=pb.AttachResponse,
            client_id=client_id,
            spec=meta if cameras is None else cameras.meta,
            prepare_hello=self._greet,
            on_welcome=self._welcomed,
            on_message=self._on_message,
            on_failure=self._on_failure,
            welcome_timeout_s=_WELCOME_S,
        )

    @property
    def connected(self) -> bool:
        """Whether a server is there right now."""
        return self._session.connected

    @property
    def trouble(self) -> str:
        """Why no server is there right now, as far as it is known; empty while one is."""
        error = None if self.connected else self._session.last_error
        return "" if error is None else self._explain(str(error))

    async def start(self, timeout_s: float) -> None:
        """Opens the session.

        Raises:
            PreconditionError: The cluster is for other spaces; the message lists what differs.
            AlreadyExistsError: Another client has this id.
            ResourceExhaustedError: The server is full.
            UnavailableError: No server answered in time.
        """
        try:
            await self._session.start(timeout_s)
        except UnavailableError as error:
            error.args = (self._explain(str(error)),)
            raise

    async def close(self) -> None:
        """Ends the session in order and closes the connection."""
        await self._session.close()
        self._on_failure(UnavailableError("the client was closed", peer=self._channel.address))
        await self._channel.close()

    def _explain(self, trouble: str) -> str:
        doubtful = self._plaintext and not self.welcomes and _HUNG_UP.search(trouble) is not None
        return f"{trouble} ({_TLS_HINT})" if doubtful else trouble

    def _greet(self, request: pb.AttachRequest) -> None:
        request.hello.policy = self._policy
        if self._cameras is not None:
            self._encodes = self._cameras.declare(request.hello)
        self._prepare_hello(request)

    async def _welcomed(self, reader: Reader[pb.AttachResponse]) -> None:
        if self._encodes and not reader.message.decodes_cameras:
            raise PreconditionError(
                "this server is of a version that decodes no cameras: leave them out",
                peer=self._channel.address,
            )
        self.welcomes += 1
        await self._on_welcome(reader)

    @abstractmethod
    def _prepare_hello(self, request: pb.AttachRequest) -> None: ...

    @abstractmethod
    async def _on_welcome(self, reader: Reader[pb.AttachResponse]) -> None: ...

    @abstractmethod
    def _on_message(self, reader: Reader[pb.AttachResponse]) -> None: ...

    @abstractmethod
    def _on_failure(self, error: RemoteError) -> None: ...

    def _response_of(self, reader: Reader[pb.AttachResponse]) -> PolicyResponse:
        """Returns what an answer holds.

        Raises:
            RemoteError: An error, or what cannot be decoded.
        """
        answer, peer = reader.message.answer, self._channel.address
        if answer.WhichOneof("result") == "error":
            raise from_error_status(answer.error, peer=peer)
        try:
            return read_policy_response(answer.response, reader)
        except CodecError as error:
            raise RemoteError(f"bad answer: {error}", peer=peer) from error


class LockstepLink(AttachLink):
    """The link of an env that waits for each answer.

    A step that waits for its answer is sent again under its number after a cut. A server that knows
    the session answers it as before; another one begins a new segment with it. So a step is
    executed once, by whichever answer comes first.
    """

    _asked: _Asked | None = None
    _seq = 0

    async def ask(self, env_ret: EnvRet) -> PolicyResponse:
        """Sends a step and returns the answer to it, however often the connection breaks.

        Raises:
            RemoteError: The session ended for good.
        """
        self._seq += 1
        answer: asyncio.Future[PolicyResponse] = asyncio.get_running_loop().create_future()
        self._asked = asked = _Asked(self._seq, env_ret, answer)
        try:
            await self._session.send(self._encode(asked))
            return await answer
        finally:
            self._asked = None

    async def tell(self, env_ret: EnvRet) -> None:
        """Sends the last step, which wants no answer.

        Raises:
            RemoteError: The session has ended for good.
        """
        self._seq += 1
        await self._session.send(self._encode(_Asked(self._seq, env_ret)))

    def _prepare_hello(self, request: pb.AttachRequest) -> None:
        # Not `last_env_ret`: a step that waits for its answer is sent again by itself, and one that
        # was answered must not be answered once more.
        request.hello.last_seq = self._seq

    async def _on_welcome(self, reader: Reader[pb.AttachResponse]) -> None:
        asked = self._asked
        if asked is not None:
            await self._session.send_now(self._encode(asked))

    def _encode(self, asked: _Asked) -> bytes:
        request, writer = self._session.new_request(), Writer()
        request.steps.epoch = self._session.epoch
        step = request.steps.steps.add(seq=asked.seq, wants_action=asked.answer is not None)
        fill_env_ret(step.env_ret, asked.env_ret, writer)
        return writer.finish(request)

    def _on_message(self, reader: Reader[pb.AttachResponse]) -> None:
        answer, asked = reader.message.answer, self._asked
        # An answer that comes again has been executed already.
        if asked is None or asked.answer is None or answer.seq != asked.seq or asked.answer.done():
            return
        try:
            asked.answer.set_result(self._response_of(reader))
        except RemoteError as error:
            asked.answer.set_exception(error)

    def _on_failure(self, error: RemoteError) -> None:
        asked = self._asked
        if asked is not None and asked.answer is not None and not asked.answer.done():
            asked.answer.set_exception(error)


@dataclass
class _Asked:
    """A step as it was sent; with `answer`, one that waits for it."""

    seq: int
    env_ret: EnvRet
    answer: asyncio.Future[PolicyResponse] | None = None
