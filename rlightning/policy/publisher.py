"""Keeps a policy server on the newest weights, also when it loses them. Needs no torch."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    PreconditionError,
    RemoteError,
    UnavailableError,
)
from rlightning.policy.remote_policy import PolicyClient
from rlightning.policy.transfer import transfer_timeout_s
from rlightning.utils.waiting import wait_within

_LOG = logging.getLogger(__name__)

# Between two attempts to reach a server that is away.
_PAUSE_S = 0.2
_FAREWELL_S = 1.0


def late_message(version: int, timeout_s: float, trouble: RemoteError | None) -> str:
    """Returns what to say of weights that are not in use in time, and why, if that is known."""
    why = "" if trouble is None else f": {trouble}"
    return f"version {version} is not in use after {timeout_s:g} s{why}"


class WeightPublisher:
    """Publishes the latest weights, and again whenever the server has an older version.

    A server that was killed comes back without weights, or with those of its last run: until it is
    given the latest, the sessions that saw them are kept waiting. Keeps the lease on publishing,
    and waits while another learner holds it. Belongs to one event loop.

    Args:
        client: Of the server; stays the caller's.
        learner_id: Who publishes, unique among learners.
        watch_s: How often to look at the server's version, in seconds.
        acks: Notified after every attempt; several publishers may share one.

    Attributes:
        acked: The last version that the server said it uses; 0 before.
        reached: Whether the last attempt reached it; True before the first.
        trouble: Why the last attempt failed; None if it did not.
    """

    def __init__(
        self,
        client: PolicyClient,
        *,
        learner_id: str = "learner",
        watch_s: float = 1.0,
        acks: asyncio.Condition | None = None,
    ) -> None:
        self.acked = 0
        self.reached = True
        self.trouble: RemoteError | None = None
        self._client = client
        self._learner_id = learner_id
        self._watch_s = watch_s
        self._latest: tuple[int, bytes] | None = None
        self._changed = asyncio.Event()
        self._acks = asyncio.Condition() if acks is None else acks
        self._failure: RemoteError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to publish what is offered."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops, and gives the lease up; what was offered last may not have been published."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self.acked and self.reached:
            with suppress(RemoteError):
                await self._client.keep_lease(self._learner_id, leaving=True, timeout_s=_FAREWELL_S)

    def offer(self, version: int, data: bytes) -> None:
        """Takes weights to publish; those offered before and not sent yet are skipped.

        Raises:
            RemoteError: The server refused earlier weights.
        """
        self.raise_failure()
        self._latest = version, data
        self._changed.set()

    async def publish(self, version: int, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Offers weights and waits until they, or later ones, are in use.

        Raises:
            DeadlineExceededError: That took too long.
            RemoteError: The server refused them.
        """
        self.offer(version, data)
        deadline = time.monotonic() + timeout_s
        async with self._acks:
            while self.acked < version:
                self.raise_failure()
                try:
                    left_s = max(0.0, deadline - time.monotonic())
                    await wait_within(self._acks.wait(), left_s)
                except asyncio.TimeoutError:
                    raise DeadlineExceededError(
                        late_message(version, timeout_s, self.trouble), peer=self._client.address
                    ) from None

    def raise_failure(self) -> None:
        """Raises what the server refused weights with, if it did."""
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await wait_within(self._changed.wait(), self._watch_s)
            self._changed.clear()
            if self._latest is None:
                continue
            version, data = self._latest
            try:
                await self._bring_up_to(version, data)
                self.reached, self.trouble = True, None
            except AlreadyExistsError as error:
                if self.trouble is None:
                    _LOG.warning("version %d of the weights has to wait: %s", version, error)
                self.trouble = error
            except (UnavailableError, DeadlineExceededError) as error:
                # It may be restarting; who waits in `publish` has a deadline of its own.
                level = logging.WARNING if self.reached else logging.DEBUG
                _LOG.log(level, "version %d of the weights has to wait: %s", version, error)
                self.reached, self.trouble = False, error
            except PreconditionError as error:
                if self._latest[0] == version or error.reason != "VERSION_TOO_OLD":
                    self._fail(version, error)
                else:  # newer ones were offered meanwhile, which it may have from another replica
                    self._changed.set()
            except RemoteError as error:
                self._fail(version, error)
            async with self._acks:
                self._acks.notify_all()
            if self._failure is not None:
                return
            if self.trouble is not None:
                await asyncio.sleep(min(_PAUSE_S, self._watch_s))
                self._changed.set()

    def _fail(self, version: int, error: RemoteError) -> None:
        _LOG.error("version %d of the weights was refused: %s", version, error)
        self._failure = error

    async def _bring_up_to(self, version: int, data: bytes) -> None:
        if version == self.acked:
            found = await self._client.keep_lease(self._learner_id, timeout_s=self._watch_s)
            if found >= version:
                return
            _LOG.warning(
                "the policy server is back at version %d: publishing %d again", found, version
            )
        await self._client.publish_weights(
            version,
            data,
            learner_id=self._learner_id,
            timeout_s=transfer_timeout_s(len(data)),
            retry=False,
        )
        self.acked = version
