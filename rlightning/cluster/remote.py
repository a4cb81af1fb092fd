"""A cluster in training whose services are processes, here or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from typing_extensions import Self

from rlightning.buffer.remote_buffer import BufferClient, SampleClient
from rlightning.buffer.rendezvous import PRODUCER_SILENT
from rlightning.buffer.sharded_client import SHARD_MISSING, ShardedSampleClient
from rlightning.buffer.shards import unpack
from rlightning.cluster.backend import ClusterState, batch_size
from rlightning.cluster.env_servers import EnvServers
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.progress import find_latencies
from rlightning.env.attached import PREFIX
from rlightning.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from rlightning.latency import LatencyStats
from rlightning.policy import PolicyClient, PolicyDescription, PolicyFleet
from rlightning.policy.transfer import transfer_timeout_s
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
# Beside the time that an env server takes to say that a round is on its way.
_ROUND_S = 5.0
# What a learner is told of, while a service is away, that everybody knows already.
_FOLLOWS = (PRODUCER_SILENT, SHARD_MISSING)
_PUBLISHING_KEPT = 256


class RemoteBackend:
    """Dials the services of a launcher; a `Backend`.

    Use as a context manager: the connections live inside.

    Args:
        launcher: Has started its services.
        world_size: How many learners share the data; this one is rank 0.
        report: Takes one line for people; called from several threads.
    """

    def __init__(
        self,
        launcher: LocalLauncher,
        world_size: int = 1,
        *,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._launcher = launcher
        self._world_size = world_size
        self._report = report
        self._loop = shared_loop()
        self._latency = LatencyStats("first_use")
        self._publishing: dict[int, int] = {}
        self._silent_until = 0.0

    def __enter__(self) -> Self:
        self._loop.run(self._open())
        try:
            self._patiently(lambda _: self._samples.start(_CONNECT_S))
            if not self._launcher.hosts_envs:
                self._patiently(self._env.look)  # what it has done before is not of this run
        except BaseException:
            self._loop.run(self._close())
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self._close())

    async def _open(self) -> None:
        services = self._launcher.config.services
        self._env = EnvServers(services.env, fresh=self._launcher.hosts_envs, report=self._report)
        self._policy = policy_fleet(self._launcher.config)
        await self._policy.start()
        self._buffers = buffer_clients(self._launcher.config)
        size = batch_size(self._launcher.config) or 0
        self._samples = sample_client(
            self._launcher.config, batch_size=size, world_size=self._world_size
        )

    async def _close(self) -> None:
        clients = (self._samples, *self._buffers, self._policy, self._env)
        await asyncio.gather(*(client.close() for client in clients))

    @property
    def config(self) -> MainConfig:
        """The config of the launcher, with the addresses that were bound."""
        return self._launcher.config

    def env_metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows.

        Waits for those that have to attach before any is stepped.
        """
        service = self._launcher.config.services.env
        deadline = time.monotonic() + service.clients_timeout_s
        while True:
            self._patiently(self._env.look)
            envs = self._env.envs
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
            max(_PATIENCE_S, transfer_timeout_s(len(weights))),
        )

    def hold(self, wanted: bool) -> None:
        """Pauses the actors, or lets them go on."""
        self._patiently(lambda timeout_s: self._env.hold(wanted, timeout_s + _HOLD_S))

    def collect(self, begin: int, stop: Callable[[], bool]) -> None:
        """Lets the envs take a round of lockstep, and returns when it is stored.

        Args:
            begin: As of `Source.collect`.
            stop: As of `Source.collect`.
        """
        self._loop.run(self._samples.ack())  # a rollout that is used makes room
        steps = self._launcher.config.buffer.rollout_length
        while not self._patiently(
            lambda timeout_s: self._env.collect(begin, steps, timeout_s + _ROUND_S)
        ):
            if stop():
                return
        if self._launcher.config.buffer.type == "ReplayBuffer":
            # What is open goes to the storage, so that nothing depends on who writes next.
            ids = [str(env.env_id) for env in self.env_metas()]
            for buffer in self._buffers:
                self._patiently(partial(_truncate, buffer, ids))

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        """Sets the priorities of a batch's rows; rows of a buffer that has restarted are gone."""
        shards, indices = unpack(columns["sample_index"])
        for number, buffer in enumerate(self._buffers):
            mine = shards == number
            if not mine.any():
                continue
            rows = indices[mine], priorities[mine], columns["sample_generation"][mine]
            with contextlib.suppress(InvalidRequestError):
                table = self._launcher.config.learner.table
                self._patiently(partial(_update_priorities, buffer, rows, table))

    def checkpoint_buffer(self, keep: Sequence[str]) -> str | None:
        """Lets the buffer server write a checkpoint and returns its name; None if it writes none.

        Several buffer servers write one each, and the names are joined by commas.

        Args:
            keep: As of `Backend.checkpoint_buffer`.
        """
        made = []
        for number, buffer in enumerate(self._buffers):
            mine = [name for names in keep for name in names.split(",")[number : number + 1]]
            made.append(self._loop.run(buffer.checkpoint(mine, timeout_s=_SNAPSHOT_S)))
        written = [one.name for one in made if one is not None]
        return ",".join(written) if len(written) == len(made) else None

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        replicas = self._patiently(lambda timeout_s: self._policy.describe(timeout_s=timeout_s))
        return _newest(replicas)

    def env_steps(self) -> int:
        """Returns the env steps taken in this run; every row counts.

        While an env server is away: as it was last seen.
        """
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            self._loop.run(self._env.look(_LOOK_TIMEOUT_S))
        return self._env.env_steps

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
        replicas, _, buffers = await asyncio.gather(
            self._policy.describe(timeout_s=_LOOK_TIMEOUT_S),
            self._env.look(_LOOK_TIMEOUT_S),
            asyncio.gather(*map(self._stats_of, self._buffers)),
        )
        clients = self._policy.clients
        present = {a: replica for a, replica in replicas.items() if a in clients}
        for address, replica in present.items():
            self._record_first_uses(clients[address], replica)
        envs = self._env.stats()
        latencies = {
            name: summary
            for env, stats in envs.items()
            for name, summary in find_latencies(stats, f"{env}.")
        }
        servers = list(clients)
        policies = {
            _prefix("policy", servers.index(address), len(servers)): replica.stats
            for address, replica in present.items()
        }
        shards = {_prefix("buffer", i, len(buffers)): stats for i, stats in enumerate(buffers)}
        for prefix, stats in {**policies, **shards}.items():
            for name, summary in find_latencies(stats, prefix):
                if prefix == "policy.":  # whose stages the env servers know from its answers, too
                    for env in envs:
                        latencies.pop(name.replace(prefix, f"{env}.", 1), None)
                latencies[name] = summary
        latencies.update(find_latencies(self._latency.summary(), "learner."))
        episodes, traces = self._env.news()
        return ClusterState(
            env_steps=self._env.env_steps,
            episodes=episodes,
            policy_version=_newest(replicas),
            latencies=latencies,
            traces=traces,
        )

    async def _stats_of(self, buffer: BufferClient) -> Mapping[str, Any]:
        try:
            return (await buffer.describe(timeout_s=_LOOK_TIMEOUT_S)).stats
        except (UnavailableError, DeadlineExceededError):
            if len(self._buffers) == 1:
                raise
            return {}  # one of several, which the learner may do without

    def _record_first_uses(self, client: PolicyClient, policy: PolicyDescription) -> None:
        """Records how long versions took from here to their first use at a policy server."""
        offset = client.offset
        for use in policy.stats.get("first_uses", ()):
            begun_ns = self._publishing.pop(int(use["version"]), None)
            if begun_ns is not None:
                taken = offset.uplink(begun_ns, int(use["used_ns"]))
                if taken is not None:
                    self._latency.record("first_use", *taken)

    def check(self) -> None:
        """Raises when a service is gone for good."""
        self._launcher.check()


