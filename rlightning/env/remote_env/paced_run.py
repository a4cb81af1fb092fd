"""One run of a client that steps its env by the clock: its control loop, its spool and its link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rlightning.env.hosting import HostedGroup
from rlightning.env.remote_env.answers import Answer
from rlightning.env.remote_env.cameras import CameraEncoder
from rlightning.env.remote_env.control_loop import ControlLoop, Pace
from rlightning.env.remote_env.paced_link import PacedLink
from rlightning.env.remote_env.spool import Spool, SpooledStep
from rlightning.env.utils.infos import InfoFilter
from rlightning.errors import EnvError
from rlightning.types import PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig

_LOG = logging.getLogger(__name__)

# How long what is spooled may take to arrive in the end.
_LEAVE_S = 5.0


@dataclass(frozen=True)
class ControlStatus:
    """How the control loop of a client has fared so far.

    Attributes:
        connected: Whether the server is there right now.
        jitter_ms: By how much the last steps were behind the clock, 99th percentile.
        age_p50_ms: Age of the policy's last actions when they were executed: time since the
            observation that they answer; median. 0.0 before the first.
        age_p99_ms: Its 99th percentile.
        held: Steps with the last action again.
        zeroed: Steps with zeros.
        waited: Ticks without a step, before the first answer of an episode.
        missed: Ticks that passed while the env was busy.
        skipped: Actions whose step had passed when they came.
        too_old: Times that an action was there and too old.
        spooled: Steps that no server has taken yet.
        spooled_bytes: Their bytes, and those of the last one that was taken.
        dropped: Steps that are lost, since the spool was full.
        uncertain: Steps that were on their way to a server that did not come back.
    """

    connected: bool
    jitter_ms: float
    age_p50_ms: float
    age_p99_ms: float
    held: int
    zeroed: int
    waited: int
    missed: int
    skipped: int
    too_old: int
    spooled: int
    spooled_bytes: int
    dropped: int
    uncertain: int


class PacedRun:
    """Lets a control loop and a link work side by side. Belongs to one event loop.

    Args:
        group: The env; started.
        pace: How fast, and what when.
        client_id: Who this is, unique among the clients of the server.
        address: `HOST:PORT` of the env server.
        rpc: Limits and times.
        auth: Token and certificates.
        policy: Name of the policy that shall act; empty: `default`.
        cameras: What encodes the pictures that are sent, if any are.
        stopping: Tells whether to end; called in the thread of the env, like those that follow.
        is_finish: Tells whether the env has finished.
        on_env_error: As of `ControlLoop`.
        of_interest: Chooses what of the infos is sent.

    Attributes:
        link: The connection; started by the caller.
        version: Of the weights that answered last; 0 before.

    Raises:
        ConfigError: The env cannot be stepped like that.
    """

    def __init__(
        self,
        group: HostedGroup,
        pace: Pace,
        client_id: str,
        *,
        address: str,
        rpc: RpcConfig | None,
        auth: ClientAuthConfig | None,
        policy: str,
        cameras: CameraEncoder | None,
        stopping: Callable[[], bool],
        is_finish: Callable[[], bool],
        on_env_error: Callable[[EnvError, int], None],
        of_interest: InfoFilter,
    ) -> None:
        self.version = 0
        self._stopping = stopping
        self._is_finish = is_finish
        self._spool = Spool(pace.spool_steps, int(pace.spool_mb * 1e6))
        self._control = ControlLoop(
            group,
            self._spool,
            pace,
            notify=self._notify,
            stopping=stopping,
            may_go_on=self._may_go_on,
            on_env_error=on_env_error,
            of_interest=of_interest,
        )
        self.link = PacedLink(
            address,
            group.meta,
            client_id,
            spool=self._spool,
            on_answer=self._on_answer,
            rpc=rpc,
            auth=auth,
            policy=policy,
            cameras=cameras,
        )
        self._overflows = 0

    async def run(self, thread: Executor) -> None:
        """Steps the env in a thread until told to stop; delivers what is spooled then.

        Raises:
            DeadlineExceededError: An answer was late, and `on_late` is `stop`.
            EnvError: The env failed again and again.
            RemoteError: The session has ended for good.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._control.run)
        finally:
            await self.link.flush(_LEAVE_S)
            if left := len(self._spool):
                _LOG.warning("%d steps could not be delivered any more", left)

    def status(self) -> ControlStatus:
        """Returns how it fares; any thread may ask."""
        control, counts = self._control, self._control.counts
        return ControlStatus(
            connected=self.link.connected,
            jitter_ms=control.jitter_s() * 1e3,
            age_p50_ms=control.action_age_s(0.5) * 1e3,
            age_p99_ms=control.action_age_s(0.99) * 1e3,
            held=counts.held,
            zeroed=counts.zeroed,
            waited=counts.waited,
            missed=counts.missed,
            skipped=control.actions.skipped,
            too_old=control.actions.too_old,
            spooled=len(self._spool),
            spooled_bytes=self._spool.nbytes,
            dropped=counts.dropped,
            uncertain=self.link.uncertain,
        )

    def _may_go_on(self) -> bool:
        if self.link.failure is not None:
            raise self.link.failure
        return not (self._stopping() or self._is_finish())

    def _notify(self) -> None:
        self.link.wake()

    def _on_answer(self, step: SpooledStep, response: PolicyResponse) -> None:
        self.version = getattr(response, "policy_version", 0)
        self._control.actions.offer(Answer.of(step, response, self._control.space))
