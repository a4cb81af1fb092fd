"""The link of an env that waits for nobody: sends what is spooled, hands over what is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from rlightning.env.remote_env.cameras import CameraEncoder
from rlightning.env.remote_env.link import AttachLink
from rlightning.env.remote_env.spool import Spool, SpooledStep
from rlightning.errors import EnvError, RemoteError, RLightningError, UnavailableError
from rlightning.types import EnvMeta, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.utils.waiting import wait_within
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_env_ret, fill_policy_response

_LOG = logging.getLogger(__name__)

# Steps that a server was sent and has not acked: what is not known if it never comes back. Not less
# than are executed in the longest round trip, or the newest step would never be sent.
_MAX_UNACKED = 64
# A server from which nothing comes for so long, though an ack is due, may be behind a link that was
# cut, and TCP tries that again only after as long as it was down. So it is asked whether it lives,
# and then another connection is made. It has twice as long as it took lately.
_PROBE_S = 0.7
_SILENT_S = 1.5
_WATCH_S = 0.1
_QUICK = RpcConfig(connect_timeout_ms=1000, reconnect_max_ms=250)
# Arrays of one message; a single step may have more.
_MESSAGE_BYTES = 256 * 1024


class PacedLink(AttachLink):
    """Sends every step of a spool in order, and asks for an action for the newest alone.

    A step is kept until the server has acked it. After a cut, a server that knows the session says
    what it has taken, and the rest is sent again. Another server begins a new segment with the last
    step that the one before has taken. If that one went without a word, steps that were on their
    way are not sent again, since they may have been stored: at most 64, which are counted.

    Args:
        address: `HOST:PORT` of the env server.
        meta: Spaces and rows of the env.
        client_id: Who this is, unique among the clients of the server.
        spool: What is sent.
        on_answer: Gets each answer with the step that it is for.
        rpc: Limits and times; default: those of `RpcConfig`, but for quicker attempts to connect.
        auth: Token and certificates.
        cameras: What encodes the pictures that are sent, if any are: as steps come, also while the
            link is down, so that the spool holds little.
        policy: Name of the policy that shall act; empty: `default`.

    Attributes:
        failure: Why the session has ended for good; None while it has not.
        uncertain: Steps of which it is not known whether a server has stored them.
    """

    def __init__(
        self,
        address: str,
        meta: EnvMeta,
        client_id: str,
        *,
        spool: Spool,
        on_answer: Callable[[SpooledStep, PolicyResponse], None],
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        cameras: CameraEncoder | None = None,
        policy: str = "",
    ) -> None:
        super().__init__(
            address,
            meta,
            client_id,
            rpc=rpc or _QUICK,
            auth=auth,
            cameras=cameras,
            policy=policy,
        )
        self.failure: RLightningError | None = None
        self.uncertain = 0
        self._spool = spool
        self._on_answer = on_answer
        self._base = 0
        self._sent = 0
        # The server takes no more, and has said what it has taken.
        self._settled = False
        self._asked: dict[int, SpooledStep] = {}
        # Of steps that may have to be sent again to another server.
        self._answers: dict[int, PolicyResponse] = {}
        self._loop = asyncio.get_running_loop()
        self._wake, self._progress = asyncio.Event(), asyncio.Event()
        # Steps whose pictures are encoded; with no cameras all are.
        self._encoded = 0
        self._came = asyncio.Event()
        # Since when an ack is due, or the last one came, if that is later; how long it may take.
        self._due_ns = 0
        self._patience_s = _SILENT_S
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, timeout_s: float) -> None:
        """Opens the session as `AttachLink.start` does, and sends from then on."""
        await super().start(timeout_s)
        self._tasks.add(asyncio.create_task(self._send_all()))
        self._tasks.add(asyncio.create_task(self._watch()))
        if self._cameras is not None:
            self._tasks.add(asyncio.create_task(self._encode_all(self._cameras)))

    def wake(self) -> None:
        """Says that there is something to send; any thread may call it, and waits for nothing."""
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            wake = self._wake if self._cameras is None else self._came
            self._loop.call_soon_threadsafe(wake.set)

    async def flush(self, timeout_s: float) -> None:
        """Waits until all steps are acked, as long as a server is there."""
        deadline = time.monotonic() + timeout_s
        while len(self._spool) and self.connected and self.failure is None:
            if (left_s := deadline - time.monotonic()) <= 0:
                return
            self._progress.clear()
            with suppress(asyncio.TimeoutError):
                await wait_within(self._progress.wait(), min(left_s, 0.1))

    async def close(self) -> None:
        """Ends the session in order and closes the connection."""
        try:
            await super().close()  # first: a task cancelled in a write would end the stream
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while steps := self._next_steps():
                    await self._session.send(self._encode(steps))
        except RLightningError as error:
            self.failure = self.failure or error

    async def _watch(self) -> None:
        """Makes another connection where the server is silent for too long."""
        session, probed_ns = self._session, 0
        while True:
            await asyncio.sleep(_WATCH_S)
            if not session.connected or self._sent <= self._spool.taken:
                continue
            silent_since_ns = max(self._due_ns, session.heard_ns)
            silent_s = (time.monotonic_ns() - silent_since_ns) / 1e9
            if silent_s > _PROBE_S and probed_ns != silent_since_ns:
                probed_ns = silent_since_ns
                self._tasks.add(probing := asyncio.create_task(session.probe()))
                probing.add_done_callback(self._tasks.discard)
            if silent_s > self._patience_s:
                self._patience_s = min(2 * self._patience_s, self._channel.rpc.lease_s)
                what = f"nothing heard for {silent_s:.1f} s"
                session.renew(UnavailableError(what, peer=self._channel.address))

    def _heard(self) -> None:
        """Takes note of how long the server was silent while it had something to ack."""
        now_ns = time.monotonic_ns()
        if self._sent > self._spool.taken:
            took_s = (now_ns - self._due_ns) / 1e9
            self._patience_s = max(_SILENT_S, 2 * took_s, 0.9 * self._patience_s)
        self._due_ns = now_ns

    async def _encode_all(self, cameras: CameraEncoder) -> None:
        try:
            while True:
                await self._came.wait()
                self._came.clear()
                while steps := self._spool.after(self._encoded, steps=1, max_bytes=0):
                    [step] = steps
                    self._spool.replace(step.seq, await cameras.encode(step.env_ret))
                    self._encoded = step.seq
                    self._wake.set()
        except Exception as error:
            self.failure = self.failure or EnvError(f"a picture cannot be encoded: {error}")

    def _newest(self) -> SpooledStep | None:
        """Returns the newest step that can be sent."""
        if self._cameras is None:
            return self._spool.newest
        ready = self._spool.after(self._encoded - 1, steps=1, max_bytes=0) if self._encoded else []
        return ready[0] if ready else None

    def _next_steps(self) -> list[SpooledStep]:
        session = self._session
        if not session.connected or session.draining or self._settled:
            return []
        room = _MAX_UNACKED - (self._sent - self._spool.taken)
        if self._cameras is not None:
            room = min(room, self._encoded - self._sent)
        return self._spool.after(self._sent, steps=room, max_bytes=_MESSAGE_BYTES)

    def _encode(self, steps: list[SpooledStep]) -> bytes:
        """Encodes steps, which count as sent from now on."""
        request, writer = self._session.new_request(), Writer()
        request.steps.epoch = self._session.epoch
        newest = self._newest()
        if self._sent <= self._spool.taken:
            self._due_ns = time.monotonic_ns()
        for step in steps:
            answer = self._answers.get(step.seq)
            asks = step is newest and step.wants_action and answer is None
            item = request.steps.steps.add(seq=step.seq, wants_action=asks, dropped=step.dropped)
            fill_env_ret(item.env_ret, step.env_ret.mark_env_sent(), writer)
            if answer is not None:
                fill_policy_response(item.response, answer, writer)
            if asks:
                self._asked[step.seq] = step
            self._sent = max(self._sent, step.seq)
        return writer.finish(request)

    def _prepare_hello(self, request: pb.AttachRequest) -> None:
        self._base = self._spool.taken if self._settled else self._sent
        request.hello.last_seq = self._base
        request.hello.wants_acks = True

    async def _on_welcome(self, reader: Reader[pb.AttachResponse]) -> None:
        spool, newest = self._spool, self._newest()
        self._due_ns = time.monotonic_ns()
        self._asked.clear()
        if self._session.resumed:
            spool.take(max(spool.taken, reader.message.taken_seq))
            self._sent = spool.taken
            if newest is not None and newest.seq <= self._sent:
                # It was taken, and its answer may have got lost.
                await self._session.send_now(self._encode([newest]))
        elif self._base:
            if (uncertain := self._base - spool.taken) > 0:
                self.uncertain += uncertain
                _LOG.warning(
                    "%d steps were on their way to a server that did not come back; they are not "
                    "sent again",
                    uncertain,
                )
            spool.take(self._base)
            # The new server has to see the last step once more, to begin with.
            self._sent = spool.taken = self._base - 1
        self._settled = False
        self._wake.set()

    def _on_message(self, reader: Reader[pb.AttachResponse]) -> None:
        message = reader.message
        self._heard()
        body = message.WhichOneof("body")
        if body == "ack":
            self._settled = message.ack.closing
            self._take(message.ack.taken_seq)
        elif body == "answer":
            seq = message.answer.seq
            self._take(seq)
            step = self._asked.pop(seq, None)
            if step is None:  # a later one was answered already
                return
            for older in [asked for asked in self._asked if asked < seq]:
                del self._asked[older]
            try:
                response = self._response_of(reader)
            except RemoteError as error:
                self.failure = error
                return
            self._answers = {s: r for s, r in self._answers.items() if s >= self._spool.taken}
            self._answers[seq] = response
            self._on_answer(step, response)

    def _take(self, seq: int) -> None:
        # Not what no step has: the number is the server's.
        if self._spool.taken < seq <= self._sent:
            self._spool.take(seq)
            self._wake.set()
            self._progress.set()

    def _on_failure(self, error: RemoteError) -> None:
        self.failure = self.failure or error
