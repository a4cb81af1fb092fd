"""A cluster in training whose services are processes, here or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from rlightning.buffer.remote_buffer import BufferClient, SampleClient
from rlightning.buffer.rendezvous import PRODUCER_SILENT
from rlightning.buffer.sharded_client import SHARD_MISSING, ShardedSampleClient
from rlightning.buffer.shards import unpack
from rlightning.cluster.backend import ClusterState, batch_size
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.progress import find_latencies
from rlightning.env.attached import PREFIX
from rlightning.env.remote_client import ActorCommand, EnvClient, EnvStatus
from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from rlightning.latency import LatencyStats
from rlightning.policy import PolicyDescription, PolicyFleet
from rlightning.policy.publisher import publish_timeout_s
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig, ServiceConfig

_T = TypeVar("_T")

_LOOK_TIMEOUT_S = 1.0
_CHECK_EVERY_S = 0.5
# An attempt that is given up too early would begin again from nothing, and so never succeed where
# every message takes its time.
_CONNECT_S = 5.0
_PATIENCE_S = 60.0
_PAUSE_S = 0.1
# A pause is answered when every group has ended its step.
_HOLD_S = 10.0
_SNAPSHOT_S = 600.0
# What a learner is told of, while a service is away, that everybody knows already.
_FOLLOWS = (PRODUCER_SILENT, SHARD_MISSING)
_PUBLISHING_KEPT = 256


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
        self._trace_cursor = 0
        self._latency = LatencyStats("first_use")
        self._publishing: dict[int, int] = {}
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
        self._policy = policy_fleet(self._launcher.config)
        await self._policy.start()
        self._buffers = buffer_clients(self._launcher.config)
        size = batch_size(self._launcher.config) or 0
        self._samples = sample_client(self._launcher.config, batch_size=size)

    async def _close(self) -> None:
        clients = (self._samples, *self._buffers, self._policy, self._env)
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
        """Returns the next batch's columns; None if there was none in time."""
        try:
            return self._loop.run(self._samples.next_batch(timeout_s)).columns
        except DeadlineExceededError:
            return None
        except UnavailableError as error:
            # While a service is away, producers are silent for a reason that people know of.
            silent = error.reason == PRODUCER_SILENT and time.monotonic() < self._silent_until
            if silent or (error.reason in _FOLLOWS and self._launcher.waiting):
                self._launcher.failed.wait(_PAUSE_S)
                return None
            raise

    def publish(self, version: int, weights: bytes) -> None:
        """Lets the policy act with new weights; returns when it does."""
        self._publishing[version] = time.monotonic_ns()
        if len(self._publishing) > _PUBLISHING_KEPT:
            del self._publishing[next(iter(self._publishing))]
        self._patiently(
            lambda timeout_s: self._policy.publish(version, weights, timeout_s=timeout_s),
            max(_PATIENCE_S, publish_timeout_s(len(weights))),
        )

    def hold(self, wanted: bool) -> None:
        """Pauses the actors, or lets them go on."""
        command: ActorCommand = "pause" if wanted else "start"
        self._patiently(lambda timeout_s: self._env.control(command, timeout_s=timeout_s + _HOLD_S))

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        """Sets the priorities of a batch's rows; rows of a buffer that has restarted are gone."""
        shards, indices = unpack(columns["sample_index"])
        for number, buffer in enumerate(self._buffers):
            mine = shards == number
            if not mine.any():
                continue
            rows = indices[mine], priorities[mine], columns["sample_generation"][mine]
            with contextlib.suppress(InvalidRequestError):
                self._patiently(partial(_update_priorities, buffer, rows))

    def snapshot(self) -> str | None:
        """Lets the buffer server write a snapshot and returns its name; None if it writes none.

        Several buffer servers write one each, and the names are joined by commas.
        """
        made = [
            self._loop.run(buffer.checkpoint(timeout_s=_SNAPSHOT_S)) for buffer in self._buffers
        ]
        written = [one.name for one in made if one is not None]
        return ",".join(written) or None

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        replicas = self._patiently(lambda timeout_s: self._policy.describe(timeout_s=timeout_s))
        return _newest(replicas)

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
            env = await self._env.describe(
                self._cursor, trace_cursor=self._trace_cursor, timeout_s=_LOOK_TIMEOUT_S
            )
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
        replicas, env, buffers = await asyncio.gather(
            self._policy.describe(timeout_s=_LOOK_TIMEOUT_S),
            self._describe_env(),
            asyncio.gather(*map(self._stats_of, self._buffers)),
        )
        self._cursor, self._trace_cursor = env.episode_cursor, env.trace_cursor
        for address, replica in replicas.items():
            self._record_first_uses(address, replica)
        latencies = dict(find_latencies(env.stats, "env."))
        servers = list(self._policy.clients)
        policies = {
            _prefix("policy", servers.index(address), len(servers)): replica.stats
            for address, replica in replicas.items()
        }
        shards = {_prefix("buffer", i, len(buffers)): stats for i, stats in enumerate(buffers)}
        for prefix, stats in {**policies, **shards}.items():
            for name, summary in find_latencies(stats, prefix):
                if prefix == "policy.":  # whose stages the env server knows from its answers, too
                    latencies.pop(name.replace(prefix, "env.", 1), None)
                latencies[name] = summary
        latencies.update(find_latencies(self._latency.summary(), "learner."))
        return ClusterState(
            env_steps=self._steps_before + self._steps,
            episodes=env.episodes,
            policy_version=_newest(replicas),
            latencies=latencies,
            traces=env.traces,
        )

    async def _stats_of(self, buffer: BufferClient) -> Mapping[str, Any]:
        try:
            return (await buffer.describe(timeout_s=_LOOK_TIMEOUT_S)).stats
        except (UnavailableError, DeadlineExceededError):
            if len(self._buffers) == 1:
                raise
            return {}  # one of several, which the learner may do without

    def _record_first_uses(self, address: str, policy: PolicyDescription) -> None:
        """Records how long versions took from here to their first use at a policy server."""
        offset = self._policy.clients[address].offset
        for use in policy.stats.get("first_uses", ()):
            begun_ns = self._publishing.pop(int(use["version"]), None)
            if begun_ns is not None:
                taken = offset.uplink(begun_ns, int(use["used_ns"]))
                if taken is not None:
                    self._latency.record("first_use", *taken)

    def check(self) -> None:
        """Raises when a service is gone for good."""
        self._launcher.check()


