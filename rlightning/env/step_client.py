"""The client's side of `Step`: resets and steps envs of an env server, across cuts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import Self

from rlightning.env.remote_client import SERVICE, EnvClient, EnvStatus
from rlightning.errors import (
    CodecError,
    DeadlineExceededError,
    PreconditionError,
    RemoteError,
    UnavailableError,
)
from rlightning.latency.ways import left_at
from rlightning.rpc.channel import connect
from rlightning.rpc.client import SessionClient
from rlightning.rpc.status import from_error_status
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import (
    Reader,
    Writer,
    fill_policy_response,
    fill_value,
    read_env_ret,
)

_WATCH_S = 0.1


class StepClient:
    """Drives envs whose config says `driver: external`. Belongs to one event loop.

    Envs may be reset and stepped at the same time, each by one call at a time. A command that a cut
    left without an answer is sent again under its number, and executed once. A server that has lost
    the session, since it was restarted or the cut took longer than its resume window, has envs that
    begin anew: steps that wait then raise `PreconditionError` with the reason `STATE_LOST`, resets
    are sent again.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        client_id: Who this is, `[A-Za-z0-9._-]{1,64}`, unique among the server's drivers; default:
            a random one.
        rpc: Limits and times.
        auth: Token and certificates.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.
        answer_timeout_s: How long a reset or a step may take, in seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        client_id: str | None = None,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        reconnect_timeout_s: float = 60.0,
        answer_timeout_s: float = 600.0,
    ) -> None:
        self.address = address
        self._reconnect_timeout_s = reconnect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._channel = connect(address, rpc=rpc, auth=auth)
        self._describer = EnvClient(address, rpc=rpc, auth=auth)
        self._session = SessionClient(
            self._channel,
            f"/{SERVICE}/Step",
            request_type=pb.StepRequest,
            response_type=pb.StepResponse,
            client_id=client_id or f"driver-{uuid.uuid4().hex[:16]}",
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_failure=self._fail_all,
        )
        self._seq = 0
        self._waiting: dict[int, _Waiting] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float = 30.0) -> None:
        """Opens the session.

        Raises:
            PreconditionError: The actor loop steps all envs there; the message names the key.
            UnavailableError: No server answered in time.
        """
        await self._session.start(timeout_s)
        self._watcher = asyncio.create_task(self._watch())

    async def describe(self, *, timeout_s: float = 10.0) -> EnvStatus:
        """Returns which envs there are; those of `external_env_ids` can be driven.

        Raises:
            RemoteError: The server did not answer, or refused.
        """
        return await self._describer.describe(timeout_s=timeout_s)

    async def wait_for_clients(self) -> None:
        """Returns when the clients that the server waits for are there.

        Raises:
            DeadlineExceededError: They did not come in time.
            RemoteError: The session ended for good.
        """
        await self._execute(lambda command, writer: None, repeatable=True)

    async def claim(self, env_ids: Sequence[str]) -> None:
        """Keeps envs from other drivers, and leaves them as they are.

        Raises:
            AlreadyExistsError: Another driver has one of them.
            NotFoundError: There is no such env.
            PreconditionError: The actor loop steps one of them.
            RemoteError: The session ended for good.
        """

        def fill(command: pb.StepCommand, writer: Writer) -> None:
            command.claim_env_ids.extend(env_ids)

        await self._execute(fill, repeatable=True)

    async def reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in every row of an env.

        Args:
            env_id: The env.
            seed: Its seed; None: it goes on with its own.
            options: Its options; None: none.

        Returns:
            The first observations; arrays are read-only. `corrected_latency` is since the server
            sent them.

        Raises:
            CodecError: The options cannot be sent.
            RemoteError: The env failed, or it is not one to be driven by this client; or the
                session ended for good.
        """

        def fill(command: pb.StepCommand, writer: Writer) -> None:
            command.reset_env_ids.append(env_id)
            if seed is not None:
                command.seed = seed
            if options is not None:
                fill_value(command.options, dict(options), writer)

        return (await self._execute(fill, repeatable=True))[0]

    async def step(self, response: PolicyResponse, *, autoreset: bool = True) -> EnvRet:
        """Steps the env that a response names.

        Args:
            response: `env_id` and `action`, with the leading dimension of the env's rows.
            autoreset: Whether an env of one row begins its next episode in the step that ends one;
                others always do.

        Returns:
            The next observations, as of `reset`.

        Raises:
            CodecError: The action cannot be sent.
            PreconditionError: The env was not reset before; or, with the reason `STATE_LOST`, it
                has begun anew since then.
            RemoteError: The env failed, or the session ended for good.
        """

        def fill(command: pb.StepCommand, writer: Writer) -> None:
            command.autoreset = autoreset
            fill_policy_response(command.responses.add(), response, writer)

        return (await self._execute(fill, repeatable=False))[0]

    async def close(self) -> None:
        """Ends the session in order, which frees the envs, and closes the connection."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._session.close()
        self._fail_all(UnavailableError("the client was closed", peer=self.address))
        await self._channel.close()
        await self._describer.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _execute(self, fill: _Fill, *, repeatable: bool) -> list[EnvRet]:
        """Sends a command and returns the answer to it.

        Args:
            fill: Writes what to do.
            repeatable: Whether it may be executed by a server that knows nothing of it.
        """
        answer: asyncio.Future[list[EnvRet]] = asyncio.get_running_loop().create_future()
        await self._session.settled()  # a welcome may number commands anew
        self._seq += 1
        deadline = time.monotonic() + self._answer_timeout_s
        waiting = _Waiting(self._seq, fill, repeatable, answer, deadline)
        data = self._encode(waiting)
        self._waiting[waiting.seq] = waiting
        try:
            await self._session.send(data)
            return await answer
        finally:
            if self._waiting.get(waiting.seq) is waiting:
                del self._waiting[waiting.seq]

    def _encode(self, waiting: _Waiting) -> bytes:
        request, writer = self._session.new_request(), Writer()
        request.command.seq = waiting.seq
        request.command.epoch = self._session.epoch
        waiting.fill(request.command, writer)
        return writer.finish(request)

    async def _on_welcome(self, reader: Reader[pb.StepResponse]) -> None:
        waiting = sorted(self._waiting.values(), key=lambda one: one.seq)
        if not self._session.resumed:
            self._seq = 0
            self._waiting.clear()
            for one in waiting:
                if one.repeatable:
                    self._seq += 1
                    one.seq = self._seq
                    self._waiting[one.seq] = one
                else:
                    one.fail(_state_lost(self.address))
        for one in sorted(self._waiting.values(), key=lambda one: one.seq):
            await self._session.send_now(self._encode(one))

    def _on_message(self, reader: Reader[pb.StepResponse]) -> None:
        answer = reader.message.answer
        waiting = self._waiting.get(answer.seq)
        if waiting is None or waiting.answer.done():  # comes again, or too late
            return
        if answer.HasField("error"):
            waiting.fail(from_error_status(answer.error, peer=self.address))
            return
        sent_ns, heard_ns = reader.message.timing.sent_ns, self._session.heard_ns
        left = partial(left_at, sent_ns, heard_ns, *self._session.offset.bounds(heard_ns))
        try:
            env_rets = [read_env_ret(one, reader).mark_left(left) for one in answer.env_rets]
        except CodecError as error:
            waiting.fail(RemoteError(f"bad answer: {error}", peer=self.address))
        else:
            waiting.answer.set_result(env_rets)

    async def _watch(self) -> None:
        """Gives up what has waited too long, for its answer or for a connection."""
        lost_since: float | None = None
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if self._session.connected:
                lost_since = None
            elif lost_since is None:
                lost_since = now
            elif now - lost_since > self._reconnect_timeout_s:
                why = self._session.last_error
                self._fail_all(
                    UnavailableError(
                        f"no connection for {self._reconnect_timeout_s:g} s"
                        + (f": {why}" if why else ""),
                        peer=self.address,
                    )
                )
            for one in self._waiting.values():
                if now > one.deadline:
                    one.fail(
                        DeadlineExceededError(
                            f"not done within {self._answer_timeout_s:g} s", peer=self.address
                        )
                    )

    def _fail_all(self, error: RemoteError) -> None:
        for one in self._waiting.values():
            one.fail(error)


_Fill = Callable[[pb.StepCommand, Writer], None]


@dataclass
class _Waiting:
    """A command that waits for its answer."""

    seq: int
    fill: _Fill
    repeatable: bool
    answer: asyncio.Future[list[EnvRet]]
    deadline: float

    def fail(self, error: RemoteError) -> None:
        """Ends the wait with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


def _state_lost(address: str) -> PreconditionError:
    return PreconditionError(
        "the server holds the session no longer, so its envs begin anew: reset them",
        peer=address,
        reason="STATE_LOST",
    )
