"""A cluster in training whose services are processes, here or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from rlightning.buffer.remote_buffer import BufferClient, SampleClient
from rlightning.cluster.backend import ClusterState
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.progress import find_latencies
from rlightning.env.attached import PREFIX
from rlightning.env.remote_client import EnvClient, EnvStatus
from rlightning.errors import AlreadyExistsError, DeadlineExceededError, UnavailableError
from rlightning.policy import PolicyClient, WeightPublisher
from rlightning.policy.publisher import publish_timeout_s
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta
from rlightning.utils.config import ServiceConfig

_T = TypeVar("_T")

_LOOK_TIMEOUT_S = 1.0
_CHECK_EVERY_S = 0.5
# An attempt that is given up too early would begin again from nothing, and so never succeed where
# every message takes its time.
_CONNECT_S = 5.0
_PATIENCE_S = 60.0
_PAUSE_S = 0.1


class RemoteBackend:
    """Dials the services of a launcher; a `Backend`.

    Use as a context manager: the connections live inside.

    Args:
        launcher: Has started its services.
    """

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._loop = shared_loop()
        self._cursor = 0
        self._steps_before = 0
        self._steps = 0
        self._silent_until = 0.0
        self._counting = asyncio.Lock()

    def __enter__(self) -> Self:
        self._loop.run(self._open())
        try:
            self._patiently(lambda _: self._samples.start(_CONNECT_S))
            if self._launcher.config.services.env.address is not None:
                # It may have worked for others before.
                status = self._patiently(lambda timeout_s: self._env.describe(timeout_s=timeout_s))
                self._cursor = status.episode_cursor
                self._steps, self._steps_before = status.env_steps, -status.env_steps
        except BaseException:
            self._loop.run(self._close())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.run(self._close())

    async def _open(self) -> None:
        services = self._launcher.config.services
        self._env = EnvClient(**dial(services.env))
        self._policy = PolicyClient(**dial(services.policy))
        self._buffer = BufferClient(**dial(services.buffer))
        self._samples = SampleClient(**dial(services.buffer))
        self._publisher = WeightPublisher(self._policy)
        self._publisher.start()

    async def _close(self) -> None:
        await self._publisher.close()
        clients = (self._samples, self._buffer, self._policy, self._env)
        await asyncio.gather(*(client.close() for client in clients))

    def env_metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows.

        Waits for those that have to attach before any is stepped.
        """
        service = self._launcher.config.services.env
        deadline = time.monotonic() + service.clients_timeout_s
        while True:
            envs = self._patiently(
                lambda timeout_s: self._env.describe(self._cursor, timeout_s=timeout_s)
            ).envs
            attached = sum(str(env.env_id).startswith(PREFIX) for env in envs)
            if envs and attached >= service.min_clients:
                # Nobody could write before, so the silence of the buffer begins now.
                timeout_s = self._launcher.config.buffer.producer_timeout_s
                self._silent_until = time.monotonic() + timeout_s
                return envs
            self._launcher.check()
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"{len(envs)} envs, of which {attached} are attached, after "
                    f"{service.clients_timeout_s:g} s (services.env.clients_timeout_s)"
                )
            self._launcher.failed.wait(_PAUSE_S)

    def next_batch(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Returns the next rollout's columns [T, N, ...]; None if there was none in time."""
        try:
            return self._loop.run(self._samples.next_batch(timeout_s)).columns
        except DeadlineExceededError:
            return None
        except UnavailableError as error:
            # While a service is away, producers are silent for a reason that people know of.
            if error.reason == "PRODUCER_SILENT" and (
                self._launcher.waiting or time.monotonic() < self._silent_until
            ):
                self._launcher.failed.wait(_PAUSE_S)
                return None
            raise

    def publish(self, version: int, weights: bytes) -> None:
        """Lets the policy act with new weights; returns when it does."""
        self._patiently(
            lambda timeout_s: self._publisher.publish(version, weights, timeout_s=timeout_s),
            max(_PATIENCE_S, publish_timeout_s(len(weights))),
        )

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        return self._patiently(
            lambda timeout_s: self._policy.describe(timeout_s=timeout_s)
        ).policy_version

    def env_steps(self) -> int:
        """Returns the env steps taken in this run; every row counts.

        While the env server is away: as it was last seen.
        """
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            self._loop.run(self._describe_env())
        return self._steps_before + self._steps

    async def _describe_env(self) -> EnvStatus:
        # One at a time: an answer that is overtaken would look like that of a server come back.
        async with self._counting:
            env = await self._env.describe(self._cursor, timeout_s=_LOOK_TIMEOUT_S)
            if env.env_steps < self._steps:  # an env server that came back counts from 0
                self._steps_before += self._steps
            self._steps = env.env_steps
        return env

    def _patiently(
        self, call: Callable[[float], Coroutine[Any, Any, _T]], patience_s: float = _PATIENCE_S
    ) -> _T:
        """Calls a service again while it may come back; one that is gone for good ends this.

        Args:
            call: Takes the seconds it may wait; repeating it does no harm.
            patience_s: How long a service that answers may let this wait, in seconds.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._loop.run(call(_CHECK_EVERY_S))
            except (UnavailableError, AlreadyExistsError, DeadlineExceededError):
                self._launcher.check()
                if time.monotonic() > deadline and not self._launcher.waiting:
                    raise
                self._launcher.failed.wait(_PAUSE_S)

    def observe(self) -> ClusterState:
        """Returns how the services fare; each episode is reported once."""
        return self._loop.run(self._observe())

    async def _observe(self) -> ClusterState:
        policy, buffer, env = await asyncio.gather(
            self._policy.describe(timeout_s=_LOOK_TIMEOUT_S),
            self._buffer.describe(timeout_s=_LOOK_TIMEOUT_S),
            self._describe_env(),
        )
        self._cursor = env.episode_cursor
        latencies = dict(find_latencies(env.stats, "env."))
        for prefix, stats in (("policy.", policy.stats), ("buffer.", buffer.stats)):
            for name, summary in find_latencies(stats, prefix):
                # The env server knows the policy server's stages from its answers, too.
                latencies.pop(name.replace(prefix, "env.", 1), None)
                latencies[name] = summary
        return ClusterState(
            env_steps=self._steps_before + self._steps,
            episodes=env.episodes,
            policy_version=policy.policy_version,
            latencies=latencies,
        )

    def check(self) -> None:
        """Raises when a service is gone for good."""
        self._launcher.check()


def dial(service: ServiceConfig) -> dict[str, Any]:
    """Returns the arguments with which a client dials a service."""
    return {"address": service.dial_address, "rpc": service.rpc, "auth": service.auth}