async def _update_priorities(buffer: BufferClient, rows: Sequence[Any], timeout_s: float) -> int:
    indices, priorities, generations = rows
    return await buffer.update_priorities(indices, priorities, generations, timeout_s=timeout_s)


def _newest(replicas: Mapping[str, PolicyDescription]) -> int:
    return max(replica.policy_version for replica in replicas.values())


def _prefix(role: str, index: int, number: int) -> str:
    """Returns what the names of a server's latencies begin with: with its number, if of several."""
    return f"{role}." if number == 1 else f"{role}-{index}."


def policy_fleet(config: MainConfig, *, policy: str = "") -> PolicyFleet:
    """Returns what publishes to the policy servers of a config."""
    service = config.services.policy
    return PolicyFleet(service.dial_addresses, policy=policy, **dial_options(service))


def buffer_clients(config: MainConfig) -> list[BufferClient]:
    """Returns a client for each buffer server of a config."""
    options = dial_options(config.services.buffer)
    return [BufferClient(address, **options) for address in config.buffer_addresses]


def sample_client(config: MainConfig, *, batch_size: int = 0) -> SampleClient | ShardedSampleClient:
    """Returns what takes batches from the buffer server of a config, or from all of its shards.

    Args:
        config: The config.
        batch_size: Transitions in a batch; 0 for rollouts.
    """
    options = dial_options(config.services.buffer)
    if config.buffer.storage.type == "sharded":
        return ShardedSampleClient(config.buffer, batch_size=batch_size, **options)
    return SampleClient(config.buffer_addresses[0], batch_size=batch_size, **options)


def dial_options(service: ServiceConfig) -> dict[str, Any]:
    """Returns the arguments with which a client dials a service, without its address."""
    return {"rpc": service.rpc, "auth": service.auth}


def dial(service: ServiceConfig) -> dict[str, Any]:
    """Returns the arguments with which a client dials a service."""
    return {"address": service.dial_address, **dial_options(service)}