async def _truncate(buffer: BufferClient, env_ids: Sequence[str], timeout_s: float) -> int:
    return await buffer.truncate(env_ids, timeout_s=timeout_s)


async def _update_priorities(
    buffer: BufferClient, rows: Sequence[Any], table: str, timeout_s: float
) -> int:
    indices, priorities, generations = rows
    return await buffer.update_priorities(
        indices, priorities, generations, table, timeout_s=timeout_s
    )


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


def sample_client(
    config: MainConfig, *, batch_size: int = 0, rank: int = 0, world_size: int = 1
) -> SampleClient | ShardedSampleClient:
    """Returns what takes batches from the buffer server of a config, or from all of its shards.

    Args:
        config: The config.
        batch_size: Transitions in a batch; 0 for rollouts.
        rank: Which of `world_size` learners will take them, where there is one buffer server.
        world_size: How many learners there are.
    """
    options = {**dial_options(config.services.buffer), "table": config.learner.table}
    if config.buffer.storage.type == "sharded":
        return ShardedSampleClient(config.buffer, batch_size=batch_size, **options)
    # In lockstep nothing is drawn before its time.
    options["prefetch"] = 0 if config.train.lockstep else 1
    options |= {"rank": rank, "world_size": world_size}
    return SampleClient(config.buffer_addresses[0], batch_size=batch_size, **options)


def dial_options(service: ServiceConfig) -> dict[str, Any]:
    """Returns the arguments with which a client dials a service, without its address."""
    return {"rpc": service.rpc, "auth": service.auth}


def dial(service: ServiceConfig) -> dict[str, Any]:
    """Returns the arguments with which a client dials a service."""
    return {"address": service.dial_address, **dial_options(service)}
