"""Attaches an env of this process to an env server."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from rlightning.env.episodes import EpisodeLog
from rlightning.env.hosting import HostedGroup
from rlightning.env.remote_env.caller_thread import CallerThread
from rlightning.env.remote_env.cameras import CameraEncoder, CameraOption
from rlightning.env.remote_env.control_loop import OnLate, Pace
from rlightning.env.remote_env.given import as_base_env
from rlightning.env.remote_env.link import AttachLink, LockstepLink
from rlightning.env.remote_env.paced_run import ControlStatus, PacedRun
from rlightning.env.utils.infos import InfoFilter
from rlightning.errors import ConfigError, EnvError, ObservationError
from rlightning.rpc.loop import LoopThread
from rlightning.types import EnvRet
from rlightning.utils.config import (
    DEFAULT_POLICY,
    ClientAuthConfig,
    RpcConfig,
    check_policy_name,
)
from rlightning.v1.session_pb2 import CLIENT_STATE_RESETTING

_LOG = logging.getLogger(__name__)

# Failures of the env in a row after which the client gives up.
_MAX_FAILURES = 10


@dataclass(frozen=True)
class AttachStatus:
    """What a client has done so far.

    Attributes:
        state: `connecting`, `running` or `resetting`; `ended` once `run` has.
        steps: Env steps; every row counts.
        episodes: Finished episodes.
        reconnects: Times that the connection was lost and made again.
        env_errors: Times that the env failed and was reset.
        policy_version: Version of the weights that answered last; 0 before.
        trouble: Why it is still connecting, as far as it is known; else empty.
        control: How its control loop fares; None without one, or before it runs.
    """

    state: str
    steps: int
    episodes: int
    reconnects: int
    env_errors: int
    policy_version: int
    trouble: str = ""
    control: ControlStatus | None = None


class RemoteEnvClient:
    """Brings an env into a cluster: the policy there acts in it, the buffer there stores it.

    ```python
    RemoteEnvClient(gymnasium.make("CartPole-v1"), "10.0.0.1", 50051).run()
    ```

    The env is stepped in the thread that calls `run`; the connection and its heartbeats live in a
    thread of their own, so that a step or a reset may take minutes. After a cut or a restart of the
    server the client goes on by itself, with the observation it holds, and steps nothing twice. An
    env that raises is reset, and what comes next is joined to nothing before.

    By default the env waits for each answer. With `control_hz`, `run` is a control loop: it steps
    the env by the clock and never waits for the network. An answer acts in the step that asked for
    it or not at all; one with an axis of actions more, [1, H, ...], in the H steps from that one
    on. What is executed without one is stored as such (`EnvRet.action_source`), also what was while
    the server was away.

    Args:
        env: A `gymnasium.Env`, a vector env, or a `BaseEnv`.
        hostname: Host of the env server.
        port: Its port.
        name: Who this is, `[A-Za-z0-9._-]{1,64}`, unique among the clients of the server; default:
            this machine's name and a random number.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server at first, in seconds.
        control_hz: Steps a second; None: as fast as answers come. For envs of one row.
        on_late: What is done when no answer is there in time: `hold` executes the last action
            again, `zero` zeros, and `stop` ends `run` with an error. An episode begins with its
            first answer, however late that is, but with `zero`.
        max_action_age_ms: An action is not used if the observation that it answers is older.
        spool_steps: Steps that may wait for a server that is away. When there is no room for more,
            the episode ends as truncated, and steps are dropped until half of it is free.
        spool_mb: Megabytes of them.
        cameras: How pictures in the observation are sent, `CODEC[:QUALITY][@WIDTHxHEIGHT]` with a
            codec of `none`, `png` and `jpeg`, by the keys that lead to them, joined by dots:
            `{"wrist": "jpeg:80@320x240"}`. Needs Pillow, here and at the server. What is resized
            has that size for the policy and the buffer, too. By default all is sent as it is.
        policy: Name of the policy that shall act, of those of the policy server.

    Raises:
        ConfigError: `env` is none of these, or an option is not valid.
    """

    def __init__(
        self,
        env: Any,
        hostname: str,
        port: int,
        *,
        name: str | None = None,
        auth: ClientAuthConfig | None = None,
        rpc: RpcConfig | None = None,
        connect_timeout_s: float = 30.0,
        control_hz: float | None = None,
        on_late: OnLate = "hold",
        max_action_age_ms: float | None = None,
        spool_steps: int = 10_000,
        spool_mb: float = 256.0,
        cameras: Mapping[str, str] | None = None,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self._camera_options = {
            name: CameraOption.parse(text, name) for name, text in (cameras or {}).items()
        }
        self._cameras: CameraEncoder | None = None
        self._pace: Pace | None = None
        if control_hz is not None:
            self._pace = Pace(control_hz, on_late, max_action_age_ms, spool_steps, spool_mb)
        elif on_late != "hold" or max_action_age_ms is not None:
            raise ConfigError("on_late and max_action_age_ms: expected control_hz beside them")
        self.env = as_base_env(env)
        self.name = name or f"{_host_name()}-{uuid.uuid4().hex[:8]}"
        self._address = f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"
        self._auth = auth
        self._rpc = rpc
        self._policy = check_policy_name(policy)
        self._connect_timeout_s = connect_timeout_s
        self._thread = CallerThread()
        self._loop: LoopThread | None = None
        self._log = EpisodeLog(1)
        self._group = HostedGroup(
            self.env.config,
            self.name,
            worker_index=0,
            log=self._log,
            inline_below_us=0,  # the loop is for the connection alone
            make=lambda: self.env,
            thread=self._thread,
        )
        self._of_interest = InfoFilter(self.env.config.info_keys)
        self._started = False
        self._ended = False
        self._link: AttachLink | None = None
        self._paced: PacedRun | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_asked = False
        self._env_errors = 0
        self._failures = 0
        self._policy_version = 0

    @property
    def status(self) -> AttachStatus:
        """What this client has done so far; any thread may ask."""
        link = self._link
        resetting = self._group.activity.state == CLIENT_STATE_RESETTING
        connected = link is not None and link.connected
        state = "resetting" if resetting else "running" if connected else "connecting"
        return AttachStatus(
            state="ended" if self._ended else state,
            steps=self._group.env_steps,
            episodes=self._log.cursor,
            reconnects=max(0, link.welcomes - 1) if link is not None else 0,
            env_errors=self._env_errors,
            policy_version=self._policy_version if self._paced is None else self._paced.version,
            trouble="" if link is None or self._ended else link.trouble,
            control=None if self._paced is None else self._paced.status(),
        )

    @property
    def is_paced(self) -> bool:
        """Whether the env is stepped by the clock."""
        return self._pace is not None

    def is_finish(self) -> bool:
        """Whether to stop after the step just taken; to override. Asks the env by default."""
        return self.env.is_finish()

    def run(self) -> None:
        """Steps the env until `is_finish`, `stop` or Ctrl-C; may be called again after that.

        Ctrl-C ends the session in order, so that the open episode is truncated, and closes the env.

        Raises:
            RemoteError: The server refused this client, or was not there in time.
            DeadlineExceededError: An answer was late, and `on_late` is `stop`.
            EnvError: The env failed again and again.
            KeyboardInterrupt: Ctrl-C.
        """
        if self._loop is None:
            self._loop = LoopThread("rlightning-attach")
        job = self._loop.submit(self._run())
        try:
            self._thread.run_until_done(job, self.stop)
        except KeyboardInterrupt:
            self.close()
            raise

    def stop(self) -> None:
        """Ends `run` after the step in flight; any thread may call it."""
        self._stop_asked = True
        stopping = self._stopping
        if self._loop is not None and stopping is not None:
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                self._loop.loop.call_soon_threadsafe(stopping.set)

    def close(self) -> None:
        """Closes the env and ends the thread. Safe to repeat; not while `run` runs."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            if self._cameras is not None:
                self._cameras.close()
            self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _run(self) -> None:
        group, self._stopping, self._ended = self._group, asyncio.Event(), False
        if not self._started:
            await group.start()
            if self._camera_options:
                self._cameras = CameraEncoder(self._camera_options, group.meta)
            self._started = True
        with group.activity.told_by_sessions():
            self._link = link = self._make_link()
        try:
            if await self._connected(link):
                if isinstance(link, LockstepLink):
                    await self._drive(link)
                elif self._paced is not None:
                    await self._paced.run(self._thread)
        finally:
            self._stopping, self._stop_asked, self._ended = None, False, True
            await link.close()

    def _make_link(self) -> AttachLink:
        to: dict[str, Any] = {
            "address": self._address,
            "rpc": self._rpc,
            "auth": self._auth,
            "policy": self._policy,
            "cameras": self._cameras,
        }
        if self._pace is None:
            return LockstepLink(meta=self._group.meta, client_id=self.name, **to)
        self._paced = PacedRun(
            self._group,
            self._pace,
            self.name,
            **to,
            stopping=lambda: self._stop_asked,
            is_finish=self.is_finish,
            on_env_error=self._note_there,
            of_interest=self._of_interest,
        )
        return self._paced.link

    async def _connected(self, link: AttachLink) -> bool:
        """Opens the session; False if this client was told to stop meanwhile."""
        assert self._stopping is not None
        if self._stop_asked:
            return False
        starting = asyncio.ensure_future(link.start(self._connect_timeout_s))
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.wait({starting, stopped})

    async def _drive(self, link: LockstepLink) -> None:
        assert self._stopping is not None
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            env_ret = await self._reset()
            while env_ret is not None and not (self._stop_asked or self.is_finish()):
                asking = asyncio.ensure_future(link.ask(await self._to_send(env_ret)))
                await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():  # told to stop
                    # Cancelled in a write, it would end the stream, and no farewell would go out.
                    # Closing the link ends it.
                    asking.add_done_callback(lambda task: task.cancelled() or task.exception())
                    return
                response = asking.result()
                self._policy_version = getattr(response, "policy_version", 0)
                try:
                    env_ret = await self._group.step(response)
                except EnvError as error:
                    if self._stop_asked:
                        return
                    self._note(error)
                    env_ret = await self._reset()
                else:
                    self._failures = 0
            if env_ret is not None:
                await link.tell(await self._to_send(env_ret))
        finally:
            stopped.cancel()

    async def _reset(self) -> EnvRet | None:
        """Resets the env until that works; None: told to stop, and what failed is left alone."""
        while not self._stop_asked:
            try:
                return await self._group.reset()
            except EnvError as error:
                if self._stop_asked:  # Ctrl-C reaches the process of an env as well
                    break
                self._note(error)
                await asyncio.sleep(min(0.05 * 2**self._failures, 1.0))
        return None

    async def _to_send(self, env_ret: EnvRet) -> EnvRet:
        env_ret.info = self._of_interest(env_ret.info)
        if self._cameras is not None:
            env_ret = await self._cameras.encode(env_ret)
        return env_ret.mark_env_sent()

    def _note(self, error: EnvError) -> None:
        """Takes note of a failure of the env.

        Raises:
            EnvError: There were too many, or a reset is no help.
        """
        self._failures += 1
        self._check(error, self._failures)
        self._warn(error)

    def _note_there(self, error: EnvError, failures: int) -> None:
        """Does so in the thread of the env, where nothing may wait for a log handler."""
        self._check(error, failures)
        if self._loop is not None:
            self._loop.loop.call_soon_threadsafe(self._warn, error)
        time.sleep(min(0.05 * 2**failures, 1.0))

    def _check(self, error: EnvError, failures: int) -> None:
        self._env_errors += 1
        if failures >= _MAX_FAILURES or isinstance(error, ObservationError):
            raise error

    def _warn(self, error: EnvError) -> None:
        _LOG.warning("the env is reset: %s", error)


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40] or "client"
